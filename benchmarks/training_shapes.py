"""Shapes of models with random weights, and batches of samples, for the measurements.

Rule: a preset and its seed give the same weights and the same samples on every run of one machine.
No weights are read from disk: they are drawn where they are used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from benchmarks.smoke import QWEN3_8B, Shape, with_loss
from tinker_claw.types import Datum

FIRST_ID: Final = 10


@dataclass(frozen=True)
class Batches:
    """Sizes of the samples, in tokens."""

    samples: int
    shared: int
    """Length of the prefix that all samples of the shared batch begin with."""
    own: int
    """Further tokens of each of those samples."""
    lengths: tuple[int, int]
    """Shortest and longest sample of the unshared batch, log-uniform between."""
    long: int
    """Length of the one sample that shows the memory; 0 leaves it out."""


@dataclass(frozen=True)
class Preset:
    shape: Shape
    batches: Batches


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "tiny": Preset(
            Shape(4, 128, 384, 4, 2, 32, 4096), Batches(16, 2000, 300, (64, 1815), long=0)
        ),
        "8b": Preset(
            QWEN3_8B,
            Batches(16, 20_000, 3000, (1000, 6000), long=32_000),
        ),
    }
)


def batches(preset: Preset) -> dict[str, tuple[Datum, ...]]:
    """Make the samples of each case."""
    rng, sizes = random.Random(0), preset.batches

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_ID, preset.shape.vocabulary) for _ in range(count))

    def sample(prompt: tuple[int, ...], own: int) -> Datum:
        return with_loss(rng, (*prompt, *tokens(own)), preset.shape.vocabulary)

    prompt = tokens(sizes.shared)
    low, high = sizes.lengths
    spread = [
        round(low * (high / low) ** (i / max(1, sizes.samples - 1))) for i in range(sizes.samples)
    ]
    rng.shuffle(spread)
    cases = {
        "shared": tuple(sample(prompt, sizes.own) for _ in range(sizes.samples)),
        "unshared": tuple(sample((), length) for length in spread),
    }
    return cases | ({"long": (sample((), sizes.long),)} if sizes.long else {})


def useful_tokens(datums: Sequence[Datum]) -> int:
    """Tokens of the samples: each position that predicts a token, however it is computed."""
    return sum(len(datum.tokens) - 1 for datum in datums)
