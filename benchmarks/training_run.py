"""Measure the sides in turn on the same samples, after a warm-up, against reference gradients.

Rule: a side that is fast and wrong must show, and one that fails is a row with the reason.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.smoke import Shape, distance
from benchmarks.training_shapes import useful_tokens
from benchmarks.training_sides import Gradients, Settings, Side
from benchmarks.training_work import Work, clock, flops
from local_gpu.device import out_of_memory
from tinker_claw.errors import StepError
from tinker_claw.types import Datum

Say = Callable[[str], None]
Make = Callable[[], Side]

_SHORT_S = 2.0
"""Seconds of a gradient computation above which a side is warm without a further step."""


@dataclass
class Row:
    """Figures of one side in one case. None: not measured, because of `failed`."""

    side: str
    seconds: list[float] = field(default_factory=list[float])
    """Seconds of each measured step, by `clock`."""
    useful_tokens: int = 0
    """Tokens of the samples as they came."""
    work: Work | None = None
    flops: int | None = None
    """Floating-point operations executed by one step."""
    share: float | None = None
    """Share of the device's ceiling that the median step reaches."""
    peak_bytes: int | None = None
    """Peak memory: on CUDA with weights and the side's own state; on the CPU what a step adds."""
    gradient_error: float | None = None
    """Relative gradient error, |g - reference| / |reference|, over the samples that were
    compared."""
    failed: str | None = None
    """Reason why there are no figures."""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def useful_per_s(self) -> float | None:
        """Tokens of the samples per second, however they were computed."""
        return None if self.median_s is None else self.useful_tokens / self.median_s

    @property
    def computed_per_s(self) -> float | None:
        """Tokens that the body computed, padding included, per second."""
        if self.median_s is None or self.work is None:
            return None
        return self.work.tokens / self.median_s


@dataclass
class _Built:
    """A side, and the memory that it holds between steps."""

    side: Side
    own_bytes: int = 0


class Measurement:
    """One run: sides are built once and kept; cases come one after the other."""

    def __init__(
        self,
        settings: Settings,
        shape: Shape,
        sides: Mapping[str, Make],
        *,
        repeat: int,
        ceiling: float,
        say: Say,
    ) -> None:
        self._settings, self._shape = settings, shape
        self._repeat, self._ceiling, self._say = repeat, ceiling, say
        self._memory = MemoryPeak(settings.base.device)
        self._base_bytes = self._memory.held()
        self._sides = {name: self._build(make) for name, make in sides.items()}

    def case(
        self, name: str, datums: Sequence[Datum], reference: tuple[Sequence[Datum], Gradients]
    ) -> list[Row]:
        """Measure all sides in one case. `reference`: some samples, and their true gradients."""
        rows: dict[str, Row] = {}
        for side_name, built in self._sides.items():
            self._say(f"{name}: {side_name}, warm-up and gradients")
            rows[side_name] = row = Row(side_name, useful_tokens=useful_tokens(datums))
            self._warm(row, built, datums, reference)
        for repetition in range(self._repeat):
            for side_name, row in rows.items():
                if row.failed is None:
                    self._measure(row, self._sides[side_name].side, datums)
                    # Reported at once: a run that is ended from outside has shown this much.
                    result = row.failed or f"{row.seconds[-1]:.2f} s"
                    self._say(f"{name}: {side_name}, {repetition + 1} of {self._repeat}: {result}")
        for side_name, row in rows.items():
            self._conclude(row, self._sides[side_name])
        return list(rows.values())

    def _build(self, make: Make) -> _Built:
        before = self._memory.held()
        side = make()
        return _Built(side, own_bytes=self._memory.held() - before)

    def _warm(
        self,
        row: Row,
        built: _Built,
        datums: Sequence[Datum],
        reference: tuple[Sequence[Datum], Gradients],
    ) -> None:
        side, before = built.side, self._memory.held()
        compared, true = reference
        began = time.perf_counter()

        def first() -> None:
            row.gradient_error = distance(side.gradients(compared), true)
            if time.perf_counter() - began < _SHORT_S:
                side.step(datums)

        _attempt(row, first)
        # Adam's moments came with the first step.
        built.own_bytes += max(0, self._memory.held() - before)

    def _measure(self, row: Row, side: Side, datums: Sequence[Datum]) -> None:
        device = self._settings.base.device

        def once() -> None:
            self._memory.begin()
            started = clock(device)
            row.work = side.step(datums)
            row.seconds.append(clock(device) - started)
            row.peak_bytes = max(row.peak_bytes or 0, self._memory.grown())

        _attempt(row, once)

    def _conclude(self, row: Row, built: _Built) -> None:
        if row.failed is not None or row.work is None or row.median_s is None:
            row.seconds = []
            return
        row.flops = flops(row.work, self._shape, self._settings.lora.rank)
        row.share = row.flops / row.median_s / self._ceiling
        if row.peak_bytes is not None and self._settings.base.device.type == "cuda":
            row.peak_bytes += self._base_bytes + built.own_bytes


def _attempt(row: Row, run: Callable[[], None]) -> None:
    """Run a measurement; running out of memory is recorded as a result."""
    try:
        run()
    except StepError as error:
        row.failed = str(error)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        row.failed = "out of memory"
    if row.failed is not None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class MemoryPeak:
    """Memory held before a step, and its growth up to the peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = 0

    def held(self) -> int:
        """Bytes held now: on CUDA by tensors, on the CPU by the process."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def begin(self) -> None:
        """Reset the peak."""
        self.before = self.held()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Linux counts anew from here; elsewhere the figure is of the whole life.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def grown(self) -> int:
        """Bytes by which the peak exceeds what was held at `begin`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self.before
        return _status("VmHWM") - self.before


def _status(name: str) -> int:
    """Read a figure of this process in bytes, by its name in Linux's status file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
