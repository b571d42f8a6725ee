"""The GPUs of this machine, and which of them learns, samples or judges.

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
_GIB: Final = 1 << 30
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


def visible(*, gib: float | None = None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, in its order; () where there is no nvidia-smi.

    Args:
        gib: the memory of each that may be used: the rest counts as other programs'. Where
            nvidia-smi reports none, or less, this is the total.

    Raises:
        ConfigError: nvidia-smi fails, or does not know what the variable names.
    """
    every = _ask(None if gib is None else int(gib * _GIB))
    named = os.environ.get(VISIBLE)
    if named is None or not every:
        return tuple(gpu for gpu, _ in every)
    found: list[Gpu] = []
    for name in filter(None, map(str.strip, named.split(","))):
        if name == "-1":
            break  # CUDA ignores it and what follows
        found.append(_named(name, every))
    return tuple(found)


def numbered(count: int, gib: float) -> tuple[Gpu, ...]:
    """Make up that many GPUs of that much memory, without asking the machine."""
    return tuple(Gpu(str(number), "GPU", int(gib * _GIB)) for number in range(count))


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


def _ask(memory: int | None) -> list[tuple[Gpu, str]]:
    """Every GPU of the machine with its UUID; `memory`: bytes of each that may be used."""
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
            f"the output of nvidia-smi cannot be read ({error}); give --gpu-memory-gb"
        ) from error


def _parse(line: str, memory: int | None) -> tuple[Gpu, str]:
    """Parse a line of nvidia-smi, which has no memory figures where GPU and CPU share their
    memory."""
    index, name, total, used, uuid = (part.strip() for part in line.split(","))
    if memory is None:
        return Gpu(index, name, int(total) * _MIB, int(used) * _MIB), uuid
    whole = max(memory, int(total) * _MIB if total.isdecimal() else 0)
    taken = int(used) * _MIB if used.isdecimal() else 0
    return Gpu(index, name, whole, max(taken, whole - memory)), uuid


_LEARNS = 4
"""One GPU in four learns: samples of one agent share long prefixes, which every rank computes anew,
so samplers gain more from a GPU than learning does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """GPU counts that the user asked for."""

    gpus: int
    """GPUs to share out."""
    actor: int | None = None
    """GPUs that learn; None: chosen by the default split."""
    rollout: int | None = None
    """GPUs that sample; None: chosen by the default split."""
    judge: int = 0
    """GPUs of a judge of its own; 0: the samplers judge."""
    tensor_parallel: int = 1
    """GPUs per sampler server."""
    samples: bool = True
    """Whether samplers are planned; False: they run elsewhere, or in the training process."""


@dataclass(frozen=True, slots=True)
class Layout:
    """GPU indices by job."""

    train: tuple[int, ...]
    """GPUs that learn, one rank each; () learns on the CPU."""
    serve: tuple[tuple[int, ...], ...]
    """GPUs of each sampler server; () starts none."""
    judge: tuple[int, ...] = ()
    """GPUs of the one judge server; () starts none."""
    idle: tuple[int, ...] = ()

    @property
    def sampling(self) -> list[int]:
        """GPUs of all sampler servers."""
        return [gpu for group in self.serve for gpu in group]

    @property
    def shared(self) -> frozenset[int]:
        """GPUs that learn and sample."""
        return frozenset(self.train).intersection(self.sampling)

    @property
    def count(self) -> int:
        """Number of GPUs in all."""
        return len({*self.train, *self.sampling, *self.judge, *self.idle})

    def told(self) -> str:
        """Describe the layout: `GPU 0-1 learn; 2-7 sample, one server each; the samplers judge`."""
        if not self.train:
            return "no GPU is used"
        parts = [f"GPU {spans(self.train)} learn{'s' if len(self.train) == 1 else ''}"]
        if self.shared:
            parts[0] = f"GPU {spans(self.train)} learns and samples"
        elif self.serve:
            size = len(self.serve[0])
            servers = "one server each" if size == 1 else f"servers of {size} GPUs"
            one = len(self.sampling) == 1
            parts.append(f"{spans(self.sampling)} sample{'s' if one else f', {servers}'}")
        if self.judge:
            parts.append(f"{spans(self.judge)} judge{'s' if len(self.judge) == 1 else ''}")
        if self.idle:
            parts.append(f"{spans(self.idle)} idle")
        return "; ".join(parts)


def plan(wanted: Wanted) -> Layout:
    """Share out the GPUs: the learning ones first, then the samplers', then the judge's.

    One GPU learns and samples. Of two and more a quarter learns, at least one, and the others
    sample: 1 + 1, 1 + 3, 2 + 6, 4 + 12. What is left over by servers of several GPUs learns.

    Raises:
        ConfigError: it does not work out; says what to set.
    """
    left = wanted.gpus - wanted.judge
    if left < 1:
        raise ConfigError(
            f"--prm-gpus {wanted.judge} (PRM_GPUS) leaves none of {_gpus(wanted.gpus)} to learn "
            "and sample on; lower it"
        )
    judge = tuple(range(left, wanted.gpus))
    if not wanted.samples:
        learn = _at_most(wanted.actor or left, left, wanted)
        return Layout(tuple(range(learn)), (), judge, tuple(range(learn, left)))
    if left == 1 and wanted.tensor_parallel == 1:
        for count in (wanted.actor, wanted.rollout):
            _at_most(count or 1, 1, wanted)
        return Layout((0,), ((0,),), judge)
    learn, sample = _split(wanted, left)
    size = wanted.tensor_parallel
    groups = tuple(
        tuple(range(first, first + size)) for first in range(learn, learn + sample, size)
    )
    return Layout(tuple(range(learn)), groups, judge, tuple(range(learn + sample, left)))


def _split(wanted: Wanted, left: int) -> tuple[int, int]:
    """Number of GPUs that learn and number that sample."""
    size = wanted.tensor_parallel
    if size >= left:
        raise ConfigError(
            f"--rollout-tp {size} needs {size} GPUs to sample on, and one that learns; there are "
            f"{_gpus(left)}. Lower it, or give more with --gpus"
        )
    if wanted.actor is not None and wanted.rollout is not None:
        _at_most(wanted.actor + wanted.rollout, left, wanted)
        return wanted.actor, wanted.rollout
    if wanted.rollout is not None:
        _at_most(wanted.rollout + 1, left, wanted)
        return left - wanted.rollout, wanted.rollout
    learn = wanted.actor if wanted.actor is not None else max(1, left // _LEARNS)
    learn = min(learn, left - size) if wanted.actor is None else learn
    _at_most(learn + size, left, wanted)
    sample = (left - learn) // size * size
    return (left - sample if wanted.actor is None else learn), sample


def _at_most(count: int, left: int, wanted: Wanted) -> int:
    if count > left:
        judging = f", and {wanted.judge} judge" if wanted.judge else ""
        raise ConfigError(
            f"The layout needs {_gpus(count)} to learn and sample on, but there are "
            f"{wanted.gpus}{judging}; lower --actor-gpus, --rollout-gpus or --prm-gpus (or "
            "ACTOR_GPUS, ROLLOUT_GPUS, PRM_GPUS), or leave them out and the layout goes by --gpus"
        )
    return count


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"


def spans(gpus: Sequence[int]) -> str:
    """`0-3` where they follow one another, else `0, 2`."""
    if len(gpus) > 1 and list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ", ".join(map(str, gpus))
