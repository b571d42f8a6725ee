"""`python -m benchmarks.recipes`: how far each part of the default recipe turns the gradient of
`combine` away from the paper's.

Sixteen replies of the demo's model to homework, sampled by its first version: three that the demo's
user accepts, and thirteen that they reject, with a hint. Each row is the paper's recipe with one
part of the default, on the same replies; the gradients are the trainer's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final

import torch
from peft.utils import load_peft_weights
from rich.console import Console
from rich.table import Table

from local_gpu.config import LocalConfig
from local_gpu.trainer import LocalTrainer
from tinker_claw.config.settings import Training
from tinker_claw.formats.chat import Chat
from tinker_claw.methods import BatchItem, build
from tinker_claw.methods.advantages import reward_advantages
from tinker_claw.methods.passes import Advantages, loss_passes, spread
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import Adam, HintScores, Sample, SamplingParams

PAPER: Final = Training.model_validate({"recipe": "paper"})
DEFAULT: Final = Training()
ACCEPTED: Final = 3
BATCH: Final = 16
QUESTION: Final = (
    "I need help with a homework question. A box holds {} plums and a bag holds {}. How many plums "
    "are there together? Please show the work."
)
STRUCTURE: Final = re.compile(r"\*\*|\\boxed|^\d\.", re.M)
"""Signs of the style that the demo's user rejects."""
HINTS: Final = (
    "Answer in ordinary sentences, without bold, numbered steps or a final answer line.",
    "Keep the work, but leave out bold text, lists and boxes.",
    "Write the steps as casual running text with no formatting at all.",
)
"""Three ways to say what the demo's user wants."""
REPLY_TOKENS: Final = 128
RATE: Final = 2.0**60
EPS: Final = 2.0**40
"""Adam without moments moves a weight by RATE g / (|g| + eps), about 2^20 g: beside that the
weights vanish, and the gradient is what the step leaves."""


@dataclass(frozen=True)
class Drawn:
    """A reply with the teacher's scores under each of three hints; () where it was accepted."""

    sample: Sample
    hints: Sequence[HintScores]

    def with_hint(self, choice: int | None = None, *, own: bool = False) -> Sample:
        """Return the sample with one hint.

        Args:
            choice: None takes the one whose candidates overlap most, as the paper does.
            own: whether the teacher's own candidates count, too.
        """
        if not self.hints:
            return self.sample
        at = max(range(3), key=lambda n: self.hints[n].overlap) if choice is None else choice
        teacher = self.hints[at]
        if not own:
            teacher = replace(teacher, topk_ids=(), topk_logprobs=())
        return replace(self.sample, teacher=teacher)


Batch = Sequence[tuple[Sample, Advantages]]
Row = Callable[[Sequence[Drawn]], Batch]


async def draw(trainer: LocalTrainer, seed: int) -> list[Drawn]:
    """Sample until there are enough replies of both kinds."""
    rng, renderer, chat = Random(seed), Renderer.load(str(MODEL_DIR), "qwen3"), Chat()
    sampler, base = await trainer.publish(), await trainer.base()
    left, drawn = {True: ACCEPTED, False: BATCH - ACCEPTED}, list[Drawn]()
    while any(left.values()):
        first, second = rng.randint(1, 9), rng.randint(1, 9)
        messages = [{"role": "user", "content": QUESTION.format(first, second)}]
        body = json.dumps({"model": "demo", "messages": messages}).encode()
        request = chat.parse(body, chat.routes[0], "")
        prompt = renderer.prompt(request.messages, hint_message=0)
        params = SamplingParams(REPLY_TOKENS, seed=rng.randrange(2**31), student_topk=4)
        (done,) = await sampler.sample(prompt.tokens, params)
        text = renderer.parse(done.tokens, prompt.tokens).text
        good = not STRUCTURE.search(text) and f"{first} + {second} = {first + second}" in text
        if not left[good]:
            continue
        left[good] -= 1
        at, hints = len(drawn), list[HintScores]()
        for hint in () if good else HINTS:
            hinted = renderer.splice(prompt.tokens, prompt.hint_at or 0, hint)
            scores = await base.logprobs(
                hinted + done.tokens, start=len(hinted), targets=done.topk_ids, top_k=4
            )
            pairs = zip(done.topk_ids, scores.topk_ids, strict=True)
            hints.append(
                HintScores(
                    hint,
                    scores.logprobs,
                    targets=scores.targets,
                    overlap=sum(len(set(a) & set(b)) for a, b in pairs),
                    topk_ids=scores.topk_ids,
                    topk_logprobs=scores.topk_logprobs,
                )
            )
        reward = 1.0 if good else -1.0
        drawn.append(Drawn(Sample(at, at, at, 0, 0, prompt.tokens, done, reward, None), hints))
    return drawn


def reward_row(rewards: Callable[[Sequence[float]], Sequence[float]]) -> Row:
    """Make a row whose rewards become other advantages."""

    def row(drawn: Sequence[Drawn]) -> Batch:
        before = [item.sample.reward or 0.0 for item in drawn]
        samples = [item.with_hint() for item in drawn]
        return [
            (s, spread(s, a, 1.0, PAPER)) for s, a in zip(samples, rewards(before), strict=True)
        ]

    return row


def hint_row(choice: int | None = None, *, own: bool = False) -> Row:
    """Make a row whose hints are chosen or scored otherwise; see `Drawn.with_hint`."""

    def row(drawn: Sequence[Drawn]) -> Batch:
        samples = [item.with_hint(choice, own=own) for item in drawn]
        return [(s, spread(s, s.reward or 0.0, 1.0, PAPER)) for s in samples]

    return row


def spared(drawn: Sequence[Drawn]) -> Batch:
    """Multiply negative advantages by 1 - p of their token."""
    return [
        (
            s,
            replace(
                advantages,
                tokens=spread(replace(s, teacher=None), advantages.sample, 0.0, DEFAULT).tokens,
            ),
        )
        for s, advantages in PAPERS(drawn)
    ]


def default(drawn: Sequence[Drawn]) -> Batch:
    """Compute the default recipe as the learner does, with one hint and all +1 from users."""
    samples = [item.with_hint(0, own=True) for item in drawn]
    advantages, _ = build("combine").advantages([BatchItem(s) for s in samples], DEFAULT, None)
    return list(zip(samples, advantages, strict=True))


PAPERS: Final = hint_row()
ROWS: Final[dict[str, Row]] = {
    "the batch's mean is subtracted": reward_row(
        lambda rewards: reward_advantages(rewards, [1.0] * len(rewards), [False] * len(rewards))
    ),
    "negative advantages times 1 - p": spared,
    "the teacher's candidates count, too": hint_row(own=True),
    "+1 counts half (all from tools)": reward_row(
        lambda rewards: [0.5 * r if r > 0 else r for r in rewards]
    ),
    "one hint is scored": hint_row(0),
    "all of it, no tools": default,
}


async def gradient(trainer: LocalTrainer, folder: Path, batch: Batch) -> torch.Tensor:
    """Return the gradient of a step over the batch, as one vector, in float64."""
    samples, advantages = zip(*batch, strict=True)
    passes = loss_passes([BatchItem(s) for s in samples], advantages, PAPER, REPLY_TOKENS)

    async def weights(name: str) -> dict[str, torch.Tensor]:
        await trainer.export_adapter(folder / name)
        return load_peft_weights(str(folder / name), device="cpu")

    state, before = await trainer.save_state("before"), await weights("before")
    await trainer.train_step(passes, Adam(RATE, beta1=0.0, beta2=0.0, eps=EPS, grad_clip_norm=0.0))
    after = await weights("after")
    await trainer.load_state(state)
    moved = torch.cat([(before[n].double() - after[n].double()).flatten() for n in sorted(before)])
    return moved * EPS / (RATE - moved.abs())


async def cosines(folder: Path, seed: int) -> dict[str, float]:
    """Return the cosine of each row's gradient to the paper's, on one batch."""
    config = LocalConfig(model=str(MODEL_DIR), root=folder / "run", rank=16, threads=1, seed=seed)
    trainer = await LocalTrainer.start(config)
    try:
        drawn = await draw(trainer, seed)
        papers = await gradient(trainer, folder, PAPERS(drawn))
        gradients = {
            name: await gradient(trainer, folder, row(drawn)) for name, row in ROWS.items()
        }
    finally:
        await trainer.aclose()
    return {
        name: float(papers @ other / (papers.norm() * other.norm()))
        for name, other in gradients.items()
    }


def main() -> None:
    """Print the mean cosine of each row over the batches, with the smallest and the largest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--batches", type=int, default=5, help="(5)")
    batches = list[dict[str, float]]()
    for seed in range(parser.parse_args().batches):
        with tempfile.TemporaryDirectory() as folder:
            batches.append(asyncio.run(cosines(Path(folder), seed)))
    table = Table("the paper's recipe, but", "cosine", "smallest", "largest")
    for name in ROWS:
        values = [batch[name] for batch in batches]
        table.add_row(name, f"{fmean(values):.3f}", f"{min(values):.3f}", f"{max(values):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
