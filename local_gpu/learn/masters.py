"""The adapter's master weights: one float32 vector, its gradient and Adam's moments.

The module computes with copies in the base's format. After each backward pass their gradients are
added to the masters' in float32. So a sum over many passes loses nothing to bfloat16, and the sum
over ranks is one all-reduce of one vector.

Rule: copies change here alone, by `write_copies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from local_gpu.model.files import SavedState
from local_gpu.model.lora import Adapter
from tinker_claw.errors import BackendError, StepError
from tinker_claw.types import Adam

_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")


class Masters:
    """P parameters of an adapter, concatenated."""

    def __init__(self, adapter: Adapter, copies: Mapping[str, nn.Parameter]) -> None:
        """`copies`: the module's own parameters, by the names of `adapter`."""
        self._copies = dict(copies)
        device = next(iter(self._copies.values())).device
        ends = list(accumulate(copy.numel() for copy in self._copies.values()))
        self._spans = {
            name: slice(end - copy.numel(), end)
            for (name, copy), end in zip(self._copies.items(), ends, strict=True)
        }
        self._weights = nn.Parameter(torch.empty(ends[-1], device=device))
        self.gradient = torch.zeros_like(self._weights)
        """Accumulated gradient, (P,)."""
        self._adam = torch.optim.AdamW([self._weights], lr=0.0)
        self.steps = 0
        """Steps that were taken."""
        self._write(adapter)

    def collect(self) -> None:
        """Add the copies' gradients to the masters', and clear them."""
        for name, copy in self._copies.items():
            if copy.grad is not None:
                self.gradient[self._spans[name]] += copy.grad.flatten()
        self.drop()

    def drop(self) -> None:
        """Clear the gradients of the copies, as after a failed backward pass."""
        for copy in self._copies.values():
            copy.grad = None

    def zero(self) -> None:
        """Forget all gradients."""
        self.drop()
        self.gradient.zero_()

    def step(self, adam: Adam) -> float:
        """Clip the gradient by its norm and take one AdamW step; return the norm before.

        g scaled by min(1, clip / |g|_2); then
        theta -= lr (m_hat / (sqrt(v_hat) + eps) + weight_decay theta), PyTorch's AdamW.

        Raises:
            StepError: the gradient is not finite; nothing was changed.
        """
        norm = float(self.gradient.norm())
        if not norm < float("inf"):
            raise StepError(f"The gradient norm is {norm}; nothing was changed.")
        if 0 < adam.grad_clip_norm < norm:
            self.gradient *= adam.grad_clip_norm / norm
        for group in self._adam.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        self._weights.grad = self.gradient
        self._adam.step()
        self._weights.grad = None
        self.write_copies()
        self.zero()
        self.steps += 1
        return norm

    def write_copies(self) -> None:
        """Round the masters to the module's copies."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                copy.copy_(self._part(self._weights, name))

    def adapter(self) -> dict[str, Tensor]:
        """A copy of the weights as they are, float32 on the CPU."""
        return {name: self._saved(self._weights, name) for name in self._copies}

    def state(self) -> SavedState:
        """A copy of weights, moments and the number of steps."""
        moments: dict[str, Tensor] = {}
        # Adam keeps nothing before its first step.
        if adam := self._adam.state.get(self._weights):
            for name in self._copies:
                moments[f"{name}.step"] = adam["step"].clone()
                moments[f"{name}.exp_avg"] = self._saved(adam["exp_avg"], name)
                moments[f"{name}.exp_avg_sq"] = self._saved(adam["exp_avg_sq"], name)
        return SavedState(self.adapter(), moments, self.steps)

    def load(self, state: SavedState) -> None:
        """Load a state; on BackendError nothing has changed."""
        shapes = {name: tuple(copy.shape) for name, copy in self._copies.items()}
        wanted = {f"{n}.{k}" for n in shapes for k in _MOMENTS} if state.steps else set[str]()
        if shapes != {n: tuple(t.shape) for n, t in state.adapter.items()} or wanted != set(
            state.moments
        ):
            raise BackendError("The saved state belongs to another rank or another base model.")
        self.zero()
        self.steps = state.steps
        self._adam.state.clear()
        self._write(state.adapter)
        if state.steps:
            first = next(iter(self._copies))
            self._adam.state[self._weights] = {
                # Adam's own counter stays on the CPU, as PyTorch keeps it.
                "step": state.moments[f"{first}.step"].to("cpu", copy=True),
                "exp_avg": self._joined(state.moments, ".exp_avg"),
                "exp_avg_sq": self._joined(state.moments, ".exp_avg_sq"),
            }

    def _write(self, adapter: Adapter) -> None:
        with torch.no_grad():
            self._weights.copy_(self._joined(adapter, ""))
        self.write_copies()

    def _joined(self, tensors: Mapping[str, Tensor], suffix: str) -> Tensor:
        parts = [tensors[name + suffix].flatten().float() for name in self._copies]
        return torch.cat(parts).to(self._weights.device)

    def _part(self, flat: Tensor, name: str) -> Tensor:
        return flat.detach()[self._spans[name]].view_as(self._copies[name])

    def _saved(self, flat: Tensor, name: str) -> Tensor:
        return self._part(flat, name).to("cpu", copy=True)
