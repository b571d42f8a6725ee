"""Replies to prompts with images, from a model whose text half is served in this process.

Rule: no prefix is shared and requests are not batched; each has a row and a KV cache of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from local_gpu.model.load import own_stream
from local_gpu.model.vision import Vision
from local_gpu.sample.drawing import Drawn
from tinker_claw.errors import SamplerError
from tinker_claw.types import PlacedImage, Tokens

Draw = Callable[[Tensor], Drawn]


async def stream(
    vision: Vision, module: Any, prompt: Tokens, images: Sequence[PlacedImage], draws: Draw
) -> AsyncGenerator[Drawn]:
    """Yield tokens of one reply, computed in a thread, until it is closed.

    Args:
        module: the text half that answers, with its adapter.
        draws: draws the next token from logits [1, V].

    Raises:
        SamplerError: the images do not fit the prompt, or computing failed.
    """
    row = _Row(vision)
    try:
        logits = await asyncio.to_thread(row.begin, module, prompt, images)
        while True:
            token = draws(logits)
            yield token
            logits = await asyncio.to_thread(row.go_on, token.token)
    except (RuntimeError, ValueError) as error:
        raise SamplerError(f"The sampler failed over an image: {error}") from error


class _Row:
    """One reply: its model, its cache, and the position of its next token."""

    _body: Any
    _head: Any
    _next: int

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._cache = DynamicCache()

    def begin(self, module: Any, prompt: Tokens, images: Sequence[PlacedImage]) -> Tensor:
        """Compute the prompt; return logits [1, V] after it."""
        self._body, self._head = self._vision.over(module), module.get_output_embeddings()
        ids = torch.tensor([prompt], device=self._vision.device)
        kinds = torch.zeros_like(ids)
        for image in images:
            kinds[0, image.at : image.at + image.tokens] = 1
        if bool((ids == self._vision.placeholder).ne(kinds == 1).any()):
            raise SamplerError("The prompt's placeholders are not where its images are.")
        seen = self._vision.pixels(images)
        with torch.inference_mode(), own_stream(self._vision.device):
            positions, shift = self._body.get_rope_index(
                ids, image_grid_thw=seen["image_grid_thw"], mm_token_type_ids=kinds
            )
            self._next = len(prompt) + int(shift)
            return self._computed(
                input_ids=ids, position_ids=positions, mm_token_type_ids=kinds, **seen
            )

    def go_on(self, token: int) -> Tensor:
        """Compute one more token; return logits [1, V] after it."""
        ids = torch.tensor([[token]], device=self._vision.device)
        positions = torch.full((3, 1, 1), self._next, device=self._vision.device)
        self._next += 1
        with torch.inference_mode(), own_stream(self._vision.device):
            # As embeddings: a sampled placeholder token stands for no image.
            embeds = self._body.get_input_embeddings()(ids)
            return self._computed(inputs_embeds=embeds, position_ids=positions)

    def _computed(self, **inputs: Any) -> Tensor:
        hidden = self._body(**inputs, past_key_values=self._cache, use_cache=True).last_hidden_state
        return self._head(hidden[:, -1]).float()
