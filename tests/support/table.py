"""A backend that is a table: logits W[previous token, next token] = frozen base + what it learned.

A real language model, with exact scores, gradients and steps, that needs no torch: the fake that
the contract suite holds to every promise of `tinker_claw.policy`.

Rule: like a service far away, it lets nothing be done after a failed step until a state is loaded.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.table_math import (
    NEEDS,
    Array,
    Weights,
    check,
    gradient_of,
    log_softmax,
    loss_and_slope,
)
from tests.support.table_sampler import TableSampler
from tinker_claw.errors import AlignmentError, BackendError, StepError
from tinker_claw.types import Adam, Capabilities, LossPass, StepReport

BASE_REF = "base"


def base_logits(vocabulary: int) -> Array:
    """Base logits (V, V), always the same, and peaked: a few tokens are likely after each."""
    return np.random.default_rng(0).normal(scale=2.0, size=(vocabulary, vocabulary))


class TableTrainer:
    """Implements `tinker_claw.policy.Trainer`. Another one on the same folder is a restart."""

    def __init__(self, root: Path, *, vocabulary: int, context_tokens: int) -> None:
        self._samplers = root / "samplers"
        self._states = root / "states"
        self._context_tokens = context_tokens
        self._base = base_logits(vocabulary)
        self._weights = Weights.zero(vocabulary)
        self._suspect = False
        self._closed = False

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model="table",
            losses=frozenset(NEEDS),
            two_d_targets=True,
            student_topk=True,
            context_tokens=self._context_tokens,
        )

    async def train_step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        self._ready()
        self._suspect = True  # until the step is whole, however it ends
        await asyncio.sleep(0)
        table = log_softmax(self._base + self._weights.delta)
        try:
            self._check(passes)
            with np.errstate(over="ignore", invalid="ignore"):
                report, gradient = _forward_backward(table, passes)
        except AlignmentError as error:
            raise StepError(f"The step is void: {error}.") from error
        self._weights = self._weights.stepped(gradient, adam)
        self._suspect = False
        return report

    async def publish(self) -> TableSampler:
        self._ready()
        ref = _write(self._samplers, "v", delta=self._weights.delta)
        return await self.open(ref)

    async def open(self, ref: str) -> TableSampler:
        if ref == BASE_REF:
            return await self.base()
        delta = _read(self._samplers, ref, "sampler")["delta"]
        return TableSampler(ref, self._base + delta, self._context_tokens)

    async def base(self) -> TableSampler:
        return TableSampler(BASE_REF, self._base, self._context_tokens)

    async def save_state(self, name: str) -> str:
        self._ready()
        return _write(self._states, name, **self._weights.arrays())

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        saved = _read(self._states, ref, "state")
        steps = int(saved.pop("steps"))
        self._weights = Weights(**saved, steps=steps)
        if not moments:
            self._weights = replace(Weights.zero(len(self._base)), delta=self._weights.delta)
        self._suspect = False

    async def export_adapter(self, directory: Path) -> None:
        """Export as LoRA of full rank on a linear layer that reads one-hot tokens: B = delta^T, A =
        1."""
        self._ready()
        _export(directory, self._weights.delta)

    def forget(self) -> None:
        """Do nothing: no prompt is kept."""

    async def aclose(self) -> None:
        """Close the trainer; samplers hold their tables themselves, and go on."""
        self._closed = True

    def _ready(self) -> None:
        if self._closed:
            raise BackendError("The trainer is closed.")
        if self._suspect:
            raise StepError("A step failed and the weights are suspect; load a saved state first.")

    def _check(self, passes: Sequence[LossPass]) -> None:
        if not any(one.datums for one in passes):
            raise StepError("The step has no datums.")
        for one in passes:
            for datum in one.datums:
                check(one.loss, datum, one.config)
                ids = (*datum.tokens, *(i for row in datum.targets for i in row))
                if min(ids) < 0 or max(ids) >= len(self._base):
                    raise StepError(f"A datum has an id outside 0..{len(self._base) - 1}.")
                if len(datum.tokens) > self._context_tokens:
                    raise StepError(f"A datum has more than {self._context_tokens} tokens.")


def _forward_backward(table: Array, passes: Sequence[LossPass]) -> tuple[StepReport, Array]:
    """Return the report of a step and the gradient (V, V) of the sum of all its losses."""
    gradient = np.zeros_like(table)
    losses: list[float] = []
    logprobs: list[tuple[tuple[float, ...], ...]] = []
    for one in passes:
        values, rows = [], []
        for datum in one.datums:
            previous = np.array(datum.tokens[datum.start - 1 : -1])
            sampled = np.array(datum.tokens[datum.start :])[:, None]
            rows.append(tuple(table[previous[:, None], sampled][:, 0].tolist()))
            soft = one.loss == "cross_entropy" and datum.targets
            ids = np.array(datum.targets) if soft else sampled
            z = table[previous[:, None], ids]
            value, slope = loss_and_slope(one.loss, z, datum, one.config)
            gradient += gradient_of(table, previous, ids, slope)
            values.append(value)
        losses.append(math.fsum(values))
        logprobs.append(tuple(rows))
    norm = float(np.linalg.norm(gradient))
    if not math.isfinite(norm + sum(losses)):
        raise StepError(f"The losses are {losses} and the gradient's norm is {norm}.")
    tokens = sum(len(d.tokens) - 1 for p in passes for d in p.datums)
    return StepReport(tuple(losses), tuple(logprobs), norm, tokens), gradient


def _write(folder: Path, name: str, **arrays: Any) -> str:
    """Write a file that appears whole, under a name that was never used; returns the name."""
    folder.mkdir(parents=True, exist_ok=True)
    ref = f"{re.sub('[^A-Za-z0-9]+', '-', name)}-{token_hex(8)}"
    draft = folder / f"{ref}.draft"
    with draft.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(draft, folder / f"{ref}.npz")
    return ref


def _read(folder: Path, ref: str, what: str) -> dict[str, Any]:
    file = folder / f"{ref}.npz"
    if not re.fullmatch("[A-Za-z0-9-]+", ref) or not file.is_file():
        raise BackendError(f"There is no {what} named {ref!r} in {folder}.")
    with np.load(file) as arrays:
        return dict(arrays)


def _export(folder: Path, delta: Array) -> None:
    layer, rank = "base_model.model.table", len(delta)
    tensors = {
        f"{layer}.lora_A.weight": np.eye(rank, dtype=np.float32),
        f"{layer}.lora_B.weight": np.ascontiguousarray(delta.T, dtype=np.float32),
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["table"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
