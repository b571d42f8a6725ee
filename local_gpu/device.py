"""Where the base model runs and in which number format.

Rule: a device that cannot be used is a sentence before anything is loaded.
"""

from __future__ import annotations

from typing import Literal

import torch

from local_gpu.config import Dtype
from local_gpu.loading import load_base
from local_gpu.model import BaseModel, Quantization
from tinker_claw.errors import ConfigError


def open_base(
    source: str,
    *,
    device: str,
    dtype: Dtype,
    threads: int | None,
    quantization: Quantization = "none",
) -> BaseModel:
    """Load a base model; auto is CUDA where there is one, and bfloat16 there.

    Raises:
        ConfigError: the device cannot be used, or the model cannot be loaded.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(automatic if device == "auto" else device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used here: {error}. Try auto or cpu."
        ) from error
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    fitting = "bfloat16" if place.type == "cuda" else "float32"
    return load_base(
        source,
        device=place,
        dtype=formats[fitting if dtype == "auto" else dtype],
        quantization=quantization,
    )


def checkpoints_activations(base: BaseModel, setting: Literal["auto", "on", "off"]) -> bool:
    """auto is on for CUDA, where memory is what a long sequence runs out of."""
    return base.device.type == "cuda" if setting == "auto" else setting == "on"
