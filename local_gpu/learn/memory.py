"""Memory for models in training: how much there is, and how much each model takes.

Rule: a model that would not fit is refused before it is made, with figures; no allocation is tried.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from local_gpu.model.lora import BaseModel, LoraShape, lora_parameters
from local_gpu.plan.memory import DEFAULT_TOKENS, ModelSize, token_bytes
from tinker_claw.errors import RequestError

_MASTER_BYTES: Final = 16
"""Bytes per adapter parameter: float32 weight, gradient and two moments."""
_SHARE: Final = 0.5
"""Share of the memory that is free after loading; the rest is for samplers and passes."""
_UNSAID: Final = 8 << 30
"""Free bytes assumed on a system that reports none."""
_GROUP: Final = Path("/sys/fs/cgroup")
_MIB: Final = 1 << 20


class ModelMemory:
    """Memory of all models in training besides the policy."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self.limit = int(_SHARE * free_bytes(base.device))
        """Bytes for all of them: half of what is free after loading."""
        self.taken: dict[str, int] = {}
        """Bytes by model."""

    def take(self, model: str, shape: LoraShape) -> None:
        """Reserve memory for a new model of this shape.

        Raises:
            RequestError: there is no room for it.
        """
        # The module's copy has a gradient, too.
        width = _MASTER_BYTES + 2 * self._base.dtype.itemsize
        needs = width * lora_parameters(self._base, shape)
        others = sum(self.taken.values())
        if others + needs > self.limit:
            raise RequestError(
                f"A model of rank {shape.rank} takes {needs / _MIB:.1f} MiB, and of the "
                f"{self.limit / _MIB:.1f} MiB for models in training {others / _MIB:.1f} are "
                f"taken by {len(self.taken)}: close a session that is not used, or take a lower "
                "rank."
            )
        self.taken[model] = needs

    def give_back(self, model: str) -> None:
        self.taken.pop(model, None)


def passes_in_memory(
    model: ModelSize,
    *,
    free: int,
    width: int,
    context_tokens: int,
) -> tuple[bool, int]:
    """Whether activations are checkpointed, and how many tokens a pass has, on a CPU.

    On a GPU an out-of-memory error is caught, and the pass halved. On a CPU there may be none: a
    process that takes too much is killed, or the machine stalls. So memory is estimated beforehand,
    and activations are checkpointed where a sample as long as the context would not fit otherwise.

    Args:
        free: bytes, of which half is taken.
        width: bytes of a value.
    """

    def fitting(saving: bool) -> int:
        each = token_bytes(model, checkpointing=saving, width=width)
        return max(1, min(DEFAULT_TOKENS, int(_SHARE * free / each)))

    saves = fitting(False) < min(context_tokens, DEFAULT_TOKENS)
    return saves, fitting(saves)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_here(), default=_UNSAID)


def machine_bytes() -> int | None:
    """Bytes of memory of this machine, or of this process's cgroup where that has fewer; None: the
    system does not say."""
    found = list[int]()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * next(int(s.split()[1]) for s in lines if s.startswith("MemTotal:")))
    with suppress(OSError, ValueError):
        found.append(int((_GROUP / "memory.max").read_text()))
    return min(found, default=None)


def release_free() -> None:
    """Return memory that is free in this process to the system, where its C library can. glibc
    keeps what lies between blocks in use, which adds up to several times as much."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _free_here() -> Iterator[int]:
    """Yield free bytes of the machine, and of this process's cgroup, if the system reports them."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield 1024 * next(int(s.split()[1]) for s in lines if s.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # no such cgroup, or one without a limit
        most, taken = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The page cache counts as taken, but is dropped on demand: weights are read from files.
        with suppress(OSError):
            for line in (_GROUP / "memory.stat").read_text().splitlines():
                name, size = line.split()
                taken -= int(size) if name in ("active_file", "inactive_file") else 0
        yield max(0, most - taken)
