"""Two versions answer one session in two each, and the ledger records which replies are
accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_status_board import Told
from tests.fakes import FakeSampler, FakeTrainer
from tests.gateways import gateway, spell
from tests.learner.test_loop import world
from tests.learner.test_rollback import learn, undoing
from tinker_claw.cli import common, main
from tinker_claw.errors import UndoError
from tinker_claw.learner.recovery import restore, restore_pin
from tinker_claw.ledger.figures import Share, compare
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


async def test_other_model_is_refused_with_the_names_that_there_are(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as w:
        refused = await w.ask("hi", model="gpt-9")
        assert refused.json()["error"]["message"].endswith(
            "of which demo@v0 is the newest. --models gives it other names."
        )


async def test_newest_version_is_not_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "v1 is the newest version, so it would be compared with itself: name an earlier one"
    async with world(tmp_path) as w:
        await learn(w, 1)
        await undoing(w).pin(0)
        with pytest.raises(UndoError, match=why):
            await undoing(w).pin(1, half=True)
        assert w.policy.current.version.id == 0, "it is pinned as before"
    directory = tmp_path / "other"
    story = Told(directory)
    _, made = story.step(story.sampled("s", 1)[1])
    story.ledger.close()
    (directory / "adapters" / made.sampler_ref).mkdir(parents=True)
    assert main.main(["pin", "v1", "--half", "--data-dir", str(directory)]) == 2
    assert why in capsys.readouterr().err


def test_half_claims_a_difference_where_there_is_evidence() -> None:
    def against(new: tuple[int, int], old: tuple[int, int]) -> str:
        arms = Share(*old, 0, 0), Share(*new, 2, 9)
        return str(compare(*arms, "learning helps", "it harms")["meaning"])

    assert against((21, 24), (11, 32)) == (
        "learning helps: 88% (59% to 99%) by v2 to v9, 34% (13% to 62%) by v0; evidence 288 to 1"
    )
    assert against((11, 32), (21, 24)).startswith("it harms: 34%")
    assert against((5, 9), (3, 9)).startswith("not enough verdicts to tell: 56%")
    assert compare(None, Share(3, 9), "", "")["meaning"] == "nothing to compare yet"
    assert common.number(-0.0) == "0"


def test_status_says_whose_first_replies_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    for number in range(9):
        story.judged(f"before {number}", -1)
    story.step(story.sampled("s", -1)[1])
    flags = ["status", "--data-dir", str(tmp_path)]
    story.ledger.pin.to(0, half=True)
    for number in range(20):
        story.judged(f"after {number}", 1 if number % 4 else -1)
    assert main.main(flags) == 2
    told = capsys.readouterr().out
    assert "v0 answers one session in two, which is pinned" in told
    assert "compared   accepted first replies: nothing to compare yet" in told
    assert main.main([*flags, "--json"]) == 2
    (arm,) = json.loads(capsys.readouterr().out)["ledger"]["compared"]["by_versions"]
    assert (arm["versions"], arm["good"], arm["of"]) == ("v1", 15, 20), "since then, no earlier"
    story.ledger.pin.to(0)
    assert main.main([*flags, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ledger"]["compared"] is None
    story.ledger.close()
