"""The labelled cases and the injections, judged through the real code by the scripted endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from examples.judge_check.__main__ import main
from examples.judge_check.cases import Injection, drawn, read_cases, read_injections
from examples.judge_check.measure import (
    Rows,
    against_labels,
    as_meant,
    interleaved,
    interval,
    judge_all,
    moved,
    read_rows,
)
from examples.judge_check.scripted import ScriptedJudge
from tests.judge.test_fence import read
from tinker_claw.app.server import in_background
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, Question

PAGE = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()
SETTINGS = JudgeSettings()
FIRST_CASES = [50, 159, 122, 31, 54, 166, 58, 141]
FIRST_INJECTIONS = [45, 33, 29, 2, 65, 23, 9, 28]
"""First of the third and of the rest, as drawn."""


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
    for table in (reading.ratings, reading.hints):
        assert f"{table.right} of {table.of}" in PAGE, "docs/judges.md has the command's figures"
        assert table.right == table.of


def test_the_draw_is_the_one_that_was_written_down() -> None:
    """Prompts were chosen on the first third of it."""
    (third, rest), (few, more) = drawn(read_cases()), drawn(read_injections())
    assert [len(part) for part in (third, rest, few, more)] == [59, 118, 22, 44]
    assert [case.id for case in (*third[:4], *rest[:4])] == FIRST_CASES
    assert [one.id for one in (*few[:4], *more[:4])] == FIRST_INJECTIONS


def test_what_asks_for_something_is_a_rejection_by_the_user() -> None:
    asking = [case for case in read_cases() if case.asks]
    assert len(asking) == 32
    assert {(case.label, case.state.role) for case in asking} == {(-1, "user")}
    assert all(word == word.casefold() and word for case in asking for word in case.asks)


@pytest.mark.parametrize("injection", read_injections(), ids=lambda one: f"{one.where}-{one.id}")
def test_no_injection_leaves_its_fence(injection: Injection) -> None:
    (case,) = [case for case in read_cases() if case.id == injection.base]
    put = injection.put_into(case)
    for question in (Question(), Question(hint=True)):
        asked = (question.about(one.request, one.reply, one.state) for one in (case, put))
        clean, messages = asked
        (before, plain), (mark, fences) = read(clean), read(messages)
        assert messages[0]["content"] == clean[0]["content"].replace(before, mark)
        assert [label for label, _ in fences] == [label for label, _ in plain]
        changed = [label for (label, a), (_, b) in zip(fences, plain, strict=True) if a != b]
        place = "reply" if put.reply != case.reply else "next state"
        assert [label.partition(",")[0] for label in changed] == [place]


async def measured(file: Path | None = None, scripted: ScriptedJudge | None = None) -> Rows:
    """Judge everything with the scripted judge, once."""
    scripted = scripted or ScriptedJudge()
    cases, every = read_cases(), {case.id: case for case in read_cases()}
    work = interleaved(cases, read_injections(), every)
    async with (
        in_background(scripted.app()) as url,
        HttpEndpoint(url, SETTINGS) as endpoint,
    ):
        judge = Judge(endpoint, SETTINGS, most_hints=1)
        return await judge_all(judge, endpoint, "scripted", work, every, file=file)


async def test_no_injection_makes_a_hint_from_a_tool() -> None:
    rows = await measured()
    effects = moved(read_injections(), rows)
    assert len(effects) == len(read_injections())
    assert not [one for one in effects if one.hinted and one.injection.where in ("tool", "web")]
    assert any(one.moved for one in effects), "word lists can be talked to"
    assert f"{sum(one.moved for one in effects)} injections moved it" in PAGE
    labels = against_labels(read_cases(), rows)
    assert f"{labels.right} of {labels.of}" in PAGE


async def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    file, first, again = tmp_path / "runs.jsonl", ScriptedJudge(), ScriptedJudge()
    rows = await measured(file, first)
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == len(rows) == 177 + 66
    file.write_text("".join(lines[:200]))
    gone_on = await measured(file, again)
    assert [replace(row, seconds=0) for row in gone_on.values()] == [
        replace(row, seconds=0) for row in rows.values()
    ]
    assert len(again.said) == 43 * SETTINGS.prm_m
    assert read_rows(file, "another judge") == {}


def test_a_run_that_is_cut_off_has_both_kinds_and_what_injections_are_put_into() -> None:
    cases, every = read_cases(), {case.id: case for case in read_cases()}
    work = interleaved(cases, read_injections(), every)[:80]
    seen = {(kind, one.id) for kind, one in work}
    put = [one for _, one in work if isinstance(one, Injection)]
    assert 15 <= len(put) <= 25
    assert all(("case", one.base) in seen for one in put)


def test_a_difference_has_an_interval() -> None:
    low, high = interval([1, 0, 0, 1, 0, 0, 0, 0, 1, 0] * 4)
    assert 0.1 < low < 0.3 < high < 0.5
    assert interval([0.0] * 9) == (0.0, 0.0)


@pytest.mark.slow
def test_the_command_measures_a_judge_by_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--judge-url", "nowhere", "--prm-m", "x"]) == 1
    assert "--prm-m" in capsys.readouterr().err
    assert main(["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "x"]) == 1
    assert "the judge at http://127.0.0.1:9/v1/chat/completions" in capsys.readouterr().err
    assert main(["--show", "--all", "--prm-m", "1"]) == 0
    said = capsys.readouterr().out
    assert "meant \\ read" in said
    assert "label \\ verdict" in said
    assert "Usable hints: " in said
    assert "injection 52 (web, a comment of HTML)" in said
