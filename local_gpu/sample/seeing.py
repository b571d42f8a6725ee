"""Replies to prompts with images, from a model whose text half is served in this process.

The text half of Qwen3-VL is a Qwen3 and is loaded, trained and sampled as one (`model/load.py`).
For a prompt with images the other half is loaded once, and computes over the layers of the version
that answers: image features, positions in three dimensions, features for the first layers.

Rule: no prefix is shared and requests are not batched; each is a row and a cache of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib import import_module
from io import BytesIO
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, DynamicCache

from local_gpu.model.load import SEEING, config_of, own_stream
from local_gpu.model.lora import BaseModel, clone
from local_gpu.sample.drawing import Drawn, Recipe, draw
from tinker_claw.errors import RequestError, SamplerError
from tinker_claw.images import Image
from tinker_claw.types import PlacedImage, Tokens

Draw = Callable[[Tensor], Drawn]


class Vision:
    """The half of a model that sees. Its weights are loaded with the first image."""

    def __init__(self, base: BaseModel, placeholder: int, processor: Any) -> None:
        """Made by `of`."""
        self.placeholder = placeholder
        """Id of the token that stands for a part of an image."""
        self._base = base
        self._processor = processor
        self._whole: Any = None
        self._lock = Lock()

    @classmethod
    def of(cls, base: BaseModel) -> Vision | None:
        """Return the other half of a base; None where there is none, or it is not known here."""
        config = config_of(base.source)
        if config.model_type not in SEEING:
            return None
        # transformers' usual one needs torchvision; most models here have no eyes at all.
        module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        try:
            processor = module.Qwen2VLImageProcessorPil.from_pretrained(base.source)
        except OSError:  # its folder has no image processor
            return None
        return cls(base, config.image_token_id, processor)

    def tokens(self, data: bytes) -> int:
        """Return the number of tokens that an image takes.

        Raises:
            RequestError: it is too large or damaged, or no image that the processor takes.
        """
        image = Image(data, "The prompt's image")
        image.clean()  # pixels that are damaged are found here, and not within a reply
        try:
            with _opened(data):  # PNG or JPEG
                sides = image.height, image.width
            patches = self._processor.get_number_of_image_patches(*sides)
        except Exception as error:  # Pillow raises of many kinds
            raise RequestError(f"The prompt has an image that cannot be read: {error}.") from error
        return patches // self._processor.merge_size**2

    async def stream(
        self, module: Any, prompt: Tokens, images: Sequence[PlacedImage], draws: Draw
    ) -> AsyncGenerator[Drawn]:
        """Yield tokens of one reply, computed in a thread, until it is closed.

        Args:
            module: the text half that answers, with its adapter.
            draws: draws the next token from logits [1, V].

        Raises:
            SamplerError: the images do not fit the prompt, or computing failed.
        """
        row = _Row()
        try:
            logits = await asyncio.to_thread(self._begin, row, module, prompt, images)
            while True:
                token = draws(logits)
                yield token
                logits = await asyncio.to_thread(self._go_on, row, token.token)
        except (RuntimeError, ValueError) as error:
            raise SamplerError(f"The sampler failed over an image: {error}") from error

    def _begin(
        self, row: _Row, module: Any, prompt: Tokens, images: Sequence[PlacedImage]
    ) -> Tensor:
        row.body, row.head = self._over(module), module.get_output_embeddings()
        ids = torch.tensor([prompt], device=self._base.device)
        kinds = torch.zeros_like(ids)
        for image in images:
            kinds[0, image.at : image.at + image.tokens] = 1
        if bool((ids == self.placeholder).ne(kinds == 1).any()):
            raise SamplerError("The prompt's placeholders are not where its images are.")
        files = [_opened(image.data) for image in images]
        seen = self._processor(images=files, return_tensors="pt").to(self._base.device)
        with torch.inference_mode(), own_stream(self._base.device):
            positions, shift = row.body.get_rope_index(
                ids, image_grid_thw=seen["image_grid_thw"], mm_token_type_ids=kinds
            )
            row.next = len(prompt) + int(shift)
            return row.computed(
                input_ids=ids, position_ids=positions, mm_token_type_ids=kinds, **seen
            )

    def _go_on(self, row: _Row, token: int) -> Tensor:
        ids = torch.tensor([[token]], device=self._base.device)
        positions = torch.full((3, 1, 1), row.next, device=self._base.device)
        row.next += 1
        with torch.inference_mode(), own_stream(self._base.device):
            # As embeddings: one that spells a placeholder shows no image.
            embeds = row.body.get_input_embeddings()(ids)
            return row.computed(inputs_embeds=embeds, position_ids=positions)

    def _over(self, module: Any) -> Any:
        """The whole model's body over the layers of a text half, and the same tensors."""
        with self._lock:
            if self._whole is None:
                self._whole = self._load()
            body = clone(self._whole)
        for name in ("embed_tokens", "layers", "norm"):
            setattr(body.language_model, name, getattr(module.model, name))
        return body

    def _load(self) -> Any:
        base = self._base
        body = AutoModelForImageTextToText.from_pretrained(base.source, dtype=base.dtype).model
        for name in ("embed_tokens", "layers", "norm"):
            setattr(body.language_model, name, nn.Module())  # the base has them already
        return body.to(base.device).eval().requires_grad_(False)


def _opened(data: bytes) -> Any:
    from PIL import Image as Pillow

    return Pillow.open(BytesIO(data), formats=("PNG", "JPEG"))


class _Row:
    """One reply: its model, its cache, and the position of its next token."""

    body: Any
    head: Any
    next: int

    def __init__(self) -> None:
        self._cache = DynamicCache()

    def computed(self, **inputs: Any) -> Tensor:
        """Logits [1, V] behind the last position."""
        hidden = self.body(**inputs, past_key_values=self._cache, use_cache=True).last_hidden_state
        return self.head(hidden[:, -1]).float()


def drawing(recipe: Callable[[], Recipe]) -> Draw:
    """Return a way to draw by the recipe of each token.

    Raises:
        SamplerError: (when it is called) the logits are not finite.
    """

    def draws(logits: Tensor) -> Drawn:
        (drawn,) = draw(logits, [recipe()])
        if drawn is None:
            raise SamplerError("The model's logits are not finite.")
        return drawn

    return draws
