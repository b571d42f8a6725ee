"""Supervised training of the shipped models on drawn dialogues.

One rule: every seed is fixed and one thread computes, so that the same versions on the same machine
give the same bytes.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from examples.demo.recipe.tokenizer import save_tokenizer
from tinker_claw.shipped import MANIFEST, file_sha256, verify

_T = TypeVar("_T")
_POOL_DIALOGUES = 320
"""Dialogues that are drawn together and sorted by length, so that batches have little padding."""
_MOST_DIALOGUES = 24
"""Dialogues of a batch, at most: without it the short skills would share very few steps."""
_MUON_FACTOR = 6.0
"""Muon's rate over Adam's: its updates of a layer's matrices have unit spectral norm."""
_PIXEL_FACTOR = 0.1
"""Rate of the weights of pixels over the others': 1,536 of them add up in every output."""

Example = Sequence[tuple[int, bool]]
"""A dialogue's tokens, and whether each is trained."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Training steps at a rate that warms up and falls as a cosine, down to 2 % of its peak."""

    steps: int
    peak_rate: float
    seed: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * fall * min(1.0, (step + 1) / 40)


def batches(
    draw: Callable[[Random], _T], encode: Callable[[_T], Example], seed: int, most_tokens: int
) -> Iterator[list[Example]]:
    """Yield batches of similar length without end, each at most `most_tokens` when padded."""
    rng = Random(seed)
    while True:
        pool: list[list[Example]] = []
        for example in sorted((encode(draw(rng)) for _ in range(_POOL_DIALOGUES)), key=len):
            size = len(pool[-1]) + 1 if pool else math.inf
            if size > _MOST_DIALOGUES or size * len(example) > most_tokens:
                pool.append([])
            pool[-1].append(example)
        rng.shuffle(pool)
        yield from pool


def token_losses(
    model: Any,
    batch: Sequence[Example],
    inputs: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] = lambda ids: {},
) -> torch.Tensor:
    """Return the negative logprob of each trained token, in nats.

    Padding stands on the right, where causal attention keeps it from every real token. Logits are
    made at trained positions only.

    Args:
        inputs: makes further inputs of the model from the ids.
    """
    longest = max(map(len, batch))
    rows = [[*example, *[(0, False)] * (longest - len(example))] for example in batch]
    ids = torch.tensor([[token for token, _ in row] for row in rows])  # [B, T]
    trained = torch.tensor([[is_trained for _, is_trained in row] for row in rows])[:, 1:]
    hidden = model.model(input_ids=ids, use_cache=False, **inputs(ids))[0]  # [B, T, D]
    logits = model.lm_head(hidden[:, :-1][trained])  # [N, V]
    return F.cross_entropy(logits, ids[:, 1:][trained], reduction="none")


def train(
    model: torch.nn.Module,
    stage: Stage,
    draw_loss: Callable[[], torch.Tensor],
    say: Callable[[str], None],
) -> None:
    """Train the modules of one stage in place.

    Args:
        draw_loss: returns the loss of a new batch, in nats a token.

    The layers' matrices are trained with Muon, with which the loss fell faster than with Adam
    alone in a trial of 600 steps; embedding and norms with Adam.
    """
    began = time.monotonic()
    matrices, pixels, others = list[Any](), list[Any](), list[Any]()
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            matrices.append(weight)
        elif "embed_tokens" in name or (weight.ndim == 1 and "embed" not in name):
            others.append(weight)
        elif "visual" in name and "embed" in name:
            pixels.append(weight)
    adam = torch.optim.AdamW(
        [{"params": others}, {"params": pixels}], betas=(0.9, 0.98), weight_decay=0.01
    )
    muon = torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.01)
    groups = [*adam.param_groups, *muon.param_groups]
    for step in range(stage.steps):
        for group, factor in zip(groups, (1.0, _PIXEL_FACTOR, _MUON_FACTOR), strict=True):
            group["lr"] = factor * stage.rate(step)
        loss = draw_loss()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step()
        if (step + 1) % 20 == 0:
            say(f"{step + 1}/{stage.steps}  {loss.item():.3f}  {time.monotonic() - began:.0f} s")


def train_on_dialogues(
    model: Any,
    stages: Sequence[tuple[Stage, Callable[[Random], _T]]],
    encode: Callable[[_T], Example],
    most_tokens: int,
    say: Callable[[str], None],
) -> None:
    """Train stages one after another, each on dialogues that are drawn as it says."""

    def draw_loss(drawn: Iterator[list[Example]]) -> torch.Tensor:
        return token_losses(model, next(drawn)).mean()

    for stage, draw in stages:
        drawn = batches(draw, encode, stage.seed, most_tokens)
        train(model, stage, partial(draw_loss, drawn), say)


def write(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write model, tokenizer and manifest, and check the manifest against what was written."""
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is made readable by its owner only
    save_tokenizer(tokenizer, out)
    files = sorted(file for file in out.iterdir() if file.is_file() and file.name != MANIFEST)
    table = {"sha256": {file.name: file_sha256(file) for file in files}}
    (out / MANIFEST).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    verify(out)
