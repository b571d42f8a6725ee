"""The model of a day: a Tinker service whose weights are a script.

The server, its wire and the SDK that asks it are the real ones; in place of a model stands one that
knows the day's plan. As policy it thinks and calls tools; as judge it rates as the plan says, is
sometimes wrong and sometimes answers nothing that can be read. A step changes nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

from tokenizers import Tokenizer

from examples.day.plan import Message, spoken_in
from examples.demo.judge import Case, Opinion, answer, verdict
from local_gpu.backend import LocalBackend
from local_gpu.config import LocalConfig
from local_gpu.halves import Facts
from local_gpu.learn.losses import LossRecord, Scored
from local_gpu.model.lora import LoraShape
from local_gpu.tinker.app import create_app
from local_gpu.tinker.checkpoints import Store
from local_gpu.tinker.service import Service
from tinker_claw.app.server import in_background
from tinker_claw.types import (
    Adam,
    Completion,
    Images,
    SamplingParams,
    StopReason,
    TokenLogprobs,
    Tokens,
)

T = TypeVar("T")
Candidates = tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]

NAME: Final = "Qwen/Qwen3-8B"
CONTEXT: Final = 40_960
VOCABULARY: Final = 151_936
LOGPROB: Final = -0.5
"""Logprob of every token, whoever asks."""
WRONG: Final = 0.1
"""Share of the judge's answers that give another rating than the plan."""
UNREAD: Final = 0.1
"""Share of the judge's answers that give none."""
_TURN: Final = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_THOUGHT: Final = "\n</think>\n\n"
"""End of a thought, and of a prompt behind which the model does not think."""
_SECTIONS: Final = (
    "Decisions",
    "Open TODOs",
    "Constraints/Rules",
    "Pending user asks",
    "Exact identifiers",
)
"""Sections that OpenClaw demands of a summary."""
_NAMES: Final = re.compile(r"\S*\d\S{5,}|/\S{4,}")
"""Words that may be identifiers."""
_RESCUE: Final = "did not produce a user-visible answer"
"""OpenClaw's words where a reply was empty, as in a window that is full: a pass without tools."""
_MOST: Final = 3
"""How often a message's script may begin anew (after a compaction in its middle)."""


@dataclass
class Script:
    """Says what the model says next. Both policy and judge are read off the prompt."""

    messages: Sequence[Message]
    tokenizer: Tokenizer
    rng: random.Random
    seen: dict[str, int] = field(default_factory=dict[str, int])
    """Requests answered, by message."""
    longest: list[Tokens] = field(default_factory=list[Tokens])
    shared: int = 0
    """Prompt tokens that stood at the beginning of an earlier prompt."""

    def reply(self, prompt: Tokens) -> str:
        """Return the text of one completion."""
        text = self.tokenizer.decode(list(prompt), skip_special_tokens=False)
        turns = [{"role": role, "content": content} for role, content in _TURN.findall(text)]
        thinks = not text.endswith(_THOUGHT)
        try:
            thought, words = " ".join(["so"] * 100), self._judged(turns)
        except ValueError:  # no question to the judge
            thought, words = self._spoken(text)
        return f"<think>\n{thought}{_THOUGHT}{words}" if thinks and thought else words

    def count(self, prompt: Tokens) -> None:
        """Add what this prompt shares with the longest earlier one that begins alike."""
        self.shared += max((_shared(prompt, other) for other in self.longest), default=0)
        self.longest = [tuple(prompt), *self.longest[:7]]

    def _judged(self, turns: list[dict[str, Any]]) -> str:
        """Answer as the judge. Raises ValueError where this is no question to it."""
        draw = self.rng.random()
        wrong = UNREAD <= draw < UNREAD + WRONG
        judgement = answer(turns, self.rng, partial(self._opinion, wrong=wrong))
        return "It is hard to tell from what came next." if draw < UNREAD else judgement

    def _opinion(self, case: Case, rng: random.Random, *, wrong: bool) -> Opinion:
        position = spoken_in(case.text, self.messages) if case.role == "user" else None
        if position is None:
            rating = verdict("tool", case.text)
            return (-rating if wrong else rating), None
        message, _ = position
        return rng.choice((-1, 0, 1)) if wrong else message.rating, message.hint

    def _spoken(self, text: str) -> tuple[str, str]:
        """Return what the policy thinks, and what it says."""
        if "context summarization" in text:
            return "", self._summary(text)
        position = spoken_in(text, self.messages)
        if position is None:
            return "", "NO_REPLY" if "memory flush" in text else "Done."
        message, end = position
        requests = self.seen[message.text] = self.seen.get(message.text, 0) + 1
        if "Pre-compaction memory flush" in text[end:]:
            return "", "NO_REPLY"
        at = text.count("<|im_start|>assistant", end) - 1
        last = requests > _MOST * len(message.steps) or _RESCUE in text[end:]
        step = message.steps[-1 if last or at >= len(message.steps) else at]
        if step.call is None:
            return step.thinks, step.says
        name, arguments = step.call
        call = json.dumps({"name": name, "arguments": arguments})
        return step.thinks, f"<tool_call>\n{call}\n</tool_call>"

    def _summary(self, text: str) -> str:
        """Write what OpenClaw's check of a summary asks for: sections, asks and identifiers."""
        requests = [message.text for message in self.messages if message.text in text]
        named = sorted({word.strip(".,:;()[]`\"'") for word in _NAMES.findall(text)})
        parts = ("\n".join(requests[-3:]), "None.", "None.", "None.", " ".join(named))
        return "\n\n".join(
            f"## {name}\n{part}" for name, part in zip(_SECTIONS, parts, strict=True)
        )


class Played:
    """Stand-in for `LocalBackend`: all that the service calls, answered at once. It is its own
    sampler, and its own learning half, which takes every step and changes nothing."""

    facts = Facts(VOCABULARY, CONTEXT)
    context_tokens, vision = CONTEXT, None

    def __init__(self, script: Script) -> None:
        self.script = script
        self.learning = self.serving = self

    async def run(self, call: Callable[[], T]) -> T:
        return call()

    step = aside = run

    async def open(self, ref: str, folder: Path) -> Self:
        return self

    async def base(self) -> Self:
        return self

    async def aclose(self) -> None: ...

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int) -> list[Completion]:
        self.script.count(prompt)
        return [self._completion(prompt, params) for _ in range(n)]

    def _completion(self, prompt: Tokens, params: SamplingParams) -> Completion:
        words = self.script.tokenizer.encode(self.script.reply(prompt), add_special_tokens=False)
        whole = (*words.ids, params.stop_tokens[0])
        tokens = whole[: params.max_tokens]
        return Completion(
            tokens,
            (LOGPROB,) * len(tokens),
            *_candidates(tokens, params.student_topk),
            StopReason.STOP if len(whole) == len(tokens) else StopReason.LENGTH,
            params,
        )

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
    ) -> TokenLogprobs:
        tail = tokens[start:]
        scores = tuple((LOGPROB,) * len(row) for row in targets or ())
        return TokenLogprobs(start, (LOGPROB,) * len(tail), scores, *_candidates(tail, top_k))

    def create(self, shape: LoraShape, seed: int) -> LoraShape:
        return shape

    def forward_backward(self, records: Sequence[LossRecord]) -> list[Scored]:
        return [Scored(0.0, record.ids.float() * 0 + LOGPROB) for record in records]

    forward = forward_backward

    def optim_step(self, adam: Adam) -> float:
        return 1.0

    def write_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"")

    write_state = write_adapter


def _shared(tokens: Tokens, other: Tokens) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(other)))


def _candidates(tokens: Tokens, k: int) -> Candidates:
    """Return the k candidates of each token, itself and the ids behind it, and their logprobs."""
    if not k:
        return (), ()
    logprobs = tuple(LOGPROB - 2 * (i > 0) - i / VOCABULARY for i in range(k))
    ids = tuple(tuple((token + i) % VOCABULARY for i in range(k)) for token in tokens)
    return ids, (logprobs,) * len(tokens)


@asynccontextmanager
async def service(
    folder: Path, tokenizer: Path, messages: Sequence[Message], seed: int
) -> AsyncGenerator[tuple[str, Script]]:
    """Serve the script on a free port, as Tinker's service would; yields its address."""
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    script = Script(messages, words, random.Random(seed))
    config = LocalConfig(model=str(tokenizer), name=NAME, root=folder)
    played = cast("LocalBackend", Played(script))
    async with in_background(create_app(Service(config, Store(folder), played))) as url:
        yield url.removesuffix("/v1"), script
