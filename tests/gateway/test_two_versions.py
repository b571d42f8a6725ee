"""Two versions answer one session in two each, and the record says whose replies are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_status_board import Told
from tests.fakes import FakeSampler, FakeTrainer
from tests.gateways import gateway, spell
from tests.learner.test_loop import world
from tests.learner.test_rollback import learn, undoing
from tinker_claw.cli import main
from tinker_claw.learner.recovery import restore, restore_pin
from tinker_claw.ledger.figures import Share, against
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Policy, PolicyHolder
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import PolicyVersion


def version(number: int) -> PolicyVersion:
    return PolicyVersion(id=number, parent=None, step=number, state_ref=None, sampler_ref="p")


def test_half_of_the_sessions_are_drawn_and_stay_where_they_are() -> None:
    newest, old = (Policy(version(n), FakeSampler((1,))) for n in (3, 0))
    holder = PolicyHolder(newest, old, half=True)
    assert holder.current is newest
    drawn = [holder.of_session(number) for number in range(1000)]
    assert 430 < drawn.count(old) < 570
    again = PolicyHolder(newest, old, half=True)
    assert [again.of_session(number) for number in range(1000)] == drawn
    evens, odds = (drawn[n::2].count(old) for n in (0, 1))
    assert abs(evens - odds) < 100, "whoever takes every other session gets both"
    holder.pin(old)
    assert {holder.of_session(number) for number in range(99)} == {old}
    holder.pin(None)
    assert {holder.of_session(number) for number in range(99)} == {newest}


async def test_sessions_are_answered_by_the_version_that_was_drawn_for_them(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as w:
        fresh = w.ledger.steps.roll_back(w.policy.newest.version)
        old = w.policy.swap(Policy(fresh, FakeSampler(spell(renderer, "new"))))
        old = Policy(old.version, FakeSampler(spell(renderer, "old")))
        w.policy.pin(old, half=True)
        for number in range(12):
            headers = {"X-Session-Id": f"s{number}", "X-Turn-Type": "main"}
            told = await w.ask("hello", headers=headers)
            first = told.json()["choices"][0]["message"]["content"]
            told = await w.ask("hello", first, "and now?", headers=headers)
            assert told.json()["choices"][0]["message"]["content"] == first, "to its end"
        answered = w.column("policy_version")
        assert set(answered) == {old.version.id, fresh.id}
        assert answered[::2] == answered[1::2]


async def test_half_outlives_the_process_and_ends_with_the_pin(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        await learn(w, 1)
        await undoing(w).pin(0, half=True)
        assert w.policy.current.version.id == 1
        assert {w.policy.of_session(n).version.id for n in range(20)} == {0, 1}
        await learn(w, 2)
        assert {w.policy.of_session(n).version.id for n in range(20)} == {0, 2}
    ledger = Ledger(tmp_path)
    assert ledger.pin.half
    again = PolicyHolder(
        await restore(ledger, trainer), await restore_pin(ledger, trainer), half=ledger.pin.half
    )
    assert {again.of_session(n).version.id for n in range(20)} == {0, 2}
    ledger.pin.to(1)
    assert not ledger.pin.half
    ledger.pin.to(1, half=True)
    ledger.pin.end()
    assert not ledger.pin.half
    ledger.close()


def test_difference_has_its_interval() -> None:
    # Newcombe 1998, table II, (a): 56/70 - 48/80, method 10.
    told = against(Share(2, 9, 56, 70), Share(0, 0, 48, 80))
    assert told.startswith("learning helps: 80% (69% to 88%) by v2 to v9, 60% (49% to 70%) by v0")
    assert told.endswith(": +20% (+5% to +33%)")
    assert against(Share(2, 9, 48, 80), Share(0, 0, 56, 70)).startswith("learning does harm")
    assert against(Share(2, 2, 5, 9), Share(0, 0, 3, 9)).startswith("not enough sessions to tell")
    assert against(Share(2, 2, 0, 0), Share(0, 0, 3, 9)) == "no verdicts of both yet"


def test_status_says_whose_first_replies_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    for number in range(9):
        story.judged(f"before {number}", -1)
    story.step(story.sampled("s", -1)[1])
    flags = ["status", "--port", "1", "--data-dir", str(tmp_path)]
    story.ledger.pin.to(0, half=True)
    for number in range(20):
        story.judged(f"after {number}", 1 if number % 4 else -1)
    assert main.main(flags) == 2
    told = capsys.readouterr().out
    assert "v0 answers one session in two, which is pinned" in told
    assert "compared   accepted first replies: no verdicts of both yet" in told
    assert main.main([*flags, "--json"]) == 2
    (arm,) = json.loads(capsys.readouterr().out)["ledger"]["compared"]["by_versions"]
    assert (arm["versions"], arm["good"], arm["of"]) == ("v1", 15, 20), "since then, no earlier"
    story.ledger.pin.to(0)
    assert main.main([*flags, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ledger"]["compared"] is None
    story.ledger.close()
