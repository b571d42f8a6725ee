"""The learning module with its optimizer: gradients add up, and one step takes them all.

Rule: until every gradient of a step is there and finite, nothing is written. Runs in one thread,
without asyncio. A record is one sequence: no padding, so no mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from local_gpu.files import SavedState
from local_gpu.learning.head import head_logprobs, hidden_rows, read_logprobs
from local_gpu.learning.losses import LOSSES
from local_gpu.learning.records import LossRecord, RecordPass, records_of
from local_gpu.model import Adapter, BaseModel, LoraShape, adapter_parameters, with_lora
from tinker_claw.errors import BackendError, ClawError, StepError
from tinker_claw.types import Adam, LossPass, StepReport

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Scored:
    """What one record gave."""

    loss: float
    logprobs: Tensor
    """(R, K) float32, nats, on the CPU, before the step."""


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
        self._pending = False
        self._spoiled: str | None = None
        self.steps = 0

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        """Gradients of all passes, added up, then one AdamW step: all or nothing.

        Raises:
            StepError: weights and moments are as they were.
        """
        self.discard()
        losses: list[float] = []
        logprobs: list[tuple[tuple[float, ...], ...]] = []
        with _void(self.discard):
            wanted = records_of(
                passes, vocabulary=self._base.vocabulary, context_tokens=self._context_tokens
            )
            for each in wanted:
                done = self.forward_backward(each)
                losses.append(math.fsum(row.loss for row in done))
                logprobs.append(tuple(tuple(row.logprobs[:, 0].tolist()) for row in done))
            norm = self.optim_step(adam)
        tokens = sum(len(d.tokens) - 1 for p in passes for d in p.datums)
        return StepReport(tuple(losses), tuple(logprobs), norm, tokens)

    def forward_backward(self, wanted: RecordPass) -> list[Scored]:
        """Add the gradients of the records to those that are there.

        Raises:
            StepError: `optim_step` will refuse what has been added up since the last one.
        """
        with _void(self._spoil):
            done = [self._score(wanted, record, learn=True) for record in wanted.records]
        self._pending = True
        return done

    def forward(self, wanted: RecordPass) -> list[Scored]:
        """The same numbers without gradients; leaves those that are there alone."""
        with _void():
            return [self._score(wanted, record, learn=False) for record in wanted.records]

    def optim_step(self, adam: Adam) -> float:
        """Clip the gradients by their global norm and take one AdamW step; the norm before.

        g scaled by min(1, clip / |g|_2); then
        theta -= lr (m_hat / (sqrt(v_hat) + eps) + weight_decay theta), PyTorch's AdamW.

        Raises:
            StepError: a gradient is missing or not finite; all of them are forgotten.
        """
        with _void(self.discard):
            if self._spoiled is not None:
                raise StepError(
                    f"The step is void, because a part of its gradient failed: {self._spoiled}"
                )
            if not self._pending:
                raise StepError("There are no gradients: no forward_backward since the last step.")
            for parameter in self._parameters.values():
                if parameter.grad is None:
                    # Rows without weight have gradient zero, and Adam's moments still decay.
                    parameter.grad = torch.zeros_like(parameter)
            norm = self._clip(adam.grad_clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        self._optimizer.step()
        self.discard()
        self.steps += 1
        return norm

    def discard(self, _reason: str = "") -> None:
        """Forget the gradients added up since the last step."""
        self._optimizer.zero_grad()
        self._pending = False
        self._spoiled = None

    def _spoil(self, reason: str) -> None:
        """Make the next `optim_step` fail: a part of its gradient will not come."""
        self._optimizer.zero_grad()
        self._spoiled = self._spoiled or reason

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
        self.discard()
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

    def _score(self, wanted: RecordPass, record: LossRecord, *, learn: bool) -> Scored:
        """Forward one record, and backward from the rows that learn."""
        device, cut = self._base.device, record.learns_from
        ids = record.ids.to(device)
        learn = learn and cut < len(ids)
        with torch.set_grad_enabled(learn):
            rows = hidden_rows(self._module, record.inputs.to(device), record.scored_from)
            tail = head_logprobs(self._head(), rows[cut:], ids[cut:]) if learn else None
        with torch.no_grad():
            split = cut if learn else len(ids)
            plain = read_logprobs(self._head(), rows[:split].detach(), ids[:split], 0).chosen
        read = plain if tail is None else torch.cat([plain, tail.detach()])
        if tail is None:
            tail = plain[cut:]
        chosen = tail[:, record.loss_column :]
        loss = LOSSES[wanted.loss].compute(
            chosen if wanted.loss == "cross_entropy" else chosen[:, 0],
            record.inputs_of_loss.to(device),
            wanted.config,
        )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise StepError(f"The {wanted.loss} loss is {value}; nothing was changed.")
        if learn:
            loss.backward()
        return Scored(value, read.cpu())

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


@contextmanager
def _void(undo: Callable[[str], None] | None = None) -> Generator[None]:
    """Turn what fails in torch into a StepError, after `undo` has been told the reason."""
    try:
        yield
    except (ClawError, RuntimeError, ValueError, TypeError, IndexError) as error:
        if undo is not None:
            undo(str(error))
        if isinstance(error, StepError):
            raise
        raise StepError(f"The step is void, nothing was changed: {error}") from error
