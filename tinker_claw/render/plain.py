"""Text to tokens without control tokens.

Rule: whatever the text says, no id of the result is an added token; decoding gives the text back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]


def encode_plain(text: str, encode: Encode, added: Sequence[str]) -> tuple[int, ...]:
    """Encode `text`, spelling out every string that the tokenizer would read as an added token.

    A tokenizer finds added tokens before anything else and in any text, so each occurrence is cut
    in two and the halves are encoded apart. A switch for this exists only for tokens marked
    special, and Qwen's <think> and <tool_call> are not.

    Args:
        added: the added tokens' texts.
    """
    ids: list[int] = []
    for piece in _cut(text, added):
        ids.extend(encode(piece))
    return tuple(ids)


def _cut(text: str, added: Sequence[str]) -> list[str]:
    """Pieces of `text`, none of which contains a string of `added` of two characters or more."""
    pieces: list[str] = []
    rest = [text] if text else []
    while rest:
        piece = rest.pop()
        found = [(piece.find(token), len(token)) for token in added if len(token) > 1]
        found = [(at, length) for at, length in found if at >= 0]
        if found:
            at, length = min(found)
            middle = at + length // 2
            rest += [piece[middle:], piece[:middle]]
        else:
            pieces.append(piece)
    return pieces
