"""The table as both halves of a local backend: our Tinker-wire server over it loads no model.

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
from local_gpu.config import LocalConfig, Say
from local_gpu.halves import BASE_REF, Facts, ScoreAsk
from local_gpu.learn.losses import LossRecord, RecordPass, Scored
from local_gpu.learn.scores import ScoreQueue
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
    """Implements `local_gpu.halves.Learning`, as far as the server uses it."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._base = base_logits(facts.vocabulary)
        self._weights: dict[str, Weights] = {}
        self._gradients: dict[str, Array] = {}

    def create(self, model: str, shape: Any, seed: int) -> None:
        self._put(model, Weights.zero(len(self._base)))

    def drop(self, model: str) -> None:
        self._weights.pop(model, None)
        self._gradients.pop(model, None)

    def forward_backward(self, wanted: RecordPass, model: str) -> list[Scored]:
        scored, gradient = self._pass(wanted, model)
        self._gradients[model] = self._gradients.get(model, 0.0) + gradient
        return scored

    def forward(self, wanted: RecordPass, model: str) -> list[Scored]:
        return self._pass(wanted, model)[0]

    def optim_step(self, adam: Adam, model: str) -> float:
        gradient = self._gradients.pop(model, None)
        if gradient is None:
            raise StepError("There is no gradient: call forward_backward first.")
        norm = float(np.linalg.norm(gradient))
        if not np.isfinite(norm):
            raise StepError(f"The gradient's norm is {norm}.")
        self._weights[model] = self._weights[model].stepped(gradient, adam)
        return norm

    def discard(self, model: str) -> None:
        self._gradients.pop(model, None)

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        table = log_softmax(self._base + (0.0 if adapter is None else delta_of(adapter)))
        return [scores(table, a.tokens, a.start, a.targets, a.top_k) for a in asks]

    def write_adapter(self, folder: Path, model: str) -> None:
        np.savez(folder / _ADAPTER, delta=self._weights[model].delta)

    def export_adapter(self, folder: Path, model: str) -> None:
        self.write_adapter(folder, model)

    def write_state(self, folder: Path, model: str) -> None:
        self.write_adapter(folder, model)
        np.savez(folder / _MOMENTS, **self._weights[model].arrays())

    def read_adapter(self, folder: Path, model: str) -> None:
        self._put(model, Weights.zero(len(self._base)).moved_to(delta_of(folder)))

    def read_state(self, folder: Path, model: str) -> None:
        saved = _arrays(folder / _MOMENTS)
        self._put(model, Weights(**saved | {"steps": int(saved["steps"])}))

    def close(self) -> None: ...

    def _put(self, model: str, weights: Weights) -> None:
        self._weights[model] = weights
        self._gradients.pop(model, None)

    def _pass(self, wanted: RecordPass, model: str) -> tuple[list[Scored], Array]:
        table = log_softmax(self._base + self._weights[model].delta)
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


async def start_table(
    config: LocalConfig, adapter: Callable[[str], Path], say: Say
) -> LocalBackend:
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
