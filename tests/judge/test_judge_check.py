"""The labelled cases and the injections, judged through the real code by the scripted endpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from examples.judge_check.__main__ import main
from examples.judge_check.cases import Injection, read_cases, read_injections
from examples.judge_check.measure import against_labels, as_meant, inject
from examples.judge_check.scripted import ScriptedJudge
from tests.judge.test_fence import read
from tinker_claw.app.server import in_background
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, hint_messages, verdict_messages

PAGE = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()
SETTINGS = JudgeSettings()


def test_there_are_enough_cases_of_each_kind() -> None:
    cases, injections = read_cases(), read_injections()
    assert len(cases) >= 150
    languages = Counter(case.language for case in cases)
    assert len([n for n in languages.values() if n >= 20]) >= 6
    roles = Counter(case.state.role for case in cases)
    assert min(roles.values()) >= 40
    assert Counter(case.label for case in cases).keys() == {-1, 0, 1}
    about = " ".join(case.about for case in cases)
    for kind in ("thanks", "topic change", "correction", "injection", "complaint", "neutral"):
        assert kind in about
    assert len({(c.request, c.reply, c.state) for c in cases}) == len(cases)
    assert len(injections) >= 60
    assert len({one.text for one in injections}) == len(injections)
    places = Counter(one.where for one in injections)
    assert places.keys() == {"reply", "user", "tool", "web"}
    assert min(places.values()) >= 15
    assert len({one.language for one in injections}) >= 6


async def test_answers_are_read_as_the_endpoint_meant_them() -> None:
    reading = await as_meant(SETTINGS, INCLUDED, read_cases())
    labels = against_labels(read_cases(), reading.judged)
    for table in (reading.ratings, reading.hints, labels):
        assert f"{table.right} of {table.of}" in PAGE, "docs/judges.md has the command's figures"
    assert reading.ratings.right >= 0.97 * reading.ratings.of
    assert reading.hints.right >= 0.97 * reading.hints.of


@pytest.mark.parametrize("injection", read_injections(), ids=lambda one: f"{one.where}-{one.id}")
def test_no_injection_leaves_its_fence(injection: Injection) -> None:
    (case,) = [case for case in read_cases() if case.id == injection.base]
    put = injection.put_into(case)
    for ask in (verdict_messages, hint_messages):
        clean, messages = (ask(one.request, one.reply, one.state) for one in (case, put))
        (before, plain), (mark, fences) = read(clean), read(messages)
        assert messages[0]["content"] == clean[0]["content"].replace(before, mark)
        assert [label for label, _ in fences] == [label for label, _ in plain]
        changed = [label for (label, a), (_, b) in zip(fences, plain, strict=True) if a != b]
        place = "reply" if put.reply != case.reply else "next state"
        assert [label.partition(",")[0] for label in changed] == [place]


async def test_no_injection_makes_a_hint_from_a_tool() -> None:
    scripted = ScriptedJudge()
    async with (
        in_background(scripted.app()) as url,
        HttpEndpoint(url, SETTINGS) as endpoint,
    ):
        judge = Judge(endpoint, SETTINGS, most_hints=1)
        moved, by_itself, bases = await inject(judge, read_cases(), read_injections())
    assert (by_itself, bases) == (0, len({one.base for one in read_injections()}))
    assert not [one for one in moved if one.hinted and one.injection.where in ("tool", "web")]
    assert any(one.moved for one in moved), "word lists can be talked to"
    assert f"{sum(one.moved for one in moved)} injections moved it" in PAGE


@pytest.mark.slow
def test_the_command_measures_a_judge_by_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--judge-url", "nowhere", "--prm-m", "x"]) == 1
    assert "prm_m" in capsys.readouterr().err
    assert main(["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "x"]) == 1
    assert "the judge at http://127.0.0.1:9/v1/chat/completions" in capsys.readouterr().err
    assert main(["--show", "--prm-m", "1"]) == 0
    said = capsys.readouterr().out
    assert "meant \\ read" in said
    assert "label \\ verdict" in said
    assert "injections; of" in said
    assert "injection 20 (user, an order)" in said
