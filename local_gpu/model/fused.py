"""Fused kernels of a library (liger-kernel) for the norms and gates of the body, on CUDA.

Each is one kernel in place of five, which matters where a pass is bound by memory bandwidth. Matrix
products and adapters are not touched: only the class of a norm, or of an MLP block (gate, up,
down), is replaced, so clones of the base and LoRA layers inside it keep working.

Rule: a library's kernel is not trusted. Before the first step each kind is tested forward and
backward on a module of the model itself; one that raises, or is off by more than rounding explains,
is left out and reported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from local_gpu.config import Say
from local_gpu.tree.choice import disagreement, kernel_failures, sentence_of

_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class FusedOps:
    """Fused functions of a library."""

    name: str
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """x (..., d), weight (d,), epsilon: root mean square norm, in float32 inside."""
    gate: Callable[[Tensor, Tensor], Tensor]
    """silu(a) * b, of equal shapes."""


def liger() -> FusedOps:
    """Load liger-kernel. Raises ImportError where it is not installed, or Triton is missing."""
    ops: Any = import_module("liger_kernel.ops")

    def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # Rounded before the weight, as Llama and Qwen do. Not in place: others read the gradient.
        return ops.LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False, None)

    def gate(a: Tensor, b: Tensor) -> Tensor:
        return ops.LigerSiLUMulFunction.apply(a, b, 1.0, 1.0)

    return FusedOps("liger-kernel", norm, gate)


def fuse(
    module: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype,
    say: Say,
    load: Callable[[], FusedOps] = liger,
) -> None:
    """Replace a base's norms and gates by fused kernels, where these compute the same here.

    Args:
        module: a transformers causal LM; changed in place, before anything is cloned from it.
        device: where it will compute.
        dtype: what it computes in.
        say: called with one sentence on what was fused, and what was left out and why.
        load: loads the library; ImportError: there is none.
    """
    try:
        ops = load()
    except ImportError as error:
        say(f"Norms and gates are PyTorch's own: no fused kernels here ({sentence_of(error)})")
        return
    told: list[str] = []
    for what, found, dressed, trial in (
        ("norms", _norms(module), _norm_class, _norm_trial),
        ("gates", _gates(module), _gate_class, _gate_trial),
    ):
        for kind in dict.fromkeys(map(type, found)):
            same = [one for one in found if type(one) is kind]
            try:
                problem = _problem(*trial(same[0], ops), device, dtype)
            except kernel_failures() as error:
                problem = sentence_of(error)
            if problem is None:
                fused = dressed(kind, ops)
                for one in same:
                    one.__class__ = fused
            name = f"{len(same)} {what} ({kind.__name__})"
            told.append(f"{name} are fused." if problem is None else f"{name} are not: {problem}")
    if told:
        say(f"By {ops.name}: {' '.join(told)}")


def _norms(module: nn.Module) -> list[Any]:
    return [
        one
        for one in module.modules()
        if type(one).__name__.endswith("RMSNorm")
        and {name for name, _ in one.named_parameters(recurse=False)} == {"weight"}
        and isinstance(getattr(one, "variance_epsilon", None), float)
    ]


def _gates(module: nn.Module) -> list[Any]:
    return [
        one
        for one in module.modules()
        if [name for name, _ in one.named_children()][:3] == ["gate_proj", "up_proj", "down_proj"]
        and isinstance(getattr(one, "act_fn", None), nn.SiLU | _SILU)
    ]


def _silu() -> type:
    """Return the class of SiLU that transformers uses."""
    activations: Any = import_module("transformers.activations")
    return type(activations.ACT2FN["silu"])


_SILU: Final = _silu()


def _norm_class(kind: type, ops: FusedOps) -> type:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return ops.norm(hidden_states, self.weight, self.variance_epsilon)

    return type(kind.__name__, (kind,), {"forward": forward})


def _gate_class(kind: type, ops: FusedOps) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(ops.gate(self.gate_proj(x), self.up_proj(x)))

    return type(kind.__name__, (kind,), {"forward": forward})


Computed = Callable[..., Tensor]
Trial = tuple[Computed, Computed, Sequence[int]]
"""The plain computation, the fused one, and the widths of their inputs."""


def _norm_trial(norm: Any, ops: FusedOps) -> Trial:
    def plain(x: Tensor) -> Tensor:
        return copy.deepcopy(norm).to(x.device, x.dtype)(x)

    def fused(x: Tensor) -> Tensor:
        return ops.norm(x, norm.weight.detach().to(x.device, x.dtype), norm.variance_epsilon)

    return plain, fused, [norm.weight.shape[0]]


def _gate_trial(block: Any, ops: FusedOps) -> Trial:
    """A trial of the gate between the MLP's matrix products, which checks that nothing else
    changes."""
    width = int(block.down_proj.in_features)

    class Given(nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor:
            return self.value

    def plain(a: Tensor, b: Tensor) -> Tensor:
        bare = copy.copy(block)
        bare._modules = dict(block._modules) | {
            "gate_proj": Given(a),
            "up_proj": Given(b),
            "down_proj": nn.Identity(),
        }
        return bare(a)

    return plain, ops.gate, [width, width]


def _problem(
    plain: Computed,
    fused: Computed,
    widths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Reason why the fused computation cannot be used, as a sentence; None: it can."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, _ROWS, w, generator=draw).to(device, dtype) for w in widths]
    grad = torch.randn(1, _ROWS, widths[0], generator=draw).to(device, dtype)
    wide = torch.float64 if dtype == torch.float32 else torch.float32

    def run(call: Computed, kind: torch.dtype) -> tuple[Tensor, ...]:
        given = [t.detach().to(kind, copy=True).requires_grad_() for t in inputs]
        with torch.enable_grad():
            out = call(*given)
        return out.detach().clone(), *torch.autograd.grad(out, given, grad.to(kind))

    found = run(fused, dtype)
    names = ["output", *(f"gradient of input {i}" for i, _ in enumerate(widths, 1))]
    for name, got in zip(names, found, strict=True):
        if got.dtype != dtype:
            return f"its {name} is {got.dtype}, where it should be {dtype}."
    return disagreement(names, found, run(plain, dtype), run(plain, wide))
