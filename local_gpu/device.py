"""Where the base model runs and in which number format.

Rule: a device that cannot be used is a sentence before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final, Literal

import torch

from local_gpu.config import Dtype
from local_gpu.loading import load_base
from local_gpu.model import BaseModel, Quantization
from tinker_claw.errors import ConfigError

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


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
        if place.type == "cuda":
            keep_memory_whole()
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


def keep_memory_whole() -> None:
    """Passes of many lengths would otherwise leave a GPU's memory in pieces that none of them fits.

    Not by the variable, which servers that are started from here would inherit: those of vLLM that
    share a model cannot exchange memory of this kind. Where a user has set it, it counts.
    """
    torch_c: Any = import_module("torch._C")
    settle = getattr(torch_c, "_accelerator_setAllocatorSettings", None)
    if settle is None or any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        return
    with suppress(RuntimeError):  # a torch or a system that has no such memory: it works without
        settle("expandable_segments:True")


@contextmanager
def own_stream(device: torch.device) -> Generator[None]:
    """On a GPU, work of this thread beside that of others, which is done when this ends.

    In the stream that all threads share, each copy from the host would wait for the kernels that a
    training step has put there: seconds of them.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


def checkpoints_activations(base: BaseModel, setting: Literal["auto", "on", "off"]) -> bool:
    """auto is on for CUDA, where memory is what a long sequence runs out of."""
    return base.device.type == "cuda" if setting == "auto" else setting == "on"
