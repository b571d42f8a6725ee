"""The module in training with its optimizer: gradients accumulate until one step takes them all.

Rule: until every gradient of a step is there and finite, nothing is written. Runs in one thread,
without asyncio. Every rank is given the same calls, computes its part of them, and ends with the
same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from local_gpu.device import out_of_memory
from local_gpu.learn.head import head_logprobs, read_logprobs
from local_gpu.learn.losses import LossRecord, Scored, records_of
from local_gpu.learn.masters import Masters
from local_gpu.learn.passes import FAILURES, Passes
from local_gpu.learn.world import Sharding
from local_gpu.model.files import SavedState
from local_gpu.model.lora import Adapter, BaseModel, LoraShape, adapter_parameters, with_lora
from local_gpu.model.vision import BatchImages
from tinker_claw.errors import OutageError, StepError
from tinker_claw.types import Adam, LossPass, StepReport


class LoraOptimizer:
    """LoRA weights in training, whose values are the `masters`."""

    def __init__(
        self,
        base: BaseModel,
        shape: LoraShape,
        adapter: Adapter,
        *,
        passes: Passes,
        context_tokens: int,
        checkpointing: bool,
        shards: Sharding | None = None,
    ) -> None:
        """A model over `base` that starts from `adapter`.

        Args:
            base: shared with every other module.
            shape: the adapter's.
            adapter: float32.
            passes: how batches are computed.
            context_tokens: the longest sequence.
            checkpointing: keep one activation per layer and recompute the rest in the backward
                pass. The same gradients for a third more work; without it an 8B model keeps 6 MB a
                token.
            shards: of the base, over the ranks; None: each has it whole.
        """
        self._base = base
        self._context_tokens = context_tokens
        self.passes = passes
        self.shape = shape
        self.module = _learning_module(base, shape, adapter, shards, checkpointing)
        self.masters = Masters(adapter, adapter_parameters(self.module))
        self._pending = False

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        """Accumulate the gradients of all passes, then take one AdamW step: all or nothing.

        Raises:
            StepError: weights and moments are as they were.
        """
        self.discard()
        with _void_on_failure(self.discard):
            records = records_of(
                passes, vocabulary=self._base.vocabulary, context_tokens=self._context_tokens
            )
            # A sample with two losses stands in two passes of the step, and is computed once.
            done = iter(self._learn([*chain.from_iterable(records)]))
            scored = [[next(done) for _ in of_pass] for of_pass in records]
            norm = self.optim_step(adam)
        return StepReport(
            losses=tuple(math.fsum(row.loss for row in rows) for rows in scored),
            logprobs=tuple(
                tuple(tuple(r.logprobs[:, 0].tolist()) for r in rows) for rows in scored
            ),
            grad_norm=norm,
            tokens=sum(len(d.tokens) - 1 for p in passes for d in p.datums),
        )

    def forward_backward(self, records: Sequence[LossRecord]) -> list[Scored]:
        """Add the gradients of the records to the accumulated ones.

        Raises:
            StepError: all that has been added up since the last step is forgotten.
        """
        with _void_on_failure(self.discard):
            return self._learn(records)

    def forward(self, records: Sequence[LossRecord]) -> list[Scored]:
        """Compute the same numbers without gradients; accumulated ones are left alone."""
        with _void_on_failure():
            return self._run(records, learn=False)

    def optim_step(self, adam: Adam) -> float:
        """Sum the gradients over ranks, clip them, take one AdamW step; return their norm.

        Raises:
            StepError: a gradient is missing or not finite; all of them are forgotten.
        """
        with _void_on_failure(self.discard):
            if not self._pending:
                raise StepError("There are no gradients: no forward_backward since the last step.")
            self.passes.world.sum(self.masters.gradient)
            norm = self.masters.step(adam)
        self.discard()
        return norm

    def discard(self) -> None:
        """Forget the gradients added up since the last step."""
        self.masters.zero()
        self._pending = False

    def load(self, state: SavedState) -> None:
        """Load a state; on BackendError nothing has changed."""
        self.masters.load(state)
        self.discard()

    def _learn(self, records: Sequence[LossRecord]) -> list[Scored]:
        done = self._run(records, learn=True)
        self._pending = True
        return done

    def _run(self, records: Sequence[LossRecord], *, learn: bool) -> list[Scored]:
        """Compute this rank's part of the records; return the results of all ranks, in order."""

        def compute(
            indices: Sequence[int], sequences: Sequence[Tensor], pictures: BatchImages | None
        ) -> list[Scored]:
            return self._pass([records[i] for i in indices], sequences, pictures, learn=learn)

        return self.passes.run(
            self.module,
            [(record.inputs, record.images) for record in records],
            compute,
            undo=self.masters.drop,
            learns=learn,
        )

    def _pass(
        self,
        records: Sequence[LossRecord],
        sequences: Sequence[Tensor],
        pictures: BatchImages | None,
        *,
        learn: bool,
    ) -> list[Scored]:
        """Run one forward pass over some records, and with `learn` one backward pass."""
        with torch.set_grad_enabled(learn):
            hidden = self.passes.body.hidden(
                self.module, sequences, [record.scored_from for record in records], pictures
            )
            scored = [
                self._score(record, rows, learn=learn)
                for record, rows in zip(records, hidden, strict=True)
            ]
            losses = torch.stack([loss for loss, _ in scored])
        if learn:
            losses.sum().backward()
            self.masters.collect()
        values: list[float] = losses.tolist()
        # Not before the backward pass: other ranks may be in it, waiting for this one.
        for record, value in zip(records, values, strict=True):
            if not math.isfinite(value):
                raise StepError(f"The {record.loss.name} loss is {value}; nothing was changed.")
        return [Scored(v, read.cpu()) for v, (_, read) in zip(values, scored, strict=True)]

    def _score(self, record: LossRecord, rows: Tensor, *, learn: bool) -> tuple[Tensor, Tensor]:
        """Compute a record's loss, with gradients where it learns, and its logprobs (R, K)."""
        head = self.module.get_output_embeddings()
        ids = record.ids.to(self._base.device)
        split = record.learns_from if learn else len(ids)
        with torch.no_grad():
            read = read_logprobs(head, rows[:split].detach(), ids[:split], 0).chosen
        if learn:
            tail = head_logprobs(head, rows[split:], ids[split:])
            read = torch.cat([read, tail.detach()])
        else:
            tail = read[record.learns_from :]
        chosen = tail[:, record.loss_column :]
        loss = record.loss.compute(
            chosen if record.loss.by_candidate else chosen[:, 0],
            record.inputs_of_loss.to(self._base.device),
            record.config,
        )
        return loss, read


def copy_adapter(module: Any, adapter: Adapter | None) -> None:
    """Copy an adapter of the same shape into a module in training; None: B = 0."""
    with torch.no_grad():
        for name, copy in adapter_parameters(module).items():
            if adapter is not None:
                copy.copy_(adapter[name])
            elif ".lora_B." in name:
                copy.zero_()


def _learning_module(
    base: BaseModel,
    shape: LoraShape,
    adapter: Adapter,
    shards: Sharding | None,
    checkpointing: bool,
) -> Any:
    module = with_lora(base, shape, adapter)
    if shards is not None:
        shards.cut(module)
    if checkpointing:
        module.activation_checkpointing_enable()
        for layer in module.modules():
            # transformers checkpoints in training mode only. Submodules of a layer stay in eval
            # mode: without dropout and router noise, as in the sampler.
            layer.training = bool(getattr(layer, "gradient_checkpointing", False))
    for copy in adapter_parameters(module).values():
        copy.requires_grad_(True)
    return module


@contextmanager
def _void_on_failure(undo: Callable[[], None] = lambda: None) -> Generator[None]:
    """Turn torch's errors into a StepError, or an OutageError for lack of memory, after `undo`."""
    try:
        yield
    except FAILURES as error:
        undo()
        if isinstance(error, StepError | OutageError):
            raise
        if isinstance(error, RuntimeError) and out_of_memory(error):
            raise OutageError(
                f"There is not enough memory for the step, and nothing was changed: {error}"
            ) from error
        raise StepError(f"The step is void, nothing was changed: {error}") from error
