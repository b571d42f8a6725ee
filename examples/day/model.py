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
from typing import Any, Final, TypeVar, cast

from tokenizers import Tokenizer

from examples.day.plan import Message, spoken_in
from examples.demo.judge import Case, Opinion, answer
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
    Charge,
    Completion,
    Images,
    SamplingParams,
    StopReason,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    uncharged,
)

T = TypeVar("T")

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
_THOUGHT: Final = "</think>\n\n"
"""End of a prompt behind which the model does not think."""
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
    sampled: int = 0
    """Tokens sampled as the policy."""
    shared: int = 0
    """Prompt tokens that stood at the beginning of an earlier prompt."""

    def reply(self, prompt: Tokens) -> tuple[str, bool]:
        """The text of one completion, and whether it is the judge's."""
        text = self.tokenizer.decode(list(prompt), skip_special_tokens=False)
        turns = [{"role": role, "content": content} for role, content in _TURN.findall(text)]
        thinks = not text.endswith(_THOUGHT)
        try:
            judged = self._judged(turns)
        except ValueError:  # no question to the judge
            return self._spoken(text, thinks=thinks), False
        return (f"{self._thought(60, 200)}{judged}" if thinks else judged), True

    def count(self, prompt: Tokens) -> None:
        """Add what this prompt shares with the longest earlier one that begins alike."""
        best = max((_shared(prompt, other) for other in self.longest), default=0)
        self.shared += best
        self.longest = [tuple(prompt), *self.longest[:7]]

    def _judged(self, turns: list[dict[str, Any]]) -> str:
        draw = self.rng.random()
        if draw < UNREAD:
            answer(turns, self.rng, self._opinion)  # raises where it is no question
            return "It is hard to tell from what came next."
        wrong = draw < UNREAD + WRONG
        return answer(turns, self.rng, partial(self._opinion, wrong=wrong))

    def _opinion(self, case: Case, rng: random.Random, *, wrong: bool = False) -> Opinion:
        position = spoken_in(case.text, self.messages) if case.role == "user" else None
        if position is None:
            rating = -1 if re.search(r"error|no such file|traceback", case.text, re.I) else 1
            return (-rating if wrong else rating), None
        rating = rng.choice((-1, 0, 1)) if wrong else position[0].rating
        return rating, position[0].hint

    def _spoken(self, text: str, *, thinks: bool) -> str:
        if "context summarization" in text:
            return self._summary(text)
        position = spoken_in(text, self.messages)
        if position is None:
            return "NO_REPLY" if "memory flush" in text else "Done."
        message, end = position
        requests = self.seen[message.text] = self.seen.get(message.text, 0) + 1
        if "Pre-compaction memory flush" in text[end:]:
            return "NO_REPLY"
        at = text.count("<|im_start|>assistant", end) - 1
        last = requests > _MOST * len(message.steps) or _RESCUE in text[end:]
        step = message.steps[-1 if last or at >= len(message.steps) else at]
        thought = f"<think>\n{step.thinks}\n</think>\n\n" if thinks else ""
        if step.call is None:
            return thought + step.says
        name, arguments = step.call
        call = json.dumps({"name": name, "arguments": arguments})
        return f"{thought}<tool_call>\n{call}\n</tool_call>"

    def _summary(self, text: str) -> str:
        """Write what OpenClaw's check of a summary asks for: sections, asks and identifiers."""
        requests = [message.text for message in self.messages if message.text in text]
        named = sorted({word.strip(".,:;()[]`\"'") for word in _NAMES.findall(text)})
        parts = ("\n".join(requests[-3:]), "None.", "None.", "None.", " ".join(named))
        return "\n\n".join(
            f"## {name}\n{part}" for name, part in zip(_SECTIONS, parts, strict=True)
        )

    def _thought(self, least: int, most: int) -> str:
        words = " ".join(["so"] * self.rng.randint(least, most))
        return f"<think>\n{words}\n</think>\n\n"


def _shared(tokens: Tokens, other: Tokens) -> int:
    for at, (a, b) in enumerate(zip(tokens, other, strict=False)):
        if a != b:
            return at
    return min(len(tokens), len(other))


@dataclass
class Player:
    """A sampler that plays the script."""

    ref: str
    script: Script

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk]:
        (done,) = await self.sample(prompt, params)
        yield TokenChunk(
            done.tokens, done.logprobs, done.topk_ids, done.topk_logprobs, done.stop_reason
        )

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        self.script.count(prompt)
        return [self._completion(prompt, params) for _ in range(n)]

    def _completion(self, prompt: Tokens, params: SamplingParams) -> Completion:
        text, judging = self.script.reply(prompt)
        whole = (
            *self.script.tokenizer.encode(text, add_special_tokens=False).ids,
            params.stop_tokens[0],
        )
        tokens, k = whole[: params.max_tokens], params.student_topk
        if not judging:
            self.script.sampled += len(tokens)
        return Completion(
            tokens=tokens,
            logprobs=(LOGPROB,) * len(tokens),
            topk_ids=_near(tokens, k),
            topk_logprobs=_falling(tokens, k),
            stop_reason=StopReason.STOP if len(whole) == len(tokens) else StopReason.LENGTH,
            params=params,
        )

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
        charge: Charge = uncharged,
    ) -> TokenLogprobs:
        tail = tokens[start:]
        return TokenLogprobs(
            start=start,
            logprobs=(LOGPROB,) * len(tail),
            targets=tuple((LOGPROB,) * len(row) for row in targets or ()),
            topk_ids=_near(tail, top_k),
            topk_logprobs=_falling(tail, top_k),
        )

    async def aclose(self) -> None: ...


def _near(tokens: Tokens, k: int) -> tuple[tuple[int, ...], ...]:
    """The k candidates of each token: itself, and the ids behind it."""
    return tuple(tuple((token + i) % VOCABULARY for i in range(k)) for token in tokens if k)


def _falling(tokens: Tokens, k: int) -> tuple[tuple[float, ...], ...]:
    """Their logprobs."""
    row = tuple(LOGPROB - 2 * (i > 0) - i / VOCABULARY for i in range(k))
    return (row,) * len(tokens) if k else ()


class Learning:
    """The training half: it takes every step and changes nothing."""

    facts = Facts(VOCABULARY, CONTEXT)

    def create(self, shape: LoraShape, seed: int) -> LoraShape:
        return shape

    def create_from(self, folder: Path, *, moments: bool) -> LoraShape:
        return LoraShape(32, 32)

    def discard(self) -> None: ...

    def forward_backward(self, records: Sequence[LossRecord]) -> list[Scored]:
        return [Scored(0.0, record.ids.float() * 0 + LOGPROB) for record in records]

    forward = forward_backward

    def optim_step(self, adam: Adam) -> float:
        return 1.0

    def write_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"")

    write_state = write_adapter


class Played:
    """Stand-in for `LocalBackend`: its calls, answered at once."""

    context_tokens, rounds_otherwise, sees, vision = CONTEXT, False, False, None

    def __init__(self, script: Script) -> None:
        self.script = script
        self.learning, self.serving = Learning(), self

    async def run(self, call: Callable[[], T]) -> T:
        return call()

    step = aside = run

    async def open(self, ref: str, folder: Path) -> Player:
        return Player(ref, self.script)

    async def base(self) -> Player:
        return Player("base", self.script)

    async def aclose(self) -> None: ...


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
