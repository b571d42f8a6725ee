"""Hints that teach, hints that do not, and hints not yet measured: the fate of sample and
reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.learner.test_loop import BETTER, HINT, Says, World, world
from tests.tallies import sample_counts
from tinker_claw.errors import SamplerError
from tinker_claw.ledger.samples import TEACHES_NOTHING
from tinker_claw.methods.teachability import EVERY, teachability
from tinker_claw.policy import Sampler
from tinker_claw.types import Images, Message, TokenLogprobs, Tokens

GOOD, BAD = (9, 9), (7, 8)
"""Replies that a user accepts, and that they reject."""
FEWEST = next(n for n in range(64) if teachability([(True, 0.3), (False, 0.0)] * n).teaches)
"""Fewest replies of each kind for a claim, where all agree."""
UNKNOWN_WEIGHT = 0.25
"""Weight of distillation before anything is measured."""
ENOUGH = 99
"""Batch size that no test here reaches, so that no step is taken."""


class Teacher(FakeSampler):
    """A teacher for whom HINT or BETTER makes good replies this many nats likelier, and bad ones as
    much less likely."""

    def __init__(self, hint: float, better: float = 0.0) -> None:
        super().__init__((1,))
        self._gains = {HINT: hint, BETTER: better}
        self.fail_plain = 0
        """Number of scorings of replies alone that fail."""

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
    ) -> TokenLogprobs:
        if self.fail_plain and targets is None:
            self.fail_plain -= 1
            raise SamplerError("scoring fails, as told")
        scores = await super().logprobs(
            tokens, start=start, targets=targets, top_k=top_k, images=images
        )
        told = [gain for at, gain in self._gains.items() if _holds(tokens[:start], at)]
        gain = told[0] if told else 0.0
        found = tuple(LOGPROB + (gain if t in GOOD else -gain) for t in tokens[start:])
        return TokenLogprobs(
            **{name: getattr(scores, name) for name in ("start", "targets", "topk_ids")},
            topk_logprobs=scores.topk_logprobs,
            logprobs=found,
        )


def _holds(tokens: Tokens, part: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(part)]) == part for at in range(len(tokens)))


@dataclass
class Taught(FakeTrainer):
    """A trainer whose base is that teacher."""

    teacher: Teacher = field(default_factory=lambda: Teacher(0.3))

    async def base(self) -> Sampler:
        return self.teacher


async def say(w: World, pairs: int, user: str = "me") -> list[int]:
    """Let this many replies be accepted, and then as many corrected; return the corrected turns."""
    for _ in range(pairs):
        w.turn("YES", tokens=GOOD, user=user)
    await w.settled()
    corrected = list[int]()
    for _ in range(pairs):
        corrected.append(w.turn("NO, HOW it should be", tokens=BAD, user=user))
        await w.settled()
    return corrected


def weights(w: World) -> list[float | None]:
    """Weights of the queued samples of rejected replies."""
    queued = [s for s in w.ledger.samples.oldest(ENOUGH) if s.reward != 1]
    return [s.teacher.weight if s.teacher else None for s in queued]


async def test_until_it_is_known_a_small_weight_holds(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=Taught(), batch_size=ENOUGH) as w:
        for _ in range(4):
            w.turn("NO, HOW it should be", tokens=BAD)
        await w.settled()
        assert weights(w) == [UNKNOWN_WEIGHT] * 4
        await say(w, 1)
        (weight,) = {*weights(w)}
        assert weight is not None
        assert UNKNOWN_WEIGHT < weight < 0.4, "one pair says a little"


async def test_hints_that_teach_count_in_full_and_so_do_those_that_are_queued(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, trainer=Taught(), batch_size=ENOUGH) as w:
        await say(w, FEWEST)
        assert weights(w) == [1.0] * FEWEST


async def test_hints_that_pull_away_are_weighted_to_nothing_and_rewards_stay(
    tmp_path: Path,
) -> None:
    trainer = Taught(teacher=Teacher(-0.3))
    async with world(tmp_path, trainer=trainer, batch_size=ENOUGH) as w:
        first = await say(w, FEWEST)
        assert weights(w) == [0.0] * (FEWEST - 1) + [None], "the queued ones, and that which showed"
        asked = len(w.base.scored)
        later = w.turn("NO, HOW it should be", tokens=BAD)
        await w.settled()
        assert len(w.base.scored) == asked, "nothing is paid for what counts for nothing"
        assert [w.untaught(turn) for turn in (first[-1], later)] == [TEACHES_NOTHING] * 2
        rewards = [1] * FEWEST + [-1] * (FEWEST + 1)
        assert [s.reward for s in w.ledger.samples.oldest(ENOUGH)] == rewards


async def test_opd_trains_on_nothing_where_hints_teach_nothing(tmp_path: Path) -> None:
    trainer = Taught(teacher=Teacher(-0.3))
    async with world(tmp_path, method="opd", trainer=trainer, batch_size=FEWEST + 1) as w:
        first = await say(w, FEWEST)
        assert w.ledger.samples.waiting() == 0, "those that were queued are taken back"
        later = [w.turn("NO, HOW it should be", tokens=BAD) for _ in range(20)]
        await w.settled()
        assert {w.why_refused(turn) for turn in (*first, *later)} == {TEACHES_NOTHING}
        assert w.trainer.steps == []


async def test_what_is_known_of_a_user_is_of_that_user(tmp_path: Path) -> None:
    trainer = Taught(teacher=Teacher(-0.3))
    async with world(tmp_path, trainer=trainer, batch_size=ENOUGH) as w:
        await say(w, FEWEST)
        hers = w.turn("NO, HOW it should be", tokens=BAD, user="her")
        await w.settled()
        assert w.untaught(hers) is None
        assert weights(w)[-1] == UNKNOWN_WEIGHT


async def test_a_rejected_reply_behind_a_correction_is_not_measured(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=Taught(), batch_size=ENOUGH) as w:
        for _ in range(4):
            w.turn("NO, HOW it should be", tokens=BAD, session="one")
            await w.settled()
        assert [accepted for accepted, _ in w.ledger.gains.of("me")] == [False]


async def test_an_accepted_reply_is_measured_behind_the_prompt_that_its_matter_began_with(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, trainer=Taught(), batch_size=ENOUGH) as w:
        w.turn("NO, HOW it should be", tokens=BAD, session="one", prompt=(1, 2, 3, 4))
        await w.settled()
        w.turn("YES", tokens=GOOD, session="one", prompt=(1, 2, 3, 4, 7, 8, 5))
        await w.settled()
        w.turn("NO, HOW it should be", tokens=BAD, session="two", prompt=(1, 2, 6, 4))
        await w.settled()
        assert (1, 2, 3, *HINT, 4, *GOOD) in w.base.scored
        assert (1, 2, 3, 4, *GOOD) in w.base.scored, "another version than the base's said it there"
        found = [gain for accepted, gain in w.ledger.gains.of("me") if accepted]
        assert found == pytest.approx([0.3])


class Slow(Teacher):
    async def logprobs(self, *asked: Any, **more: Any) -> TokenLogprobs:
        await asyncio.sleep(0.05)
        return await super().logprobs(*asked, **more)


async def test_an_accepted_reply_is_measured_once_by_turns_that_are_taught_together(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, trainer=Taught(teacher=Slow(0.3)), batch_size=ENOUGH) as w:
        w.turn("YES", tokens=GOOD)
        await w.settled()
        for _ in range(3):
            w.turn("NO, HOW it should be", tokens=BAD)
        await w.settled()
        assert w.base.scored.count((1, 2, 3, *HINT, 4, *GOOD)) == 1


@pytest.mark.parametrize(("then", "now"), [(4, 0), (4, 2), (4, 3), (4, 8), (0, 4)])
@pytest.mark.parametrize("score_fresh", [False, True])
async def test_replies_are_taught_though_opd_topk_has_changed_since_they_were_sampled(
    tmp_path: Path, then: int, now: int, score_fresh: bool
) -> None:
    taught = Taught()
    async with world(
        tmp_path, trainer=taught, opd_topk=now, batch_size=2, score_fresh=score_fresh
    ) as w:
        w.turn("YES", tokens=(9, 9, 9), k=then)
        w.turn("NO, HOW it should be", tokens=(7, 8, 7), k=then)
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 2
        passes = {one.loss: one.datums for one in w.trainer.steps[0]}
        if then and now:
            (datum,) = passes["cross_entropy"]
            assert [len(row) for row in datum.targets] == [then + now + 1] * 3
        else:
            assert [*map(len, passes.values())] == [2], "the sampled tokens alone"


async def test_once_it_is_known_measuring_is_rare(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=Taught(), batch_size=ENOUGH) as w:
        await say(w, FEWEST)
        asked, measured = len(w.base.scored), len(w.ledger.gains.of("me"))
        for _ in range(4 * EVERY):
            w.turn("NO, HOW it should be", tokens=BAD)
        await w.settled()
        assert len(w.ledger.gains.of("me")) == measured + 4
        assert len(w.base.scored) == asked + 4 * EVERY, "its own scores are those of the base"


class TwoHints(Says):
    """A judge that gives two hints, each as often as the other."""

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        found = await super().answers(messages, n)
        texts = ("do it the other way", "do it so much better, please", "do it the other way")
        said = zip(found, texts, strict=True)
        return [answer.replace("do it the other way", text) for answer, text in said]


@pytest.mark.parametrize(("hint", "better"), [(-0.3, 0.3), (0.3, -0.3)])
async def test_of_several_hints_the_one_that_teaches_best_is_taken(
    tmp_path: Path, hint: float, better: float
) -> None:
    trainer = Taught(teacher=Teacher(hint, better))
    async with world(
        tmp_path, trainer=trainer, endpoint=TwoHints(), hint_candidates=2, batch_size=ENOUGH
    ) as w:
        await say(w, FEWEST)
        taken = {s.teacher.hint for s in w.ledger.samples.oldest(ENOUGH) if s.teacher}
        best = "do it so much better, please" if better > 0 else "do it the other way"
        assert taken == {best}, "neither the shortest nor that which most votes gave"


async def test_measuring_that_fails_takes_nothing_away(tmp_path: Path) -> None:
    trainer = Taught()
    async with world(tmp_path, trainer=trainer, batch_size=ENOUGH) as w:
        trainer.teacher.fail_plain = 99
        await say(w, FEWEST)
        assert weights(w) == [UNKNOWN_WEIGHT] * FEWEST
        assert not any(accepted for accepted, _ in w.ledger.gains.of("me"))


class Long(Says):
    """A judge whose hint has more tokens than allowed."""

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        found = await super().answers(messages, n)
        return [answer.replace("the other way", "long " * 60) for answer in found]


@pytest.mark.parametrize("method", ["combine", "opd"])
async def test_a_hint_that_is_too_long_leaves_the_reward(tmp_path: Path, method: str) -> None:
    async with world(tmp_path, method=method, endpoint=Long(), batch_size=ENOUGH) as w:
        turn = w.turn("NO, HOW it should be")
        await w.settled()
        why = "what its teacher would be told does not fit: it has more than 256 tokens"
        assert w.untaught(turn) == (why if method == "combine" else None)
        assert w.why_refused(turn) == (None if method == "combine" else why)
        assert w.base.scored == []


async def test_a_hint_that_does_not_fit_the_context_leaves_the_reward(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=FakeTrainer(context_tokens=7), batch_size=ENOUGH) as w:
        turn = w.turn("NO, HOW it should be")
        await w.settled()
        assert str(w.untaught(turn)).endswith("with it the prompt is longer than the context")
        assert [s.reward for s in w.ledger.samples.oldest(9)] == [-1]
        assert w.base.scored == []
