"""Find a request's session and turn, and what it says about the turn before.

Rule: pure functions of the request. Every decision carries a reason that a person can read.
"""
