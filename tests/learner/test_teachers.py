"""SDPO and SDFT through the real judge and learner: who is asked, about what, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.learning import HINT, World, world
from tests.support.ledger import sample_counts, sql
from tinker_claw.ledger.prune import from_turn
from tinker_claw.retry import Backoff

SDFT, SDPO = "sdft", "sdpo"


def told(w: World) -> list[str | None]:
    """Text that the teacher got for every queued sample."""
    return [s.teacher.hint if s.teacher else None for s in w.ledger.samples.load()]


async def test_sdpo_learns_from_what_came_after_a_rejected_reply(tmp_path: Path) -> None:
    async with world(tmp_path, method=SDPO) as w:
        accepted, neutral = w.turn("YES, thanks"), w.turn("something else")
        placeless = w.turn("NO", hint_at=None)
        w.turn("NO, HOW it should be")
        w.turn("NO such file", role="tool")
        await w.settled()
        assert told(w) == ["NO, HOW it should be", "NO such file"]
        assert {*map(w.why_refused, (accepted, neutral, placeless))} == {"no correction"}
        assert {*w.base.scored} == {(1, 2, 3, *HINT, 4, 7, 8)}, "the same tokens, spliced"
        for _ in range(2):
            w.turn("NO")
        await w.version(1)
        ((only,),) = w.trainer.steps
        assert only.loss == "cross_entropy"
        assert len(only.datums) == 4


async def test_what_the_teacher_is_told_is_redacted(tmp_path: Path) -> None:
    async with world(tmp_path, method=SDPO, redact=lambda t: t.replace("hunter2", "***")) as w:
        w.turn("NO, it is hunter2")
        await w.settled()
        assert told(w) == ["NO, it is ***"]


async def test_sdft_shows_the_reply_that_was_accepted_after_the_correction(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, method=SDFT) as w:
        corrected = w.turn("NO", session="a")
        other = w.turn("NO", session="b")
        await w.settled()
        assert w.why_refused(corrected) == "no demonstration"
        assert w.base.scored == [], "nothing is paid before there is an example"
        again = w.turn("NO", session="a", tokens=(9,))
        w.turn("ran", session="a", role="tool", reply="calls a tool")
        accepted = w.turn("YES", session="a", reply="this way")
        await w.until(lambda: w.ledger.samples.queued() == 2)
        await w.settled()
        assert told(w) == ["this way"] * 2
        assert {s.turn_id for s in w.ledger.samples.load()} == {corrected, again}
        assert w.why_refused(accepted) == w.why_refused(other) == "no demonstration"


async def test_sdft_takes_no_example_that_the_user_did_not_accept(tmp_path: Path) -> None:
    async with world(tmp_path, method=SDFT) as w:
        corrected = w.turn("NO", session="a")
        await w.settled()
        w.turn("well", session="a", reply="neither")
        await w.settled()
        w.turn("YES", session="a", reply="of something else by now")
        await w.settled()
        failed = w.turn("NO such file", session="c", role="tool")
        w.turn("YES", session="c", reply="no answer to a user's correction")
        await w.settled()
        assert told(w) == []
        assert w.why_refused(corrected) == w.why_refused(failed) == "no demonstration"


async def test_sdft_finds_its_example_whichever_is_judged_first(tmp_path: Path) -> None:
    async with world(tmp_path, method=SDFT, running=False) as w:
        w.turn("NO", session="a")
        w.turn("YES", session="a", reply="this way")
        trainer = w.trainer
    async with world(tmp_path, method=SDFT, trainer=trainer) as w:
        await w.until(lambda: told(w) == ["this way"])
        await w.settled()
    async with world(tmp_path / "late", method=SDFT, judge_waits=Backoff(0.01, 0.02)) as w:
        w.says.failing = 1  # so that the first is tried again behind the second
        w.turn("NO", session="a")
        w.turn("YES", session="a", reply="this way")
        await w.until(lambda: told(w) == ["this way"])


@pytest.mark.parametrize("batch", [2, 4], ids=["trained", "queued"])
async def test_an_example_is_forgotten_with_the_turn_that_it_was(
    tmp_path: Path, batch: int
) -> None:
    """Two corrections lie before it, so it is not what followed the first of them."""
    async with world(tmp_path, method=SDFT, batch_size=batch) as w:
        w.turn("NO", session="a")
        w.turn("NO", session="a")
        kept = w.turn("NO", session="b")
        await w.settled()
        secret = w.turn("YES", session="a", reply="SECRET")
        state = "trained" if batch == 2 else "queued"
        await w.until(lambda: sample_counts(w.ledger)[state] == 2)
        w.ledger.forget(from_turn(secret))
        rows = sql(w.ledger).rows("SELECT hint, teacher_logprobs FROM samples")
        assert {(row["hint"] or "", row["teacher_logprobs"]) for row in rows} <= {("", None)}
        assert w.why_refused(kept) == "no demonstration"
