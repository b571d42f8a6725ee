"""Sequences as a tree of shared prefixes, and how a batch is cut into passes and among ranks."""
