"""Images in a prompt: how many tokens each takes, and their positions.

Rule: a chat format writes one placeholder per image; here it is repeated as often as the model's
own image processor does for an image of that size. No image is decoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tinker_claw.errors import RequestError
from tinker_claw.images import Image
from tinker_claw.served import Prompt

SEEING: Final = frozenset({"qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"})
"""Chat formats that have a place for images, with Qwen's image processor."""
_PLACEHOLDER: Final = "<|image_pad|>"
_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_LONGEST: Final = 200
"""Largest ratio of an image's sides, as in the processor."""


@dataclass(frozen=True, slots=True)
class Eyes:
    """Parameters of a Qwen image processor (Qwen2-VL to Qwen3.8)."""

    placeholder: int
    """Id of the token that stands for a part of an image."""
    side: int
    """Pixels on a side of the square that one token stands for."""
    least: int
    """Fewest pixels; a smaller image is enlarged."""
    most: int
    """Most pixels; a larger image is made smaller."""

    @classmethod
    def load(cls, folder: str, family: str, tokenizer: Any) -> Eyes | None:
        """Read the image processor's parameters; None if the model has no known processor.

        Args:
            folder: of the tokenizer, which also holds the processor's files.
        """
        added_tokens: dict[str, int] = tokenizer.get_added_vocab()
        if family not in SEEING or _PLACEHOLDER not in added_tokens:
            return None
        try:
            read = (read_json(Path(folder) / name) for name in _FILES)
            config = next(filter(None, read), dict[str, Any]())
            config = config.get("image_processor") or config
            size = config["size"]
            side = config["patch_size"] * config["merge_size"]
            placeholder = added_tokens[_PLACEHOLDER]
            return cls(placeholder, side, size["shortest_edge"], size["longest_edge"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def tokens(self, image: Image) -> int:
        """Return the number of tokens that an image takes.

        Source: smart_resize of transformers' Qwen2VLImageProcessor, which this equals: both sides
        become multiples of `side`, and their product is brought into bounds.

        Raises:
            RequestError: the processor does not take an image of this shape.
        """
        sides = image.height, image.width
        if max(sides) > _LONGEST * min(sides):
            raise image.wrong(f"is more than {_LONGEST} times as long as wide, or as wide as long")
        count = math.prod(round(length / self.side) for length in sides)
        area = image.width * image.height
        if count * self.side**2 > self.most:
            factor = math.sqrt(area / self.most)
            return math.prod(max(1, math.floor(n / factor / self.side)) for n in sides)
        if count * self.side**2 < self.least:
            factor = math.sqrt(self.least / area)
            return math.prod(math.ceil(n * factor / self.side) for n in sides)
        return count

    def spread(self, prompt: Prompt, images: Sequence[Image]) -> Prompt:
        """Return the prompt with the placeholder of each last image repeated once per token.

        Raises:
            RequestError: the chat format has left an image out.
        """
        pads = [at for at, token in enumerate(prompt.tokens) if token == self.placeholder]
        if len(pads) < len(images):
            raise RequestError(
                "The model's chat format has no place for images in these messages.",
                param="messages",
            )
        ids, done, places, hint_at = list[int](), 0, list[tuple[int, int]](), prompt.hint_at
        for at, image in zip(pads[-len(images) :], images, strict=True):
            count = self.tokens(image)
            ids += prompt.tokens[done:at]
            places.append((len(ids), count))
            ids += [self.placeholder] * count
            done = at + 1
            if prompt.hint_at is not None and hint_at is not None and at < prompt.hint_at:
                hint_at += count - 1
        ids += prompt.tokens[done:]
        return replace(prompt, tokens=tuple(ids), hint_at=hint_at, images=tuple(places))


def read_json(file: Path) -> dict[str, Any]:
    """Read a file of a model; {} where it has none such."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
