"""Which GPUs there are, and how much memory they have.

Rule: nvidia-smi is asked, never torch: a CUDA context in this process would take memory from
whoever is to run there. GPUs are named in the order of their bus, as nvidia-smi does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tinker_claw.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""CUDA's own order is by speed, so that its GPU 0 need not be nvidia-smi's."""
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_PATIENCE_S: Final = 30.0
_COLUMNS: Final = ("index", "name", "memory.total", "memory.used", "uuid")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that may be used."""

    device: str
    """Its number on this machine, which CUDA_VISIBLE_DEVICES takes with `ORDER`."""
    name: str
    total: int
    """Bytes."""
    used: int = 0
    """Bytes that other processes have taken."""


def visible(
    environment: Mapping[str, str] | None = None, *, gib: float | None = None
) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, in its order; () where there is no nvidia-smi.

    Args:
        environment: where the variable stands; None: this process's.
        gib: their memory, where nvidia-smi is not to be believed or does not know it.

    Raises:
        ConfigError: nvidia-smi fails, or does not know what the variable names.
    """
    every = _ask(None if gib is None else int(gib * _GIB))
    named = (os.environ if environment is None else environment).get(VISIBLE)
    if named is None or not every:
        return tuple(gpu for gpu, _ in every)
    found: list[Gpu] = []
    for name in filter(None, map(str.strip, named.split(","))):
        if name == "-1":
            break  # CUDA ignores it and what follows
        found.append(_named(name, every))
    return tuple(found)


def numbered(count: int, gib: float) -> tuple[Gpu, ...]:
    """As many GPUs with that much memory, which nobody has asked for anything."""
    return tuple(Gpu(str(number), "GPU", int(gib * _GIB)) for number in range(count))


def names(gpus: Sequence[Gpu], chosen: Sequence[int]) -> dict[str, str]:
    """The environment of a process that is to see these GPUs and no others."""
    return {VISIBLE: ",".join(gpus[index].device for index in chosen), ORDER[0]: ORDER[1]}


def _named(name: str, every: Sequence[tuple[Gpu, str]]) -> Gpu:
    for gpu, uuid in every:
        if gpu.device == name:
            return gpu
        # CUDA takes the first letters of a UUID, vLLM whole ones at most: both know the number.
        if name.startswith("GPU-") and uuid.startswith(name):
            return gpu
    raise ConfigError(
        f"{VISIBLE} names {name!r}, which nvidia-smi does not list (it has "
        f"{', '.join(gpu.device for gpu, _ in every)}); name whole GPUs by number or by UUID"
    )


def _ask(memory: int | None) -> list[tuple[Gpu, str]]:
    """Every GPU of the machine with its UUID; `memory` stands for what nvidia-smi says of it."""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_COLUMNS)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"nvidia-smi does not answer ({error}): mend the driver, or use --device cpu"
        ) from error
    if done.returncode:
        told = (done.stdout + done.stderr).strip().splitlines()
        raise ConfigError(
            f"nvidia-smi fails ({told[0] if told else done.returncode}): mend the driver, or use "
            "--device cpu"
        )
    try:
        return [_parse(line, memory) for line in done.stdout.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(
            f"nvidia-smi says what cannot be read ({error}); give --gpu-memory-gb"
        ) from error


def _parse(line: str, memory: int | None) -> tuple[Gpu, str]:
    """Where GPU and processor share their memory, nvidia-smi has no figures for either column."""
    index, name, total, used, uuid = (part.strip() for part in line.split(","))
    if memory is None:
        return Gpu(index, name, int(total) * _MIB, int(used) * _MIB), uuid
    return Gpu(index, name, memory, int(used) * _MIB if used.isdecimal() else 0), uuid
