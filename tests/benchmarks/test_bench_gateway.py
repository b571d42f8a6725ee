"""The gateway's benchmark, tiny: it runs, prints its tables, and compares every prompt."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import gateway, gateway_floods, vocabulary
from benchmarks.agent_requests import MIX, Conversation, Reply, unseen
from benchmarks.gateway_check import check
from benchmarks.gateway_rows import Size
from tests.support.chats import parse_chat
from tinker_claw.conversation.openclaw import without_volatile
from tinker_claw.ledger.ledger import Ledger

IDS = 3000
TINY = Size(
    alone=4,
    together=4,
    rounds=2,
    further=2,
    crowd=6,
    long=12,
    streams=(1, 2),
    memory=4,
)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores")
async def test_one_run_measures_every_row_and_finds_every_prompt_in_the_ledger(
    cache: Path,
) -> None:
    said: list[str] = []
    figures = await gateway.measure(cache, TINY, said.append, ids=IDS)
    assert len(figures.ours) == 9
    assert figures.failures == []
    assert sum(row.errors for row in [*figures.bare, *figures.ours]) == 0
    assert sum(row.cpu_ms for row in figures.ours) > 0
    asked = [row.what for row in figures.ours if row.health_ms is not None]
    assert len(asked) == 2
    # 12 to warm up; in each of two rounds 2 and 2, and twice a session begun and gone on
    # with twice; 2 never seen; one turn in ten of two long sessions; 6; 6; twice 4.
    requests = len(MIX) + 2 * (2 + 2 + 2 * (1 + 2)) + 2 + 2 * 1 + 6 + 6 + 8
    assert (figures.check.requests, figures.check.equal) == (requests, requests)
    assert figures.check.stored > requests  # those whose replies came one by one, for example
    assert [point.requests for point in figures.memory[1:]] == [2, 4, 2, 4]
    text = io.StringIO()
    gateway.show(Console(file=text, width=140), figures)
    assert f"verified {requests} of {requests}" in text.getvalue()
    missed = replace(figures, check=replace(figures.check, equal=0))
    verdicts = gateway.verdicts(missed)
    assert not verdicts[f"ids equal to a full render: 0 of {requests}, all"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores")
async def test_floods_are_measured_on_every_wire(cache: Path) -> None:
    what = "JSON nested 100,000 deep"
    silences = await gateway_floods.measure(
        cache, lambda line: None, ids=IDS, floods=[what], at_once=3
    )
    wires = ["chat", "responses", "messages"]
    assert [(one.wire, one.what, one.status) for one in silences] == [
        row
        for wire in wires
        for row in ((wire, what, 400), (wire, "3 small requests at once", 200))
    ]
    assert all(one.silence_s > 0 for one in silences)


@pytest.mark.slow
def test_a_prompt_that_is_not_in_the_ledger_is_not_taken_for_equal(
    cache: Path,
) -> None:
    conversation = Conversation(MIX[1], "never sent")
    conversation.open()
    Ledger(cache / "empty").close()
    found = check(cache / "empty", vocabulary.load(IDS), [conversation.body()], 1)
    assert (found.requests, found.equal, found.stored) == (1, 0, 0)


def test_requests_have_the_shape_of_openclaw_s() -> None:
    conversation = Conversation(MIX[0], "a")
    conversation.open()
    first = parse_chat(conversation.body())
    conversation.answer(Reply("Yes.", ()))
    second = parse_chat(conversation.body())
    kept = without_volatile(first.messages)
    assert len(kept) == len(first.messages) - 1
    assert without_volatile(second.messages)[: len(kept)] == kept
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user", "user"]
    call = {"id": "c1", "type": "function", "function": {"name": "tool_1", "arguments": "{}"}}
    conversation.answer(Reply("", [call]))
    assert parse_chat(conversation.body()).messages[-2]["role"] == "tool"
    systems = {parse_chat(Conversation(s, "b").body()).messages[0]["content"] for s in unseen(9)}
    assert len(systems) == 9
