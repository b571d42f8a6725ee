"""Keys and values of sequences that are computed bit by bit, and a pass over several of them.

Rule: the attention is the trainer's own (`tree/kernels.py`), per sequence and without a mask over
the batch. So a token's logprob is that of one pass over its whole sequence, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from local_gpu.model.vision import BatchImages, Vision
from local_gpu.tree.kernels import attend
from local_gpu.tree.prefix_tree import grow
from tinker_claw.errors import SamplerError
from tinker_claw.types import Images, Tokens

_MIN_SPARE_TOKENS: Final = 64
"""Further tokens that a buffer has room for, at least."""


class Row:
    """Keys and values of one sequence, in every layer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Tokens whose keys and values are here."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, [1, G, room, D]."""

    def __len__(self) -> int:
        return len(self.tokens)

    def prefix(self, count: int) -> Row:
        """Copy the first `count` tokens."""
        row = Row()
        row.tokens = self.tokens[:count]
        for layer, kept in self._layers.items():
            keys, values = (_with_room(kind[:, :, :count], count) for kind in kept)
            row._layers[layer] = keys, values
        return row

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [1, G, n, D] behind `tokens`, which the caller extends after the last layer; return
        all keys and values of the layer."""
        done, end = len(self.tokens), len(self.tokens) + key.shape[2]
        kept = self._layers.get(layer)
        if kept is None or kept[0].shape[2] < end:
            before = kept or (key[:, :, :0], value[:, :, :0])
            keys, values = (_with_room(kind[:, :, :done], end) for kind in before)
            self._layers[layer] = kept = keys, values
        keys, values = kept
        keys[:, :, done:end] = key
        values[:, :, done:end] = value
        return keys[:, :, :end], values[:, :, :end]


def _with_room(kept: Tensor, tokens: int) -> Tensor:
    """Copy [1, G, n, D] into a buffer for these tokens and half as many more."""
    batch, groups, n, width = kept.shape
    buffer = kept.new_empty(batch, groups, tokens + max(_MIN_SPARE_TOKENS, tokens // 2), width)
    buffer[:, :, :n] = kept
    return buffer


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """Attention of one row of a pass that holds new tokens of several sequences, end to end."""

    parts: Sequence[tuple[Row, int]]
    """Each sequence, and its number of new tokens."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, G, T, D] -> [1, H, T, D]."""
        counts = [count for _, count in self.parts]
        queries, keys, values = (tensor.split(counts, 2) for tensor in (query, key, value))
        out = [
            attend(q, *row.write(layer, k, v), scale)
            for (row, _), q, k, v in zip(self.parts, queries, keys, values, strict=True)
        ]
        return torch.cat(out, dim=2)


@torch.inference_mode()
def hidden(module: Any, parts: Sequence[tuple[Row, Sequence[int], int]]) -> Tensor:
    """Compute new tokens of sequences, and add them to their rows.

    Args:
        module: a transformers causal LM with `ATTENTION`.
        parts: each row, its new tokens, and how far their positions are from their numbers.

    Returns:
        The last hidden states (R, hidden) of each sequence's last new token.
    """
    ids = [token for _, tokens, _ in parts for token in tokens]
    positions = [len(row) + shift + i for row, tokens, shift in parts for i in range(len(tokens))]
    ends, at = list[int](), 0
    for _, tokens, _ in parts:
        ends.append((at := at + len(tokens)) - 1)
    states = module.base_model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        use_cache=False,
        cached=CachedAttention([(row, len(tokens)) for row, tokens, _ in parts]),
    ).last_hidden_state
    for row, tokens, _ in parts:
        row.tokens.extend(tokens)
    return states[0, ends]


@torch.inference_mode()
def prefill_with_images(
    vision: Vision, module: Any, row: Row, prompt: Tokens, images: Images
) -> tuple[Tensor, int]:
    """Compute a whole prompt with images, and add it to its empty row.

    Returns:
        The last hidden state (1, hidden) of its last token, and how far the positions behind it are
        from the numbers of their tokens.

    Raises:
        SamplerError: the images do not fit the prompt.
    """
    pictures, ids = BatchImages(vision, module), torch.tensor(prompt)
    painted = pictures.painted(ids, images)
    if bool((ids == vision.placeholder).ne(painted != ids).any()):
        raise SamplerError("The prompt's placeholders are not where its images are.")
    cached = CachedAttention([(row, len(prompt))])
    states = pictures.hidden(grow([painted]), cached=cached)
    assert states is not None
    row.tokens.extend(prompt)
    return states[0, -1:], int(pictures.positions(painted).max()) + 1 - len(prompt)
