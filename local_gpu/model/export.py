"""Merge base and adapter into one model in Hugging Face's format, for programs without adapters.

An adapter trained on a 4-bit base is merged into the unquantised base, which is what it is used
with; those weights lack the rounding that it was trained with.

Rule: the sum W + B A alpha / rank is formed in float32 and rounded once, to the base's own type.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForImageTextToText

from local_gpu.config import Dtype
from local_gpu.model.files import read_adapter, writing
from local_gpu.model.load import open_base
from local_gpu.model.lora import BaseModel
from tinker_claw.errors import BackendError, ConfigError

_TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt")
_OF_THE_MODEL = ("config.json", "manifest.json", "model.safetensors.index.json")
"""Files that are written anew, or not true of the merged model."""


def export_merged(
    model: str,
    adapter: Path,
    target: Path,
    *,
    tokenizer: str | None = None,
    device: str = "cpu",
) -> None:
    """Write `model` with a published adapter added to its weights, and its tokenizer.

    Args:
        model: the base model's folder.
        adapter: a folder in PEFT's format.
        target: does not exist yet.
        tokenizer: its folder; the model's unless set.
        device: where the sum is formed.

    Raises:
        BackendError: the adapter is missing, damaged, or of another base model; or the device has
            no room for that.
        ConfigError: the adapter changes a layer that is not linear.
        OSError: it cannot be written.
    """
    try:
        merged = _whole(_merged(model, adapter, device))
    except RuntimeError as error:  # e.g. a running gateway has taken the GPU
        raise BackendError(
            f"{model} cannot be merged on device {device!r}: {error}. Take --device cpu."
        ) from error
    with writing(target):
        merged.save_pretrained(target)
    for pattern in _TOKENIZER:
        for file in Path(tokenizer or model).glob(pattern):
            if file.name not in _OF_THE_MODEL and not (target / file.name).exists():
                shutil.copy(file, target)


def _merged(model: str, adapter: Path, device: str) -> BaseModel:
    base = open_base(model, device=device, dtype=_format(adapter), threads=None)
    saved = read_adapter(adapter, base)
    scale = saved.shape.alpha / saved.shape.rank
    for name, down in saved.tensors.items():
        path, separator, _ = name.partition(".lora_A.")
        if separator:
            up = saved.tensors[f"{path}.lora_B.weight"]
            _untie(base, path)
            _add(base, path, scale * (up.float() @ down.float()))
    return base


def _format(adapter: Path) -> Dtype:
    """Number format of a published adapter: that of the base in its run."""
    with (
        suppress(OSError, SafetensorError),  # `read_adapter` says what is wrong
        safe_open(adapter / "adapter_model.safetensors", framework="pt") as file,
    ):
        if any(file.get_slice(name).get_dtype() == "BF16" for name in file.keys()):  # noqa: SIM118
            return "bfloat16"
    return "float32"


def _whole(base: BaseModel) -> Any:
    """Return the model that the files hold, of which the base may be the text half alone."""
    if not any(base.part):
        return base.module
    whole = AutoModelForImageTextToText.from_pretrained(
        base.source, dtype=base.dtype, use_safetensors=True
    )
    text = base.module.state_dict()
    whole.load_state_dict({base.name_in_files(n): t for n, t in text.items()}, strict=False)
    return whole


def _untie(base: BaseModel, path: str) -> None:
    """Give a head that is tied to the input embedding weights of its own, as LoRA is on it
    alone."""
    layer = base.module.get_submodule(path)
    if layer.weight is base.module.get_input_embeddings().weight:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        base.module.config.get_text_config().tie_word_embeddings = False
        base.module.config.tie_word_embeddings = False


def _add(base: BaseModel, path: str, change: torch.Tensor) -> None:
    """Add a change (out, in) to the weights of a layer."""
    layer = base.module.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"{path} is no linear layer, so the adapter cannot be merged into it: take --adapter."
        )
    with torch.no_grad():
        layer.weight.copy_(layer.weight.float() + change.to(base.device))
