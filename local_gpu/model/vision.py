"""The vision half of a model, over its text half.

The text half of Qwen3-VL is a Qwen3 and is loaded, trained and sampled as one (`load.py`). For
images the vision half is loaded once, and runs over the layers of the requested version: image
features, positions in three dimensions, features for the first layers. It is never trained.

In a batch each image is encoded once. Its tokens get ids of their own, beyond the vocabulary: equal
for the same image, different for any other. So sequences share a prefix (`tree/`) if and only if
they have the same images there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from local_gpu.model.load import SEEING, config_of
from local_gpu.model.lora import BUILDING, BaseModel, clone
from local_gpu.tree.prefix_tree import PrefixTree
from tinker_claw.errors import AlignmentError, RequestError
from tinker_claw.images import Image
from tinker_claw.types import Images, PlacedImage

_PARTS = ("embed_tokens", "layers", "norm")
"""Modules of the text half."""


class Vision:
    """The vision half of a model. Its weights are loaded with the first image."""

    def __init__(self, base: BaseModel, placeholder: int, processor: Any) -> None:
        """Made by `of`."""
        self.placeholder = placeholder
        """Id of the token that stands for a part of an image."""
        self.device = base.device
        self._base = base
        self._processor = processor
        self._whole: Any = None

    @classmethod
    def of(cls, base: BaseModel) -> Vision | None:
        """Return the other half of a base; None where there is none, or it is not known here."""
        config = config_of(base.source)
        if config.model_type not in SEEING or not base.packs:
            return None
        # Not transformers' default processor, which needs torchvision.
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
        image.clean()  # finds damaged pixels here, not during a reply
        try:
            with _opened(data):  # PNG or JPEG
                sides = image.height, image.width
            patches = self._processor.get_number_of_image_patches(*sides)
        except Exception as error:  # Pillow raises many kinds
            raise RequestError(f"The prompt has an image that cannot be read: {error}.") from error
        return patches // self._processor.merge_size**2

    def pixels(self, images: Sequence[PlacedImage]) -> Any:
        """Return images as the whole model takes them: `pixel_values` and `image_grid_thw`."""
        files = [_opened(image.data) for image in images]
        return self._processor(images=files, return_tensors="pt").to(self.device)

    def over(self, module: Any) -> Any:
        """Return the whole model's body over the layers of a text half, sharing its tensors."""
        with BUILDING:
            if self._whole is None:
                self._whole = self._load()
            body = clone(self._whole)
        for name in _PARTS:
            setattr(body.language_model, name, getattr(module.model, name))
        return body

    def _load(self) -> Any:
        base = self._base
        body = AutoModelForImageTextToText.from_pretrained(
            base.source, dtype=base.dtype, use_safetensors=True
        ).model
        for name in _PARTS:
            setattr(body.language_model, name, nn.Module())  # the base has them already
        return body.to(base.device).eval().requires_grad_(False)


def _opened(data: bytes) -> Any:
    from PIL import Image as Pillow

    return Pillow.open(BytesIO(data), formats=("PNG", "JPEG"))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The vision encoder's output for one image of n tokens."""

    grid: Tensor
    """(1, 3) patches in time, height and width."""
    features: tuple[Tensor, ...]
    """(n, hidden) each: in place of the embeddings, and to be added after the first layers."""


class BatchImages:
    """The images of a batch, over one module."""

    def __init__(self, vision: Vision, module: Any) -> None:
        self._vision = vision
        self._body = vision.over(module)
        self._first = self._end = module.get_input_embeddings().num_embeddings
        self._ids: dict[bytes, int] = {}
        """Id of the first token of each image, by its file."""
        self._images: dict[int, PlacedImage] = {}
        self._seen: dict[int, _Seen] = {}
        """By the id of its first token."""

    def painted(self, sequence: Tensor, images: Images) -> Tensor:
        """Return a sequence with the ids of its images.

        Raises:
            AlignmentError: an image lies outside the sequence, or on another.
        """
        painted, done = sequence.clone(), 0
        for image in images:
            end = image.at + image.tokens
            if not done <= image.at < end <= len(sequence):
                raise AlignmentError(f"an image stands at {image.at}..{end}, where it cannot")
            first = self._ids.setdefault(image.data, self._end)
            if first == self._end:
                self._end += image.tokens
                self._images[first] = image
            if image.tokens != self._images[first].tokens:
                raise AlignmentError("the same image takes different numbers of tokens")
            painted[image.at : end] = torch.arange(first, first + image.tokens)
            done = end
        return painted

    def hidden(self, tree: PrefixTree, **attention: Callable[..., Tensor]) -> Tensor | None:
        """Return the last hidden states (1, T, hidden) of a tree; None: it shows no image.

        `attention`: see `causal_attention`.
        """
        in_image = tree.tokens >= self._first
        if not bool(in_image.any()):
            return None
        device = self._vision.device
        ids = tree.tokens.masked_fill(in_image, self._vision.placeholder).to(device)
        at = in_image.to(device)
        embeds = self._body.get_input_embeddings()(ids).detach().clone()
        first, *deeper = self._features(tree.tokens[in_image].tolist())
        embeds[at] = first
        positions = torch.zeros(3, len(ids), dtype=torch.int64)
        for rows in tree.rows:
            positions[:, rows] = self.positions(tree.tokens[rows])
        return self._body.language_model(
            inputs_embeds=embeds[None],
            position_ids=positions.to(device)[:, None],
            visual_pos_masks=at[None],
            deepstack_visual_embeds=deeper,
            use_cache=False,
            **attention,
        ).last_hidden_state

    def _features(self, ids: Sequence[int]) -> list[Tensor]:
        """Join the features of tokens of images, from the embeddings on; each image is whole."""
        features = [self._see(first).features for first in ids if first in self._images]
        return [torch.cat(rows) for rows in zip(*features, strict=True)]

    def positions(self, painted: Tensor) -> Tensor:
        """Return (3, n) positions in time, height and width, as the whole model counts them."""
        kinds = (painted >= self._first).int()
        grids = [self._see(first).grid for first in painted.tolist() if first in self._images]
        grid = torch.cat(grids).cpu() if grids else None
        positions, _ = self._body.get_rope_index(
            painted[None], image_grid_thw=grid, mm_token_type_ids=kinds[None]
        )
        return positions[:, 0]

    @torch.no_grad()
    def _see(self, first: int) -> _Seen:
        if first not in self._seen:
            image = self._images[first]
            pixels = self._vision.pixels([image])
            encoded = self._body.get_image_features(**pixels, return_dict=True)
            layers = (encoded.pooler_output, *encoded.deepstack_features)
            # Of one image: a tensor, or a sequence of one, by the release of transformers.
            features = tuple(x if isinstance(x, Tensor) else torch.cat(x) for x in layers)
            if len(features[0]) != image.tokens:
                raise AlignmentError(
                    f"an image takes {len(features[0])} tokens, and not {image.tokens}"
                )
            self._seen[first] = _Seen(pixels["image_grid_thw"], features)
        return self._seen[first]


def paint(
    vision: Vision | None, module: Any, inputs: Sequence[tuple[Tensor, Images]]
) -> tuple[list[Tensor], BatchImages | None]:
    """Return sequences with the ids of their images, and the pictures; None: there are none.

    Raises:
        RequestError: there are images, and the model reads text only.
        AlignmentError: an image does not fit its sequence.
    """
    if not any(images for _, images in inputs):
        return [sequence for sequence, _ in inputs], None
    if vision is None:
        raise RequestError("There is an image, and what trains here reads text only.")
    pictures = BatchImages(vision, module)
    return [pictures.painted(sequence, images) for sequence, images in inputs], pictures
