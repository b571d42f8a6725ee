"""Main memory: how much there is, and how large a pass it allows on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from local_gpu.plan.memory import DEFAULT_TOKENS, ModelSize, token_bytes

_SHARE: Final = 0.5
"""Share of the memory that is free after loading; the rest is for samplers and passes."""
_DEFAULT_FREE: Final = 8 << 30
"""Free bytes assumed on a system that reports none."""
_CGROUP: Final = Path("/sys/fs/cgroup")


def passes_in_memory(
    model: ModelSize,
    *,
    free: int,
    width: int,
    context_tokens: int,
) -> tuple[bool, int]:
    """Return whether activations are checkpointed, and how many tokens a pass has, on a CPU.

    On a GPU an out-of-memory error is caught, and the pass halved. On a CPU there may be none: a
    process that takes too much is killed, or the machine stalls. So memory is estimated beforehand,
    and activations are checkpointed where a sample as long as the context would not fit otherwise.

    Args:
        free: bytes, of which half is taken.
        width: bytes of a value.
    """

    def fitting(saving: bool) -> int:
        per_token = token_bytes(model, checkpointing=saving, width=width)
        return max(1, min(DEFAULT_TOKENS, int(_SHARE * free / per_token)))

    saves = fitting(False) < min(context_tokens, DEFAULT_TOKENS)
    return saves, fitting(saves)


def free_bytes() -> int:
    """Return the bytes of main memory that this process may still allocate."""
    return min(_free_here(), default=_DEFAULT_FREE)


def machine_bytes() -> int | None:
    """Return the bytes of memory of this machine, or of this process's cgroup if that has fewer.

    None: the system does not say.
    """
    limits = list[int]()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * next(int(s.split()[1]) for s in lines if s.startswith("MemTotal:")))
    with suppress(OSError, ValueError):
        limits.append(int((_CGROUP / "memory.max").read_text()))
    return min(limits, default=None)


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
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The page cache counts as taken, but is dropped on demand: weights are read from files.
        with suppress(OSError):
            for line in (_CGROUP / "memory.stat").read_text().splitlines():
                name, size = line.split()
                used -= int(size) if name in ("active_file", "inactive_file") else 0
        yield max(0, limit - used)
