"""The table as both halves of a local backend: the stand-in for Tinker's service loads no model.

Rule: the server, its queue and its files are the real ones; only weights and numbers are the
table's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from local_gpu.backend import LocalBackend
from local_gpu.config import LocalConfig
from local_gpu.halves import BASE_REF, Facts, ScoreAsk
from local_gpu.learn.losses import LossRecord, RecordPass, Scored
from local_gpu.learn.scores import ScoreQueue
from local_gpu.model.lora import LoraShape
from tests.support.table import (
    Array,
    TableSampler,
    Weights,
    base_logits,
    gradient_of,
    log_softmax,
    loss_and_slope,
    scores,
)
from tinker_claw.errors import BackendError, StepError
from tinker_claw.types import Adam, TokenLogprobs

_ADAPTER, _MOMENTS = "adapter_table.npz", "moments.npz"


def model_files(folder: Path, vocabulary: int, context_tokens: int) -> Path:
    """Write what the server reads of a model beside its weights."""
    config = {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "max_position_embeddings": context_tokens,
        "eos_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TableLearning:
    """What the stand-in for Tinker's service uses of a `LearningCore`."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._base = base_logits(facts.vocabulary)
        self._weights = Weights.zero(facts.vocabulary)
        self._gradient: Array | None = None

    def create(self, shape: LoraShape, seed: int) -> LoraShape:
        self._weights, self._gradient = Weights.zero(len(self._base)), None
        return shape

    def create_from(self, folder: Path, *, moments: bool) -> LoraShape:
        weights = Weights.zero(len(self._base)).moved_to(delta_of(folder))
        if moments:
            saved = _arrays(folder / _MOMENTS)
            weights = Weights(**saved | {"steps": int(saved["steps"])})
        self._weights, self._gradient = weights, None
        return LoraShape(4, 8)

    def forward_backward(self, wanted: RecordPass) -> list[Scored]:
        scored, gradient = self._pass(wanted)
        self._gradient = gradient + (0.0 if self._gradient is None else self._gradient)
        return scored

    def forward(self, wanted: RecordPass) -> list[Scored]:
        return self._pass(wanted)[0]

    def optim_step(self, adam: Adam) -> float:
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            raise StepError("There is no gradient: call forward_backward first.")
        norm = float(np.linalg.norm(gradient))
        if not np.isfinite(norm):
            raise StepError(f"The gradient's norm is {norm}.")
        self._weights = self._weights.stepped(gradient, adam)
        return norm

    def discard(self) -> None:
        self._gradient = None

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        table = log_softmax(self._base + (0.0 if adapter is None else delta_of(adapter)))
        return [scores(table, a.tokens, a.start, a.targets, a.top_k) for a in asks]

    def write_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        np.savez(folder / _ADAPTER, delta=self._weights.delta)

    def write_state(self, folder: Path) -> None:
        self.write_adapter(folder)
        np.savez(folder / _MOMENTS, **self._weights.arrays())

    def close(self) -> None: ...

    def _pass(self, wanted: RecordPass) -> tuple[list[Scored], Array]:
        table = log_softmax(self._base + self._weights.delta)
        gradient, scored = np.zeros_like(table), list[Scored]()
        for record in wanted.records:
            previous = record.inputs.numpy()[record.scored_from :]
            ids = record.ids.numpy()
            z = table[previous[:, None], ids]
            own, column = slice(record.learns_from, None), record.loss_column
            loss = 0.0
            if len(previous) > record.learns_from:
                loss, slope = loss_and_slope(
                    wanted.loss, z[own, column:], _arrays_of(record), wanted.config
                )
                gradient += gradient_of(table, previous[own], ids[own, column:], slope)
            scored.append(Scored(loss, torch.tensor(z, dtype=torch.float32)))
        return scored, gradient


class TableServing:
    """Implements `local_gpu.halves.Serving`."""

    rounds_otherwise = False
    sees = False
    vision = None

    def __init__(self, facts: Facts) -> None:
        self.context_tokens = facts.context_tokens
        self._base = base_logits(facts.vocabulary)

    async def open(self, ref: str, folder: Path) -> TableSampler:
        return TableSampler(ref, self._base + delta_of(folder), self.context_tokens)

    async def base(self) -> TableSampler:
        return TableSampler(BASE_REF, self._base, self.context_tokens)

    async def aclose(self) -> None: ...


async def start_table(config: LocalConfig, adapter: Callable[[str], Path]) -> LocalBackend:
    """Start a backend over the table, as `LocalBackend.start` does over a model."""
    told = json.loads((Path(config.model) / "config.json").read_text())
    context = config.context_tokens or told["max_position_embeddings"]
    facts = Facts(told["vocab_size"], context)
    learning: Any = TableLearning(facts)
    backend = LocalBackend(config, learning, ThreadPoolExecutor(1), adapter)
    serving: Any = TableServing(facts)
    backend.score, backend.serving = ScoreQueue(backend._score_all).score, serving
    return backend


def delta_of(folder: Path) -> Array:
    return _arrays(folder / _ADAPTER)["delta"]


def _arrays(file: Path) -> dict[str, Array]:
    try:
        with np.load(file) as saved:
            return dict(saved)
    except (OSError, ValueError) as error:
        raise BackendError(f"{file} is missing or damaged: {error}") from error


def _arrays_of(record: LossRecord) -> Any:
    """The arrays of a record, under the names of a `Datum`'s."""
    arrays = record.inputs_of_loss
    return SimpleNamespace(
        logprobs=None if arrays.behaviour is None else arrays.behaviour.numpy(),
        advantages=None if arrays.advantages is None else arrays.advantages.numpy(),
        weights=None if arrays.weights is None else arrays.weights.numpy(),
    )
