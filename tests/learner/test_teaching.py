"""Teachers: the fate of a sample whose hint can be scored, and of one whose hint cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support import learning
from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.support.learning import BETTER, HINT, PROMPT, SCORING, Says, World
from tests.support.ledger import sample_counts, sql
from tinker_claw.config.settings import Training
from tinker_claw.judge.prompts import Schema
from tinker_claw.ledger.database import FILE, open_read_only
from tinker_claw.ledger.judgements import BEHIND_HINTS
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turn_view import read_contents
from tinker_claw.methods import METHODS
from tinker_claw.methods.passes import spread
from tinker_claw.turn_state import Reason
from tinker_claw.types import Charge, Message, TokenLogprobs, Tokens, Verdict, uncharged
from tinker_claw.words import turn_fields

world = partial(learning.world, method=SCORING)
ENOUGH = 99
"""Batch size that no test here reaches, so that no step is taken."""


@pytest.mark.parametrize(("then", "now"), [(4, 0), (4, 2), (4, 3), (4, 8), (0, 4)])
@pytest.mark.parametrize("score_fresh", [False, True])
async def test_replies_are_taught_though_opd_topk_has_changed_since_they_were_sampled(
    tmp_path: Path, then: int, now: int, score_fresh: bool
) -> None:
    async with world(tmp_path, opd_topk=now, batch_size=2, score_fresh=score_fresh) as w:
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


async def test_every_hint_counts_alike_and_costs_one_pass(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=ENOUGH) as w:
        for _ in range(8):
            w.turn("GOOD", tokens=(9, 9))
            w.turn("NO, HOW it should be")
            await w.settled()
        assert w.base.scored == [(1, 2, 3, *HINT, 4, 7, 8)] * 8
        taught = [s.teacher for s in w.ledger.samples.load() if s.reward == -1]
        assert taught == [taught[0]] * 8
        assert taught[0] is not None


@pytest.mark.parametrize("method", ["combine", "opd"])
async def test_a_wish_for_a_new_style_trains_by_its_hint_and_never_by_a_reward(
    tmp_path: Path, method: str
) -> None:
    async with world(tmp_path, method=method, batch_size=2) as w:
        for tokens in ((7, 8), (9, 8)):
            w.turn("HOW it should be from here", tokens=tokens)
        await w.version(1)
        assert w.ledger.judgements.verdict(1) == Verdict((0, 0, 0), 0)
        assert sql(w.ledger).column("SELECT reward FROM samples") == [None, None]
        assert sql(w.ledger).column("SELECT advantage FROM samples") == [0.0, 0.0]
        assert [one.loss for one in w.trainer.steps[0]] == ["cross_entropy"]


async def test_what_a_tool_did_well_weighs_half(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=ENOUGH) as w:
        for role, said in (("tool", "YES"), ("tool", "NO"), ("user", "YES")):
            w.turn(said, role=role)
            await w.settled()
        assert [one.weight for one in w.ledger.samples.load()] == [0.5, 1.0, 1.0]


class TwoHints(Says):
    """A judge that gives two hints, one of them more often."""

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        found = await super().answers(messages, n, schema, charge)
        texts = ("do it the other way", "do it so much better, please", "do it the other way")
        said = zip(found, texts, strict=True)
        return [answer.replace("do it the other way", text) for answer, text in said]


class Likes(FakeSampler):
    """A teacher whose candidates are the student's under one hint, and others under any other."""

    def __init__(self, hint: tuple[int, ...]) -> None:
        super().__init__((1,))
        self.hint = hint

    async def logprobs(self, tokens: Tokens, **more: Any) -> TokenLogprobs:
        scores = await super().logprobs(tokens, **more)
        if tuple(tokens[3:5]) == self.hint:
            return scores
        far = tuple(tuple(token + 50 for token in row) for row in scores.topk_ids)
        return replace(scores, topk_ids=far)


@pytest.mark.parametrize(
    ("likes", "taken"), [(HINT, "do it the other way"), (BETTER, "do it so much better, please")]
)
async def test_of_the_papers_three_hints_that_with_the_most_common_candidates_teaches(
    tmp_path: Path, likes: tuple[int, ...], taken: str
) -> None:
    trainer = FakeTrainer(samplers={"base": Likes(likes)})
    async with world(
        tmp_path, trainer=trainer, endpoint=TwoHints(), recipe="paper", batch_size=ENOUGH
    ) as w:
        w.turn("NO, HOW it should be")
        await w.settled()
        (sample,) = w.ledger.samples.load()
        assert sample.teacher is not None
        assert sample.teacher.hint == taken
        assert len(w.base.scored) == 2


END = frozenset({8, 9, 10, 11})
"""All that the student proposes where its reply ends."""


@pytest.mark.parametrize(
    ("never", "k", "cut", "recipe", "taught"),
    [
        (END, 4, False, "default", False),  # the teacher's choice is out of reach
        (END, 0, False, "default", False),
        (END, 4, False, "paper", True),
        ({7}, 4, False, "default", True),  # not at the end
        (END - {8}, 4, False, "default", True),  # the student proposes what the teacher does
        (END, 4, True, "default", False),  # cut, where it might have ended
        (END, 0, True, "default", True),
    ],
)
async def test_end_is_not_distilled_where_the_teacher_goes_on(
    tmp_path: Path, never: set[int], k: int, cut: bool, recipe: str, taught: bool
) -> None:
    base = FakeSampler((1,), opinion=lambda token: -14.0 if token in never else LOGPROB)
    trainer = FakeTrainer(samplers={"base": base})
    async with world(tmp_path, trainer=trainer, batch_size=ENOUGH, recipe=recipe, opd_topk=k) as w:
        turn = w.turn("NO, HOW it should be", k=k, cut=cut)
        await w.settled()
        (sample,) = w.ledger.samples.load()
        assert (sample.teacher is not None, sample.reward) == (taught, -1)
        assert w.untaught(turn) == (None if taught else Reason.ENDLESS_HINT)


class Long(Says):
    """A judge whose hint has more tokens than allowed."""

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        found = await super().answers(messages, n, schema, charge)
        return [answer.replace("the other way", "long " * 60) for answer in found]


@pytest.mark.parametrize(
    ("endpoint", "context", "why"),
    [(Long(), 4096, "more than 256 tokens"), (Says(), 7, "longer than the context")],
)
@pytest.mark.parametrize("method", ["combine", "opd"])
async def test_a_hint_that_is_too_long_leaves_the_reward(
    tmp_path: Path, method: str, endpoint: Says, context: int, why: str
) -> None:
    trainer = FakeTrainer(context_tokens=context)
    async with world(
        tmp_path, method=method, endpoint=endpoint, trainer=trainer, batch_size=ENOUGH
    ) as w:
        turn = w.turn("NO, HOW it should be")
        await w.settled()
        said = (w.untaught if method == "combine" else w.why_refused)(turn) or ""
        assert said.startswith(Reason.UNFIT_HINT)
        assert why in said
        rewards = [sample.reward for sample in w.ledger.samples.load()]
        assert rewards == ([-1] if method == "combine" else [])
        assert w.base.scored == []


async def asked_again(w: World, said: str, times: int, user: str = "me") -> int:
    """Correct replies that come right behind a hint, by turns; return the newest turn."""
    newest = 0
    for _ in range(times):
        session = f"{user} {w.sessions}"
        w.turn("NO, HOW it should be", session=session, user=user)
        newest = w.turn(said, session=session, user=user)
        await w.settled()
    return newest


async def test_hints_that_the_model_seldom_follows_are_not_taught(tmp_path: Path) -> None:
    """But those of another user are, and again once replies behind hints are accepted."""
    async with world(tmp_path, batch_size=ENOUGH) as w:
        await asked_again(w, "NO, HOW it should be", BEHIND_HINTS // 4)
        scored = len(w.base.scored)
        bad = w.turn("NO, HOW it should be")
        await w.settled()
        assert len(w.base.scored) == scored, "nobody is asked, and nothing is billed"
        sample = next(one for one in w.ledger.samples.load() if one.turn_id == bad)
        assert (sample.teacher, sample.reward) == (None, -1)
        assert w.untaught(bad) == Reason.UNFOLLOWED_HINTS
        w.turn("NO, HOW it should be", user="other")
        await w.settled()
        assert len(w.base.scored) == scored + 1
        await asked_again(w, "YES", 3)
        scored = len(w.base.scored)
        w.turn("NO, HOW it should be")
        await w.settled()
        assert len(w.base.scored) == scored + 1


@pytest.mark.parametrize(
    ("times", "settings"),
    [
        (BEHIND_HINTS // 4 - 1, {}),  # too few
        (BEHIND_HINTS // 2, {"recipe": "paper"}),
        (BEHIND_HINTS, {"method": "sdft"}),  # it tells the reply that was accepted in the end
    ],
)
async def test_hints_are_taught_where_nothing_shows_that_they_are_not_understood(
    tmp_path: Path, times: int, settings: dict[str, Any]
) -> None:
    async with world(tmp_path, batch_size=ENOUGH, **settings) as w:
        await asked_again(w, "NO, HOW it should be", times)
        scored = len(w.base.scored)
        w.turn("NO, HOW it should be", session="shown")
        if settings.get("method"):
            w.turn("YES", session="shown")
        await w.settled()
        assert len(w.base.scored) == scored + 1


@pytest.mark.parametrize(("then", "taught"), [(None, True), ("YES", True), ("NO", False)])
async def test_what_tools_reject_says_nothing_about_hints(
    tmp_path: Path, then: str | None, taught: bool
) -> None:
    """But what the user says of the reply behind the calls does."""
    async with world(tmp_path, batch_size=ENOUGH) as w:
        for number in range(BEHIND_HINTS // 4):
            w.turn("NO, HOW it should be", session=f"s{number}")
            w.turn("NO such file", session=f"s{number}", role="tool")
            if then:
                w.turn(then, session=f"s{number}")
        await w.settled()
        scored = len(w.base.scored)
        w.turn("NO, HOW it should be")
        await w.settled()
        assert len(w.base.scored) == scored + taught


# A teacher that writes


def test_only_combine_has_a_teacher_that_writes_and_not_in_the_papers_recipe() -> None:
    assert [name for name, one in METHODS.items() if one.writes(Training())] == ["combine"]
    assert not METHODS["combine"].writes(Training(recipe="paper"))


@pytest.mark.parametrize("topk", [4, 0])
async def test_what_the_teacher_writes_is_trained_behind_the_prompt_without_the_hint(
    tmp_path: Path, topk: int
) -> None:
    async with world(tmp_path, method="combine", batch_size=2, opd_topk=topk) as w:
        w.turn("YES", tokens=(9, 8))
        w.turn("NO, HOW it should be", tokens=(7, 7, 8))
        await w.version(1)
        assert w.base.prompts == [(1, 2, 3, *HINT, 4)]
        assert (w.base.params[0].student_topk, w.base.params[0].temperature) == (topk, 1.0)
        assert w.base.scored == []
        passes = {one.loss: one.datums for one in w.trainer.steps[0]}
        (accepted,), (written,) = passes["ppo"], passes["cross_entropy"]
        assert accepted.tokens == (*PROMPT, 9, 8), "the rejected reply is not pushed down"
        assert (written.tokens, written.start) == ((*PROMPT, 6, 8), len(PROMPT))
        assert bool(written.targets) == bool(topk)
        likely = math.exp(LOGPROB) if topk else 1.0
        weight = likely / (w.parts.reply_tokens * 2)  # two samples
        assert written.weights == (pytest.approx((weight,) * (topk or 1)),) * 2
        explained = sql(w.ledger).column("SELECT advantage FROM samples ORDER BY id")
        assert explained == [1.0, 0.0]


@pytest.mark.parametrize(
    ("said", "opinion", "why"),
    [
        ((6, 6, 6), LOGPROB, Reason.ENDLESS_HINT),
        ((6, 8), math.nan, f"{Reason.UNSCORED}: turn 1: a score is not a number"),
    ],
)
async def test_a_written_reply_without_an_end_or_a_number_leaves_the_reward(
    tmp_path: Path, said: Tokens, opinion: float, why: str
) -> None:
    trainer = FakeTrainer(samplers={"base": FakeSampler(said, opinion=lambda _: opinion)})
    async with world(tmp_path, method="combine", trainer=trainer, batch_size=ENOUGH) as w:
        turn = w.turn("NO, HOW it should be")
        await w.settled()
        (sample,) = w.ledger.samples.load()
        assert (sample.teacher, sample.reward) == (None, -1)
        assert w.untaught(turn) == why


async def test_a_written_reply_waits_in_the_ledger_as_it_was_written(tmp_path: Path) -> None:
    async with world(tmp_path, method="combine", batch_size=ENOUGH) as w:
        w.turn("NO, HOW it should be")
        await w.settled()
    with closing(Ledger(tmp_path)) as ledger:
        (sample,) = ledger.samples.load()
        assert sample.teacher is not None
        assert (sample.teacher.reply, len(sample.teacher.logprobs)) == ((6, 8), 2)
        assert [len(row) for row in sample.teacher.topk_ids] == [4, 4]
    with open_read_only(tmp_path / FILE) as rows:
        contents = read_contents(rows, sample.turn_id)
    assert contents is not None
    (told,) = (field.quote for field in turn_fields(contents) if field.name == "teacher")
    assert told == sample.teacher.text != ""


async def test_a_secret_is_neither_written_nor_behind_what_is_written(tmp_path: Path) -> None:
    async with world(
        tmp_path, method="combine", batch_size=ENOUGH, redact=lambda text: text.replace("6", "*")
    ) as w:
        repeated = w.turn("NO, HOW it should be")
        await w.settled()
        assert w.untaught(repeated) == f"{Reason.HOLDS}: in what the teacher wrote"
        asked = len(w.base.prompts)
        behind = w.turn("NO, HOW it should be", holds_secret=True)
        await w.settled()
        assert (w.untaught(behind) or "").startswith(f"{Reason.HOLDS}: in the prompt")
        assert len(w.base.prompts) == asked
        assert [sample.reward for sample in w.ledger.samples.load()] == [-1, -1]


@pytest.mark.parametrize(("weight", "recipe"), [(0.0, "default"), (1.0, "paper")])
async def test_where_a_written_reply_is_not_trained_the_rejected_one_is_pushed_down(
    tmp_path: Path, weight: float, recipe: Literal["default", "paper"]
) -> None:
    async with world(tmp_path, method="combine", batch_size=ENOUGH) as w:
        w.turn("NO, HOW it should be")
        await w.settled()
        (sample,) = w.ledger.samples.load()
    assert sample.teacher is not None
    assert sample.teacher.reply
    spread_out = spread(sample, -1.0, weight, Training(recipe=recipe))
    assert max(spread_out.tokens) < 0
    assert spread_out.written == 0.0
