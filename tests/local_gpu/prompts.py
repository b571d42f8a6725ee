"""Prompts of the tiny models, and single completions."""

from __future__ import annotations

from typing import Any

from tests.support.backends import VOCABULARY
from tinker_claw.types import Completion, SamplingParams


def prompt(length: int, salt: int = 1) -> tuple[int, ...]:
    return tuple((salt * 29 + i * i * 3 + i * salt) % VOCABULARY for i in range(length))


async def sampled(sampler: Any, tokens: tuple[int, ...], **params: Any) -> Completion:
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 4} | params
    return (await sampler.sample(tokens, SamplingParams(**settings), 1))[0]
