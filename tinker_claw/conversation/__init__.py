"""Name a request's session, say who wrote what in it, and compare conversations.

Rule: pure functions of the request. Every decision carries a reason that a person can read.
"""
