"""Choose the attention kernel for training and scoring, after one check against the reference.

Rule: no kernel is trusted. Each is run forward and backward on a small tree before the first step.
One that raises, or is off by more than rounding explains, is left out and reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from local_gpu.config import Say
from local_gpu.device import device_fault, first_line
from local_gpu.tree.kernels import Fa3Kernel, Kernel, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree, grow

_SLACK: Final = 4.0
"""Largest accepted error of a kernel, as a multiple of PyTorch's own rounding error in the same
format."""
FAILURES: Final = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError)
"""Errors of a kernel that does not work on this machine."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads and width of the attention in one layer of the model."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Read a transformers model's configuration."""
        text = config.get_text_config()
        queries = int(text.num_attention_heads)
        width = getattr(text, "head_dim", None) or text.hidden_size // queries
        keys = getattr(text, "num_key_value_heads", None) or queries
        return cls(queries, int(keys), int(width))


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


def choose(
    *, device: torch.device, dtype: torch.dtype, heads: Heads, say: Say, only: str | None = None
) -> Kernel:
    """Return the first kernel that passes the check; the reference where none does.

    Args:
        dtype: what queries, keys and values are computed in.
        say: called with sentences on which kernels are left out.
        only: name of the one that is tried; None: all that are made for the device.

    Raises:
        RuntimeError: one has broken the device.
    """
    kernels = [Fa3Kernel(), MergedKernel()]
    if only is None and device.type == "cpu":
        kernels = [MergedKernel()]
    try:
        for kernel in kernels:
            if only not in (None, kernel.name):
                continue
            if (problem := checked(kernel, device, dtype, heads)) is None:
                return kernel
            if kernel.name == Fa3Kernel.name:
                Fa3Kernel.release()
            say(f"Attention by {kernel.name} is left out: {problem}")
        return SdpaKernel()
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # a sampler may share the GPU


def checked(kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: Heads) -> str | None:
    """Return why a kernel cannot be used, as a sentence; None: it can."""
    sizes = (2048, 256, 4) if device.type == "cuda" else (64, 16, 4)
    trial = Trial.of(*sizes, heads, device)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    # The kernel's own inputs, computed in a wider format.
    query, key, value, grad = (t.to(dtype).to(wide) for t in trial.tensors)
    truth = Trial(trial.tree, (query, key, value, grad)).run(SdpaKernel(), wide)
    own = trial.run(SdpaKernel(), dtype)
    try:
        results = trial.run(kernel, dtype)
    except FAILURES as error:
        if device_fault(error):
            raise  # whatever this process computes next may fail as well
        return f"{type(error).__name__}: {first_line(error)[:200].rstrip('.')}."
    names = ("output", "gradient of the queries", "gradient of the keys", "gradient of values")
    for name, got, usual, right in zip(names, results, own, truth, strict=True):
        # PyTorch's own error in the same format is accepted.
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
