"""Judges that send anything: no answer ends judging, is taken for a verdict, or blames a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_judges import ENDLESS, MARK, READ, SLOW, UNREAD, BadJudge, bad_judge
from tests.test_learner import SHORT, World, world
from tinker_claw.config import Judge as JudgeSettings
from tinker_claw.errors import JudgeError
from tinker_claw.judge import HttpEndpoint
from tinker_claw.outages import Backoff

NEVER = Backoff(1e6, 1e6)


def endpoint(judge: BadJudge, timeout_s: float = 60.0, tokens: int = 4096) -> HttpEndpoint:
    settings = JudgeSettings(judge_timeout_s=timeout_s, prm_max_tokens=tokens)
    return HttpEndpoint(judge.url, settings, longest_wait_s=0.01)


async def sampled(w: World) -> None:
    """Another turn is judged well."""
    before = w.ledger.samples.waiting()
    w.turn("YES")
    await w.until(lambda: w.ledger.samples.waiting() > before)


@pytest.mark.parametrize("how", [*UNREAD, ENDLESS])
async def test_whatever_a_judge_sends_the_next_turn_is_judged(tmp_path: Path, how: str) -> None:
    async with (
        bad_judge() as judge,
        endpoint(judge) as http,
        world(tmp_path, endpoint=http, judge_waits=SHORT, rests=NEVER, batch_size=99) as w,
    ):
        await sampled(w)
        bad = w.turn(f"{MARK} {how}")
        await w.until(lambda: w.ledger.judgements.in_vain(bad) == 1)
        assert w.ledger.judgements.verdict(bad) is None
        await sampled(w)
        assert w.health.judge.state == "ok"
        assert w.ledger.turns.judgeable() == [bad], "it is tried again"


@pytest.mark.parametrize("how", READ)
async def test_an_odd_answer_that_holds_votes_is_read(tmp_path: Path, how: str) -> None:
    async with (
        bad_judge() as judge,
        endpoint(judge, tokens=16_384) as http,
        world(tmp_path, endpoint=http, batch_size=99) as w,
    ):
        odd = w.turn(f"{MARK} {how}")
        await w.settled()
        verdict = w.ledger.judgements.verdict(odd)
        assert verdict is not None
        assert verdict.value == 1
        assert w.ledger.judgements.hints(odd) == (), "nothing that could be followed"
        assert w.ledger.samples.waiting() == 1


async def test_an_answer_that_trickles_has_a_deadline_as_a_whole() -> None:
    async with bad_judge() as judge, endpoint(judge, timeout_s=0.3) as http:
        judge.spoilt = SLOW
        with pytest.raises(JudgeError, match=r"no whole answer within 0.3 s \(--judge-timeout-s\)"):
            await http.answers([{"role": "system", "content": ""}], 1)
