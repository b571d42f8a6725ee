"""Wire formats: bytes in, a validated neutral request out, and the bytes that go back.

Rule: what cannot be honoured is refused with a sentence that names the field; nothing is dropped
in silence. No I/O.
"""
