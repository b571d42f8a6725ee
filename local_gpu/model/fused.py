"""Fused kernels of liger-kernel for the norms and MLP blocks of the body, on CUDA.

transformers has a call that puts them in place. They change what norms and blocks compute between
the matrix products; adapters and clones of the base keep working.

Rule: a library's kernel is not trusted. Before the first step one module of each kind is run
forward and backward beside its own class. If one raises, or is off by more than rounding explains,
none is used, and that is reported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations import liger

from local_gpu.config import Say
from local_gpu.model.lora import clone
from local_gpu.tree.choice import FAILURES, disagreement, sentence_of

_ROWS: Final = 64
_WANTED: Final = {
    "rms_norm": True,
    "swiglu": True,
    "rope": False,  # it would change the function of all models
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}
Patch = Callable[[Any, dict[str, bool]], None]


def fuse(
    module: Any, *, dtype: torch.dtype, say: Say, patch: Patch = liger.apply_liger_kernel
) -> None:
    """Put fused kernels into a base, where they compute the same here.

    Args:
        module: a transformers causal LM on its device; changed before anything is cloned from it.
        dtype: what it computes in.
        say: called with one sentence on what was fused, or why nothing was.
        patch: changes a model in place; ImportError: there is no library.
    """
    trial = clone(module)
    try:
        patch(trial, _WANTED)
        for name, kind in _patched(trial).items():
            if (problem := _problem(module.get_submodule(name), kind, dtype)) is not None:
                say(f"Norms and gates are PyTorch's own: {problem}")
                return
    except FAILURES as error:
        say(f"Norms and gates are PyTorch's own: {sentence_of(error)}")
        return
    patch(module, _WANTED)
    for part in module.modules():
        if hasattr(part, "in_place"):
            part.in_place = False  # others read the gradient that it would write over
    say("Norms and gates are liger-kernel's.")


def _patched(trial: nn.Module) -> dict[str, Any]:
    """Choose, by path, one module of each class that has a forward method of its own."""
    by_class: dict[type, tuple[str, Any]] = {}
    for name, module in trial.named_modules():
        if "forward" in vars(module):
            by_class.setdefault(type(module), (name, module))
    return dict(by_class.values())


def _problem(plain: Any, fused: Any, dtype: torch.dtype) -> str | None:
    """Return why a fused module cannot be used, as a sentence; None: it can."""
    width = plain.weight.shape[0] if hasattr(plain, "weight") else 4 * _ROWS
    device = next(plain.parameters()).device
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(1, _ROWS, width, generator=draw).to(device, dtype) for _ in range(2))
    wide = torch.float64 if dtype == torch.float32 else torch.float32

    def run(module: Any, kind: torch.dtype) -> tuple[Tensor, ...]:
        inputs = x.detach().to(kind, copy=True).requires_grad_()
        bare = _bare(module, kind)
        # The method is bound to the whole module.
        forward = getattr(vars(module).get("forward"), "__func__", type(module).forward)
        with torch.enable_grad():
            out = forward(bare, inputs)
        return out.detach().clone(), *torch.autograd.grad(out, inputs, grad.to(kind))

    results = run(fused, dtype)
    name = type(plain).__name__
    names = (f"output of {name}", f"gradient of {name}")
    if results[0].dtype != dtype:
        return f"its {names[0]} is {results[0].dtype}, where it should be {dtype}."
    return disagreement(names, results, run(plain, dtype), run(plain, wide))


def _bare(module: Any, dtype: torch.dtype) -> Any:
    """A norm in a number format; or a block whose matrix products are left out."""
    if hasattr(module, "weight"):
        bare = copy.copy(module)
        bare._parameters = {"weight": nn.Parameter(module.weight.detach().to(dtype))}
        return bare
    bare = copy.copy(module)
    bare._modules = dict(module._modules) | {
        "gate_proj": nn.Identity(),
        "up_proj": nn.Tanh(),  # so that one is told from the other
        "down_proj": nn.Identity(),
    }
    return bare
