"""The OpenAI-compatible endpoint that the agent talks to.

Rule: a turn is in the ledger before its client sees the end of the reply, and serving waits for
nothing but the sampler.
"""
