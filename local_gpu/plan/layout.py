"""The GPUs of this machine, and which of them learns or samples.

`visible` lists GPUs and their memory; `plan` assigns them.

Rule: GPUs are listed by nvidia-smi, never by torch: a CUDA context in this process would take
memory from the processes that run there. GPUs are numbered in bus order, as nvidia-smi does.

Rule: `plan` is pure. It counts GPUs from 0 among the visible ones; their names in
CUDA_VISIBLE_DEVICES are in `Gpu.device`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tinker_claw.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""CUDA's order of GPUs must be set to nvidia-smi's: by default it sorts by speed."""
_MIB: Final = 1 << 20
_PATIENCE_S: Final = 30.0
_COLUMNS: Final = ("index", "name", "memory.total", "memory.used", "uuid")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that may be used."""

    device: str
    """Index of the GPU on this machine, as CUDA_VISIBLE_DEVICES takes it with `ORDER`."""
    name: str
    total: int
    """Bytes."""
    used: int = 0
    """Bytes that other processes have taken."""


def visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, in its order; () where there is no nvidia-smi.

    Raises:
        ConfigError: nvidia-smi fails, or does not know what the variable names.
    """
    every = _ask()
    setting = os.environ.get(VISIBLE)
    if setting is None or not every:
        return tuple(gpu for gpu, _ in every)
    allowed: list[Gpu] = []
    for name in filter(None, map(str.strip, setting.split(","))):
        if name == "-1":
            break  # CUDA ignores it and what follows
        allowed.append(_named(name, every))
    return tuple(allowed)


def names(gpus: Sequence[Gpu], chosen: Sequence[int]) -> dict[str, str]:
    """Environment of a process that may see only these GPUs."""
    return {VISIBLE: ",".join(gpus[index].device for index in chosen), ORDER[0]: ORDER[1]}


def _named(name: str, every: Sequence[tuple[Gpu, str]]) -> Gpu:
    for gpu, uuid in every:
        if gpu.device == name:
            return gpu
        # CUDA takes a prefix of a UUID, vLLM at most a whole one; both take the index.
        if name.startswith("GPU-") and uuid.startswith(name):
            return gpu
    raise ConfigError(
        f"{VISIBLE} names {name!r}, which nvidia-smi does not list (it has "
        f"{', '.join(gpu.device for gpu, _ in every)}); name whole GPUs by number or by UUID"
    )


def _ask() -> list[tuple[Gpu, str]]:
    """Every GPU of the machine with its UUID."""
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
            f"nvidia-smi does not answer ({error}): fix the driver, or use --device cpu"
        ) from error
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ConfigError(
            f"nvidia-smi fails ({lines[0] if lines else done.returncode}): fix the driver, or use "
            "--device cpu"
        )
    try:
        return [_parse(line) for line in done.stdout.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(
            f"the output of nvidia-smi cannot be read ({error}): fix the driver, or use --device "
            "cpu"
        ) from error


def _parse(line: str) -> tuple[Gpu, str]:
    index, name, total, used, uuid = (part.strip() for part in line.split(","))
    return Gpu(index, name, int(total) * _MIB, int(used) * _MIB), uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """GPU counts that the user asked for."""

    gpus: int
    """GPUs to share out."""
    rollout: int | None = None
    """GPUs that sample; None: all but one."""
    tensor_parallel: int = 1
    """GPUs per sampler server."""
    samples: bool = True
    """Whether samplers are planned; False: they run elsewhere."""


@dataclass(frozen=True, slots=True)
class Layout:
    """GPU indices by job."""

    train: tuple[int, ...]
    """GPUs that learn, one rank each; () learns on the CPU."""
    serve: tuple[tuple[int, ...], ...]
    """GPUs of each sampler server; () starts none."""

    @property
    def sampling(self) -> list[int]:
        """GPUs of all sampler servers."""
        return [gpu for group in self.serve for gpu in group]

    @property
    def shared(self) -> bool:
        """Return whether one GPU learns and samples."""
        return not {*self.train}.isdisjoint(self.sampling)

    def describe(self) -> str:
        """Describe the layout: `GPU 0 learns; 1-7 sample, one server each`."""
        if not self.train:
            return "no GPU is used: the processor learns and samples"
        learns = f"GPU {spans(self.train)} learn{'s' if len(self.train) == 1 else ''}"
        if self.shared:
            return f"{learns} and samples"
        if not self.serve:
            return learns
        size, single = len(self.serve[0]), len(self.sampling) == 1
        servers = "one server each" if size == 1 else f"servers of {size} GPUs"
        return f"{learns}; {spans(self.sampling)} sample{'s' if single else f', {servers}'}"


def plan(wanted: Wanted) -> Layout:
    """Share out the GPUs: the learning ones first, then the samplers'.

    One GPU learns and samples. Of two and more one learns and the others sample, unless a number of
    them is given: samples of one agent share long prefixes, which every rank computes anew, so
    samplers gain more from a GPU than learning does. What is left over by servers of several GPUs
    learns.

    Raises:
        ConfigError: it does not work out; says what to set.
    """
    count, size = wanted.gpus, wanted.tensor_parallel
    if not wanted.samples:
        return Layout(tuple(range(count)), ())
    if count == 1 and size == 1 and wanted.rollout in (None, 1):
        return Layout((0,), ((0,),))
    sample = (count - 1) // size * size if wanted.rollout is None else wanted.rollout
    if not size <= sample < count:
        raise ConfigError(
            f"There are {_gpus(count)}: one that learns and {max(size, sample)} that sample are "
            "more. Lower --rollout-gpus (ROLLOUT_GPUS) or --rollout-tp, or give more with --gpus"
        )
    learn = count - sample
    groups = tuple(tuple(range(first, first + size)) for first in range(learn, count, size))
    return Layout(tuple(range(learn)), groups)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"


def spans(gpus: Sequence[int]) -> str:
    """`0-3` where they follow one another, else `0, 2`."""
    if len(gpus) > 1 and list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ", ".join(map(str, gpus))
