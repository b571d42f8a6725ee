"""User ratings in the ledger, in any order relative to judge and steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ledger import judgeable, new_turn, postpone, sample_counts, sql
from tests.support.stories import Told
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.prune import in_session
from tinker_claw.ledger.samples import NO_GRADIENT, STEPS_FAILED
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import LessonBlock as Lessons
from tinker_claw.types import NextState, Vote, Wish

Deed = tuple[Literal["say"], float] | tuple[Literal["judge", "queue", "begin", "commit", "void"]]
SCORES = st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0])
DEEDS = st.one_of(
    st.tuples(st.just("say"), SCORES),
    st.tuples(st.sampled_from(["judge", "queue", "begin", "commit", "void"])),
)


class Life:
    """One turn, with the calls of judge and learner on it."""

    def __init__(self, directory: Path) -> None:
        self.told = Told(directory)
        self.ledger = self.told.ledger
        self.turn = self.ledger.turns.add(new_turn(self.ledger, "s"))
        self.said: list[float] = []
        self.found: Vote | None = None
        self.step: int | None = None
        self.trained: Vote | None = None

    @property
    def open(self) -> bool:
        return self.ledger.turns.is_open(self.turn)

    def do(self, deed: Deed) -> None:
        match deed:
            case ("say", score):
                assert isinstance(score, float)
                about = About("turn", self.turn)
                answer = self.ledger.feedback.give("me", about, Feedback(score, f"no {score}"))
                assert answer is not None
                counts = self.trained is None and self.step is None
                assert (answer.unused is None) == counts
                self.said.append(score)
            case ("judge",) if self.open and self.found is None:
                self.found = 1
                self.told.judge(self.turn, 1, "found")
            case ("queue",) if self.open and (verdict := self.verdict()) is not None:
                self.ledger.samples.add(self.turn, verdict.value, None)
            case ("begin",) if self.step is None and (batch := self.ledger.samples.load()[:1]):
                self.step = self.ledger.steps.begin(self.told.version.id, [batch[0].id])
            case ("commit",) if self.step is not None:
                (sample,) = self.ledger.samples.load()[:1]
                self.trained = sample.reward
                self.told.version = self.ledger.steps.commit(
                    self.step, self.told.version, state_ref="s", sampler_ref="p", metrics={}
                )
                self.step = None
            case ("void",) if self.step is not None:
                self.ledger.steps.void(self.step, "failed")
                self.step = None
            case _:
                pass

    def verdict(self) -> Any:
        return self.ledger.judgements.verdict(self.turn)

    def check(self) -> None:
        verdict = self.verdict()
        if self.said:
            newest = self.said[-1]
            assert verdict.score == newest, "the newest counts, whatever the judge found"
            assert verdict.value == (newest > 0) - (newest < 0)
            hints = self.ledger.judgements.hints(self.turn)
            assert hints == ((f"no {newest}",) if newest < 0 else ())
        else:
            assert (verdict and verdict.value) == self.found
        row = sql(self.ledger).row("SELECT judged FROM verdicts WHERE turn_id = ?", self.turn)
        assert (row["judged"] if row else None) == self.found
        counts = sample_counts(self.ledger)
        assert counts["trained"] == (self.trained is not None), "once at most"
        if counts["trained"]:
            (kept,) = sql(self.ledger).rows("SELECT reward FROM samples WHERE step_id IS NOT NULL")
            assert kept["reward"] == self.trained
        elif counts["queued"] and self.step is None:
            assert self.ledger.samples.load()[0].reward == verdict.value, "never a stale one"


@settings(max_examples=40)
@given(st.lists(DEEDS, max_size=12))
def test_no_order_trains_twice_or_on_what_was_taken_back(deeds: list[Deed]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        life = Life(Path(directory))
        for deed in deeds:
            life.do(deed)
            life.check()
        life.ledger.close()


def test_no_order_takes_a_reason_from_what_can_never_be_trained(tmp_path: Path) -> None:
    ledger = Told(tmp_path).ledger
    turn = ledger.turns.add(new_turn(ledger, "s", untrained_because=Reason.HUNG_UP))
    for score in (1.0, -1.0, 0.0):
        answer = ledger.feedback.give("me", About("turn", turn), Feedback(score))
        assert answer is not None
        assert answer.unused == Reason.HUNG_UP
    assert judgeable(ledger) == []
    ledger.close()


def test_feedback_on_an_expired_reply_says_why_it_has_expired(tmp_path: Path) -> None:
    story = Told(tmp_path)
    ledger = story.ledger
    turn = story.judged("s", 1)
    sample = ledger.samples.add(turn, 1, None)
    ledger.samples.refuse([sample], NO_GRADIENT)
    ledger.samples.refuse([sample], STEPS_FAILED)  # it came too late
    answer = ledger.feedback.give("me", About("turn", turn), Feedback(1.0))
    assert answer is not None
    assert answer.unused == Reason.NOTHING_BETTER
    ledger.close()


def test_nothing_trains_a_reply_whose_lesson_was_taken_out_of_its_prompt(
    tmp_path: Path,
) -> None:
    story = Told(tmp_path)
    ledger = story.ledger
    source = ledger.turns.add(new_turn(ledger, "source"))
    wish = Wish("Be brief.", "always brief")
    none: dict[str, Any] = {"ballots": [], "hints": []}
    ledger.judgements.add(source, value=-1, wish=wish, **none)
    (lesson,) = ledger.lessons.of_user("me")
    told = Lessons((lesson.id,), 1, 2)
    for key in ("s", "other"):
        ledger.lessons.begin(ledger.turns.session("me", key), (lesson.id,))
    queued, neutral, aside = (ledger.turns.add(new_turn(ledger, "s", told=told)) for _ in range(3))
    ledger.judgements.add(queued, value=1, **none)
    ledger.samples.add(queued, 1, None)
    ledger.judgements.add(neutral, value=0, **none)
    ledger.turns.refuse(neutral, TurnRefusal("neutral verdict"))
    ledger.turns.add_next_state(aside, NextState("user", "thanks"))
    postpone(ledger, aside, "?", last=True)
    trained = story.judged("other", 1, told=told)
    ledger.steps.begin(story.version.id, [ledger.samples.add(trained, 1, None)])
    ledger.forget(in_session("source", "me"))
    ledger.steps.void_unfinished()  # which puts back what may be trained
    assert ledger.samples.queued() == 0
    assert ledger.jobs.take_up(None) == []
    for turn in (queued, neutral, aside):
        answer = ledger.feedback.give("me", About("turn", turn), Feedback(1.0))
        assert answer is not None
        assert answer.unused == Reason.FORGOTTEN_LESSON
    assert judgeable(ledger) == []
    ledger.close()
