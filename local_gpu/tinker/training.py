"""One model in training: LoRA weights and moments of its own over the shared base.

Rule: half a step is never applied: a forward_backward that failed, or never came, makes the next
optim_step fail. Every method is called in the run's own turn (`models.Models`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import Any

from tinker.proto import tinker_public_pb2 as pb

from local_gpu.learn.losses import LossRecord, Scored
from local_gpu.learn.passes import Body
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.files import SavedState, read_adapter, read_state, write_adapter, write_moments
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter
from local_gpu.sample.embedded import EngineSize
from local_gpu.tinker.config import WireConfig
from local_gpu.tinker.futures import Answer, Lane
from local_gpu.tinker.memory import Adapters
from local_gpu.tinker.requests import Lora, OptimStep
from local_gpu.tinker.store import Place, Record, Store
from local_gpu.tinker.torch_thread import TorchThread
from local_gpu.tinker.wire import forward_backward_output, record_pass
from tinker_claw.errors import ClawError, ConfigError, RequestError, StepError
from tinker_claw.types import Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What all runs share."""

    config: WireConfig
    base: BaseModel
    size: EngineSize
    body: Body
    checkpointing: bool
    torch: TorchThread
    store: Store
    adapters: Adapters


class TrainingRun:
    """A model that a client trains."""

    def __init__(self, session_id: str, number: int, shop: Workshop) -> None:
        # The SDK builds the same id by itself when it creates a model by loading one.
        self.id = f"{session_id}:train:{number}"
        self.session_id = session_id
        self.lane = Lane(shop.config.hole_s, self._on_hole)
        self._shop = shop
        self._optimizer: LoraOptimizer | None = None
        self._shape: LoraShape | None = None
        self._ephemeral: list[Place] = []
        self.asked_at = datetime.now(UTC)
        """When its client last wanted something."""
        self.metadata: dict[str, str] | None = None
        self._void: str | None = None
        """Why the next optim_step must fail."""

    @property
    def rank(self) -> int | None:
        return self._shape.rank if self._shape else None

    async def create(self, lora: Lora) -> Answer:
        shape = LoraShape(
            lora.rank,
            self._shop.config.alpha,
            attention=lora.train_attn,
            mlp=lora.train_mlp,
            head=lora.train_unembed,
        )
        seed = randbits(63) if lora.seed is None else lora.seed

        def build() -> LoraOptimizer:
            return self._build(shape, fresh_adapter(self._shop.base, shape, seed))

        with self._shop.adapters.room(self.id, shape):
            self._optimizer, self._shape = await self._shop.torch.run(build), shape
        return {"type": "create_model", "model_id": self.id}

    async def create_from(self, path: str, *, with_optimizer: bool) -> Answer:
        """Create-via-load: the rank is the checkpoint's."""
        place = Place.at(path)

        def build() -> tuple[LoraOptimizer, LoraShape]:
            saved = read_adapter(self._folder(place), self._shop.base)
            with self._shop.adapters.room(self.id, saved.shape):
                try:
                    optimizer = self._build(saved.shape, saved.tensors)
                except ConfigError as error:
                    raise RequestError(str(error)) from error
                if with_optimizer:
                    optimizer.load(self._state(place, saved.shape))
            return optimizer, saved.shape

        self._optimizer, self._shape = await self._shop.torch.run(build)
        return {"type": "load_weights", "path": path, "model_id": self.id}

    async def load(self, path: str, *, with_optimizer: bool) -> Answer:
        """Legacy: onto a model that is there; without the optimizer its moments start anew."""
        place, optimizer, shape = Place.at(path), self._ready(), self._shape
        assert shape is not None

        def read() -> None:
            if with_optimizer:
                optimizer.load(self._state(place, shape))
            else:
                saved = read_adapter(self._folder(place), self._shop.base).of(shape)
                optimizer.load(SavedState(saved.tensors, {}, 0))

        await self._shop.torch.run(read)
        self._void = None
        return {"type": "load_weights", "path": path, "model_id": self.id}

    async def forward_backward(self, message: pb.ForwardBackwardRequest) -> Answer:
        optimizer, torch = self._ready(), self._shop.torch
        learn = not message.forward_only
        with self._void_unless_done() if learn else nullcontext():
            wanted = await torch.run(
                lambda: record_pass(
                    message,
                    vocabulary=self._shop.size.vocabulary,
                    context_tokens=self._shop.size.context_tokens,
                    most_cells=self._shop.config.table_cells,
                )
            )
            scored: list[Scored] = []
            for records in _turns(wanted.records, self._shop.config.turn_tokens):
                part = replace(wanted, records=records)
                call = optimizer.forward_backward if learn else optimizer.forward
                scored += await torch.run(partial(call, part))
        return forward_backward_output(message, scored)

    async def optim_step(self, ask: OptimStep) -> Answer:
        optimizer = self._ready()
        if self._void is not None:
            sentence, self._void = self._void, None
            await self._shop.torch.run(optimizer.discard)
            raise StepError(f"The step is void, a part of its gradient is missing: {sentence}")
        adam = _adam(ask)
        norm = await self._shop.torch.run(partial(optimizer.optim_step, adam))
        return {"metrics": {"unclipped_grad_l2:mean": norm}}

    async def save(
        self, place: Place, *, overwrite: bool, moments: bool, facts: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint; `facts` are fields of its record.

        Raises:
            RequestError: the name is taken.
        """
        optimizer, shape = self._ready(), self._shape
        assert shape is not None
        record = Record.now(
            self._shop.config.offered,
            shape.rank,
            run_metadata=self.metadata,
            train_attn=shape.attention,
            train_mlp=shape.mlp,
            train_unembed=shape.head,
            **facts,
        )

        def write() -> None:
            state = optimizer.state() if moments else None
            adapter = state.adapter if state else optimizer.adapter()

            def fill(draft: Path) -> None:
                write_adapter(draft, self._shop.base, shape, adapter)
                if state is not None:
                    write_moments(draft, state)

            self._shop.store.write(place, record, fill, overwrite=overwrite)

        await self._shop.torch.run(write)

    def retire_ephemeral(self, newest: Place) -> list[Place]:
        """Note a nameless checkpoint; those that are now too old are the caller's to remove."""
        self._ephemeral.append(newest)
        kept = self._shop.config.keep_ephemeral
        old, self._ephemeral = self._ephemeral[:-kept], self._ephemeral[-kept:]
        return old

    @property
    def ephemeral(self) -> tuple[Place, ...]:
        return tuple(self._ephemeral)

    def free(self) -> None:
        """Let go of weights and moments."""
        self._optimizer = None
        self._shop.adapters.give_back(self.id)

    def _ready(self) -> LoraOptimizer:
        if self._optimizer is None:
            raise RequestError(f"The model {self.id} was not created, or its session has ended.")
        return self._optimizer

    def _build(self, shape: LoraShape, adapter: Mapping[str, Any]) -> LoraOptimizer:
        return LoraOptimizer(
            self._shop.base,
            shape,
            adapter,
            body=self._shop.body,
            context_tokens=self._shop.size.context_tokens,
            checkpointing=self._shop.checkpointing,
        )

    def _folder(self, place: Place) -> Path:
        self._shop.store.read(place)
        return self._shop.store.folder(place)

    def _state(self, place: Place, shape: LoraShape) -> SavedState:
        if place.kind != "weights":
            raise RequestError(
                f"{place.path} has no optimizer state; load a path of save_state, or without it."
            )
        return read_state(self._folder(place), self._shop.base, shape)

    def _on_hole(self, sentence: str) -> None:
        self._void = self._void or sentence

    @contextmanager
    def _void_unless_done(self) -> Generator[None]:
        before = self._void
        # Stays if a fault of ours, which is none of the errors below, ends the block.
        self._void = before or "a forward_backward was not finished"
        try:
            yield
        except ClawError as error:
            self._void = before or str(error)
            raise
        self._void = before


def _turns(records: tuple[LossRecord, ...], tokens: int) -> Generator[tuple[LossRecord, ...]]:
    """Cut records into runs of at most so many tokens, or one record."""
    part: list[LossRecord] = []
    for record in records:
        if part and sum(len(r.inputs) for r in part) + len(record.inputs) > tokens:
            yield tuple(part)
            part = []
        part.append(record)
    yield tuple(part)


def _adam(ask: OptimStep) -> Adam:
    """Raises RequestError naming the setting that is out of range."""
    if ask.adam_params is None:
        kind = ask.optimizer_params.type if ask.optimizer_params else "none"
        raise RequestError(f"optimizer {kind!r}: this server steps with adam_params only.")
    if (unknown := ask.adam_params.unknown) is not None:
        raise RequestError(f"adam_params has a field {unknown!r}, which is not served here.")
    values = ask.adam_params.model_dump()
    for name, value in values.items():
        most = 1.0 if name.startswith("beta") else math.inf
        if not 0.0 <= value < most:
            raise RequestError(f"adam_params.{name} is {value:g}, not in [0, {most:g}).")
    return Adam(**values)
