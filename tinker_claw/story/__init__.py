"""The ledger in words: what happened, why, and whether it helps.

Rule: read from outside and only read, also while a gateway runs. A user's words are shown where
he asks for them, and nowhere else.
"""
