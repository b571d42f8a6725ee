"""OpenAI's chat format: bytes in, a validated request out, and the JSON that goes back.

Rule: what cannot be honoured is refused with a sentence that names the field; nothing is dropped
in silence. Pure functions; no state, no I/O.
"""
