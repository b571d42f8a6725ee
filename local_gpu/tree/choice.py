"""Choose the attention kernel for training and scoring: the fastest that agrees with the reference.

Rule: no kernel on a GPU is trusted. Each is run forward and backward on a small tree before the
first step, and one that raises, or is off by more than rounding explains, is left out and reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Final, Literal

import torch
from torch import Tensor

from local_gpu.config import Say
from local_gpu.device import device_fault
from local_gpu.tree.fused import FlexKernel, VarlenKernel
from local_gpu.tree.kernels import Fa3Kernel, Kernel, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree, grow
from tinker_claw.errors import ClawError, ConfigError

Setting = Literal["auto", "sdpa", "merged", "flex", "varlen", "fa3"]

KERNELS: Final = (MergedKernel(), FlexKernel(), VarlenKernel(), SdpaKernel(), Fa3Kernel())
"""Kernels to try on a GPU. The last takes the place of PyTorch's own in all the others."""
_SLACK = 4.0
"""Largest accepted error of a kernel, as a multiple of PyTorch's own rounding error in the same
format."""
_TIMES = 3
"""Timed runs, after those that warm up; the shortest counts."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads and width of the attention in one layer of the model."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A tree with random tensors of the model's shapes, the same each time."""

    tree: PrefixTree
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """query, key, value, and the gradient of the output."""

    @classmethod
    def of(cls, shared: int, own: int, leaves: int, heads: Heads, at: torch.device) -> Trial:
        """Make `leaves` sequences that all share a prefix, and in pairs a longer one."""
        draw = torch.Generator().manual_seed(0)
        half = max(1, own // 2)
        stem = torch.arange(shared)
        pieces = torch.arange(shared, shared + 2 * leaves).repeat_interleave(half).split(half)
        tree = grow(
            [torch.cat([stem, pieces[i // 2], pieces[leaves + i]]) for i in range(leaves)], least=1
        )
        rows = len(tree.tokens)

        def random(count: int) -> Tensor:
            # As a model's projections leave them: heads next to one another in a row.
            drawn = torch.randn(1, rows, count, heads.width, generator=draw)
            return drawn.to(at).transpose(1, 2)

        counts = (heads.queries, heads.keys, heads.keys, heads.queries)
        query, key, value, grad = (random(count) for count in counts)
        return cls(tree, (query, key, value, grad))

    def run(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The output, and the gradients of query, key and value."""
        *inputs, grad = (t.to(dtype) for t in self.tensors)
        query, key, value = (t.requires_grad_() for t in inputs)
        attend = kernel.prepare(self.tree, query.device)
        with torch.enable_grad():
            out = attend(query, key, value, query.shape[3] ** -0.5)
        return out.detach(), *torch.autograd.grad(out, (query, key, value), grad)

    def seconds(self, kernel: Kernel, dtype: torch.dtype) -> float:
        """The shortest of some runs; the first warms up and does not count."""
        taken: list[float] = []
        for _ in range(1 + _TIMES):
            self._wait()
            began = time.perf_counter()
            self.run(kernel, dtype)
            self._wait()
            taken.append(time.perf_counter() - began)
        return min(taken[1:])

    def _wait(self) -> None:
        if self.tensors[0].device.type == "cuda":
            torch.cuda.synchronize(self.tensors[0].device)


def choose(
    setting: Setting,
    *,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    say: Say,
) -> Kernel:
    """Return the kernel of a setting after a trial; auto on the CPU needs none.

    Args:
        dtype: what queries, keys and values are computed in.
        say: called with sentences on which kernels are left out and which is taken.

    Raises:
        ConfigError: the kernel that was asked for does not work here.
    """
    if setting == "auto" and device.type == "cpu":
        return MergedKernel()
    if setting == "sdpa":
        return SdpaKernel()
    try:
        if setting == "auto":
            return fastest(KERNELS, device, dtype, heads, say)
        kernel = next(k for k in KERNELS if k.name == setting)
        if problem := _judge(device, dtype, heads).problem(kernel):
            raise ConfigError(f"attention = {setting} does not work here: {problem} Use auto.")
        return kernel
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # a sampler may share the GPU


def fastest(
    kernels: Iterable[Kernel],
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    say: Say,
) -> Kernel:
    """The fastest kernel that agrees with the reference.

    Raises:
        ConfigError: none does.
        RuntimeError: one has broken the device.
    """
    judge = _judge(device, dtype, heads)
    sizes = (8192, 1024, 8) if device.type == "cuda" else (256, 48, 4)
    timed = Trial.of(*sizes, heads, device)
    taken: list[tuple[float, Kernel]] = []
    problems: list[str] = []
    for kernel in kernels:
        problem = judge.problem(kernel)
        if problem is None:
            try:
                taken.append((timed.seconds(kernel, dtype), kernel))
                continue
            except kernel_failures() as error:
                problem = _left_out(error)
        problems.append(f"Attention by {kernel.name} is left out: {problem}")
        say(problems[-1])
    if not taken:
        raise ConfigError(f"No attention kernel works on {device}. {' '.join(problems)}")
    taken.sort(key=lambda each: each[0])
    if taken[0][1].name != Fa3Kernel.name:
        Fa3Kernel.release()
    times = ", ".join(f"{kernel.name} {1000 * seconds:.2f} ms" for seconds, kernel in taken)
    say(f"Attention is by {taken[0][1].name}; a layer took, forward and backward: {times}.")
    return taken[0][1]


def _judge(device: torch.device, dtype: torch.dtype, heads: Heads) -> _Judge:
    try:
        return _Judge(device, dtype, heads)
    except kernel_failures() as error:
        raise ConfigError(
            f"No attention can be computed on {device}: {sentence_of(error)}"
        ) from error


class _Judge:
    """The exact numbers of a trial, and how far PyTorch's own attention is from them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: Heads) -> None:
        sizes = (2048, 256, 4) if device.type == "cuda" else (256, 48, 4)
        self._trial = Trial.of(*sizes, heads, device)
        self._dtype = dtype
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        # The kernel's own inputs, computed in a wider format.
        rounded = tuple(t.to(dtype) for t in self._trial.tensors)
        query, key, value, grad = (t.to(wide) for t in rounded)
        exact = Trial(self._trial.tree, (query, key, value, grad))
        self._truth = exact.run(SdpaKernel(), wide)
        self._own = self._trial.run(SdpaKernel(), dtype)

    def problem(self, kernel: Kernel) -> str | None:
        """Why a kernel cannot be used, as a sentence; None: it can."""
        try:
            found = self._trial.run(kernel, self._dtype)
        except kernel_failures() as error:
            return _left_out(error)
        names = ("output", "gradient of the queries", "gradient of the keys", "gradient of values")
        return disagreement(names, found, self._own, self._truth)


def disagreement(
    names: Sequence[str], found: Sequence[Tensor], own: Sequence[Tensor], truth: Sequence[Tensor]
) -> str | None:
    """Name the first result of a kernel that is wrong, as a sentence; None: none is.

    Args:
        found: the kernel's.
        own: PyTorch's in the same format, whose rounding is accepted.
        truth: PyTorch's in a wider one.
    """
    for name, got, usual, right in zip(names, found, own, truth, strict=True):
        limit = _SLACK * distance(usual, right) + 64 * torch.finfo(torch.float32).eps
        if not (far := distance(got, right)) <= limit:
            return f"its {name} is off by {far:.1e}, where rounding explains {limit:.1e}."
    return None


def distance(got: Tensor, right: Tensor) -> float:
    """Largest relative error of a row: |got - right| over |right| plus the usual |right|, as
    vectors. NaN if any is not finite."""
    right = right.double()
    lengths = right.norm(dim=-1)
    usual = lengths.square().mean().sqrt()
    rows = (got.double() - right).norm(dim=-1) / (lengths + usual)
    worst = float(rows.max())
    return worst if math.isfinite(worst) else math.nan


def kernel_failures() -> tuple[type[Exception], ...]:
    """Errors of a kernel that does not work on this machine: from PyTorch, compilers or Triton."""
    known = (
        ClawError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        AssertionError,
        ImportError,
        OSError,
        SubprocessError,
    )
    try:
        from triton.errors import TritonError  # pyright: ignore
    except ImportError:
        return known
    return (*known, TritonError)  # pyright: ignore


def _left_out(error: Exception) -> str:
    if device_fault(error):
        raise error  # whatever this process computes next may fail as well
    return sentence_of(error)


def sentence_of(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}."
