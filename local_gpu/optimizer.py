"""The learning module with its optimizer: one step at a time, all or nothing.

Rule: until every gradient of a step is there and finite, nothing is written. Runs in one thread,
without asyncio. A datum is one sequence: no padding, so no mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from local_gpu.files import SavedState
from local_gpu.head import head_logprobs, hidden_rows
from local_gpu.losses import LOSSES, LossInputs
from local_gpu.model import Adapter, BaseModel, LoraShape, adapter_parameters, with_lora
from tinker_claw.errors import BackendError, ClawError, StepError
from tinker_claw.types import Adam, Datum, LossPass, StepReport

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class LoraOptimizer:
    """LoRA weights, Adam's moments and a step counter."""

    def __init__(
        self,
        base: BaseModel,
        shape: LoraShape,
        adapter: Adapter,
        *,
        context_tokens: int,
        checkpointing: bool,
    ) -> None:
        """`checkpointing`: keep one activation per layer and compute the rest again, backwards.

        The same gradients for a third more work; without it an 8B model keeps about 6 MB a token.
        """
        self._base = base
        self._context_tokens = context_tokens
        self._module = with_lora(base, shape, adapter)
        if checkpointing:
            self._module.train()  # transformers checkpoints in training mode only
            for layer in self._module.modules():
                if isinstance(layer, torch.nn.Dropout):
                    layer.eval()  # the sampler dropped nothing out either
            self._module.activation_checkpointing_enable()
        self._parameters = adapter_parameters(self._module)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0)
        self.steps = 0

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        """Gradients of all passes, added up; clipped by their global norm; one AdamW step.

        g = sum over passes and datums of d loss / d theta, scaled by min(1, clip / |g|_2); then
        theta -= lr (m_hat / (sqrt(v_hat) + eps) + weight_decay theta), PyTorch's AdamW.

        Raises:
            StepError: weights and moments are as they were.
        """
        try:
            self._check(passes)
            report = self._accumulate(passes)
            norm = self._clip(adam.grad_clip_norm)
        except StepError:
            self._optimizer.zero_grad()
            raise
        except (ClawError, RuntimeError, ValueError, TypeError, IndexError) as error:
            self._optimizer.zero_grad()
            raise StepError(f"The step is void, nothing was changed: {error}") from error
        for group in self._optimizer.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return StepReport(report.losses, report.logprobs, norm, report.tokens)

    def adapter(self) -> dict[str, Tensor]:
        """A copy of the weights as they are."""
        return {n: p.detach().to("cpu", copy=True) for n, p in self._parameters.items()}

    def state(self) -> SavedState:
        """A copy of weights, moments and counter."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            # Adam keeps nothing for a parameter before its first step.
            if kept := self._optimizer.state.get(parameter):
                for key in _MOMENTS:
                    moments[f"{name}.{key}"] = kept[key].detach().to("cpu", copy=True)
        return SavedState(self.adapter(), moments, self.steps)

    def load(self, state: SavedState) -> None:
        """Take over a state, or raise BackendError and take over nothing."""
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        wanted = {f"{n}.{k}" for n in shapes for k in _MOMENTS} if state.steps else set[str]()
        if shapes != {n: tuple(t.shape) for n, t in state.adapter.items()} or wanted != set(
            state.moments
        ):
            raise BackendError("The saved state belongs to another rank or another base model.")
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state.adapter[name])
                if state.steps:
                    self._optimizer.state[parameter] = {
                        key: self._moment(state.moments[f"{name}.{key}"], key) for key in _MOMENTS
                    }
        self.steps = state.steps

    def _moment(self, saved: Tensor, key: str) -> Tensor:
        # Adam's own counter stays on the CPU, as PyTorch keeps it.
        return saved.to("cpu" if key == "step" else self._base.device, copy=True)

    def _check(self, passes: Sequence[LossPass]) -> None:
        if not any(loss_pass.datums for loss_pass in passes):
            raise StepError("The step has no datums.")
        for loss_pass in passes:
            if loss_pass.loss not in LOSSES:
                raise StepError(
                    f"Unknown loss {loss_pass.loss!r}; there are {', '.join(sorted(LOSSES))}."
                )
            for datum in loss_pass.datums:
                LOSSES[loss_pass.loss].check(loss_pass.loss, datum, loss_pass.config)
                self._check_ids(datum)

    def _check_ids(self, datum: Datum) -> None:
        named = (*datum.tokens, *(i for row in datum.targets for i in row))
        if min(named) < 0 or max(named) >= self._base.vocabulary:
            raise StepError(f"A datum has an id outside 0..{self._base.vocabulary - 1}.")
        if len(datum.tokens) > self._context_tokens:
            raise StepError(
                f"A datum has {len(datum.tokens)} tokens; the context has {self._context_tokens}."
            )

    def _accumulate(self, passes: Sequence[LossPass]) -> StepReport:
        losses: list[float] = []
        logprobs: list[tuple[tuple[float, ...], ...]] = []
        for loss_pass in passes:
            results = [self._backward(loss_pass, datum) for datum in loss_pass.datums]
            losses.append(math.fsum(loss for loss, _ in results))
            logprobs.append(tuple(rows for _, rows in results))
        tokens = sum(len(d.tokens) - 1 for p in passes for d in p.datums)
        return StepReport(tuple(losses), tuple(logprobs), None, tokens)

    def _backward(self, loss_pass: LossPass, datum: Datum) -> tuple[float, tuple[float, ...]]:
        """Forward and backward of one datum: (loss, logprobs of its sampled tokens)."""
        device = self._base.device
        tokens = torch.tensor(datum.tokens, device=device)
        ids = tokens[datum.start :, None]
        if datum.targets:
            ids = torch.cat([ids, torch.tensor(datum.targets, device=device)], dim=1)
        rows = hidden_rows(self._module, tokens, datum.start)
        read = head_logprobs(self._head(), rows, ids)
        chosen = read[:, 0]
        if loss_pass.loss == "cross_entropy":
            subject = read[:, 1:] if datum.targets else read
        else:
            subject = chosen
        loss = LOSSES[loss_pass.loss].compute(
            subject, LossInputs.of(datum, device), loss_pass.config
        )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise StepError(f"The {loss_pass.loss} loss is {value}; nothing was changed.")
        loss.backward()
        return value, tuple(chosen.detach().tolist())

    def _head(self) -> Any:
        return self._module.get_output_embeddings()

    def _clip(self, limit: float) -> float:
        """Scale the gradients to a global norm of `limit` at most; the norm before. 0: leave."""
        parameters = list(self._parameters.values())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not bool(norm.isfinite()):
            raise StepError(f"The gradient norm is {float(norm)}; nothing was changed.")
        if limit > 0:
            clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)
