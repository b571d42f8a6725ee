"""One model in training: its own LoRA weights and optimizer moments over the shared base.

Rule: a partial step is never applied: a forward_backward that failed, or never came, makes the next
optim_step fail. Every method is called in the run's own turn (`models.Models`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from secrets import randbits
from typing import Any

from tinker.proto import tinker_public_pb2 as pb

from local_gpu.backend import LocalBackend
from local_gpu.model.lora import LoraShape
from local_gpu.tinker.config import WireConfig
from local_gpu.tinker.futures import Answer, Turns
from local_gpu.tinker.requests import Lora, OptimStep
from local_gpu.tinker.store import Place, Record, Store
from local_gpu.tinker.wire import forward_backward_output, record_pass
from tinker_claw.errors import BackendError, ClawError, RequestError, StepError
from tinker_claw.types import Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Objects shared by all clients' models and samplers."""

    config: WireConfig
    backend: LocalBackend
    store: Store


class TrainingRun:
    """A model that a client trains."""

    def __init__(
        self, session_id: str, number: int, metadata: dict[str, str] | None, shared: Shared
    ) -> None:
        # The SDK builds the same id by itself when it creates a model by loading one.
        self.id = f"{session_id}:train:{number}"
        self.session_id = session_id
        self.turns = Turns()
        self._shared = shared
        self._backend = shared.backend
        self._learning = shared.backend.learning
        self.shape: LoraShape | None = None
        """None: not created yet, or freed."""
        self.ephemeral: list[Place] = []
        """Its nameless checkpoints."""
        self.asked_at = datetime.now(UTC)
        """Time of its client's last request."""
        self.metadata = metadata
        self._void: str | None = None
        """Why the next optim_step must fail."""

    @property
    def rank(self) -> int | None:
        return self.shape.rank if self.shape else None

    async def create(self, lora: Lora) -> Answer:
        shape = self._shape_of(lora)
        seed = randbits(63) if lora.seed is None else lora.seed
        await self._backend.run(lambda: self._learning.create(self.id, shape, seed))
        self.shape = shape
        return {"type": "create_model", "model_id": self.id}

    async def create_from(self, path: str, *, with_optimizer: bool) -> Answer:
        """Create the model from a checkpoint, with its rank."""
        record = await self._read(Place.at(path), with_optimizer=with_optimizer)
        self.shape = self._shape_of(record)
        return {"type": "load_weights", "path": path, "model_id": self.id}

    async def load(self, path: str, *, with_optimizer: bool) -> Answer:
        """Load into an existing model (legacy); without the optimizer its moments are reset."""
        self._check_there()
        await self._read(Place.at(path), with_optimizer=with_optimizer)
        self._void = None
        return {"type": "load_weights", "path": path, "model_id": self.id}

    async def forward_backward(self, message: pb.ForwardBackwardRequest) -> Answer:
        self._check_there()
        learn = not message.forward_only
        call = self._learning.forward_backward if learn else self._learning.forward
        facts = self._learning.facts
        vision = self._backend.serving.vision if facts.trains_images else None
        with self._void_unless_done() if learn else nullcontext():
            wanted = await self._backend.run(
                lambda: record_pass(
                    message,
                    vocabulary=facts.vocabulary,
                    context_tokens=facts.context_tokens,
                    most_cells=self._shared.config.most_logprobs,
                    vision=vision,
                )
            )
            scored = await self._backend.step(partial(call, wanted, self.id))
        return forward_backward_output(message, scored)

    async def optim_step(self, ask: OptimStep) -> Answer:
        self._check_there()
        if self._void is not None:
            sentence, self._void = self._void, None
            await self._backend.run(partial(self._learning.discard, self.id))
            raise StepError(f"The step is void, a part of its gradient is missing: {sentence}")
        adam = _adam(ask)
        norm = await self._backend.step(partial(self._learning.optim_step, adam, self.id))
        return {"metrics": {"unclipped_grad_l2:mean": norm}}

    async def save(self, place: Place, *, overwrite: bool, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint; `facts` are fields of its record.

        Raises:
            RequestError: the name is taken.
        """
        shape = self._check_there()
        store = self._shared.store
        record = Record.now(
            self._shared.config.offered,
            shape.rank,
            run_metadata=self.metadata,
            train_attn=shape.attention,
            train_mlp=shape.mlp,
            train_unembed=shape.head,
            **facts,
        )
        learning = self._learning
        write = {"weights": learning.write_state, "external_weights": learning.export_adapter}.get(
            place.kind, learning.write_adapter
        )
        fill = partial(write, model=self.id)
        await self._backend.run(lambda: store.write(place, record, fill, overwrite=overwrite))

    def retire_ephemeral(self, newest: Place) -> list[Place]:
        """Note a nameless checkpoint; return those that are now too old, for the caller to
        remove."""
        self.ephemeral.append(newest)
        kept = self._shared.config.keep_ephemeral
        old, self.ephemeral = self.ephemeral[:-kept], self.ephemeral[-kept:]
        return old

    async def free(self) -> None:
        """Free weights and moments."""
        self.shape = None
        with suppress(BackendError):  # lost with the training process
            await self._backend.run(partial(self._learning.drop, self.id))

    def _shape_of(self, asked: Lora | Record) -> LoraShape:
        return LoraShape(
            asked.rank,
            self._shared.config.local.alpha,
            attention=asked.train_attn,
            mlp=asked.train_mlp,
            head=asked.train_unembed,
        )

    def _check_there(self) -> LoraShape:
        if self.shape is None:
            raise RequestError(f"The model {self.id} was not created, or its session has ended.")
        return self.shape

    async def _read(self, place: Place, *, with_optimizer: bool) -> Record:
        record = self._shared.store.read(place)
        if with_optimizer and place.kind != "weights":
            raise RequestError(
                f"{place.path} has no optimizer state; load a path of save_state, or without it."
            )
        read = self._learning.read_state if with_optimizer else self._learning.read_adapter
        folder = self._shared.store.folder(place)
        await self._backend.run(lambda: read(folder, self.id))
        return record

    @contextmanager
    def _void_unless_done(self) -> Generator[None]:
        before = self._void
        # Stays if another error than those below, a bug, ends the block.
        self._void = before or "a forward_backward was not finished"
        try:
            yield
        except ClawError as error:
            self._void = before or str(error)
            raise
        self._void = before


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
