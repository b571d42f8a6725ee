"""A day of a person with real OpenClaw: what the script plays, and what the gateway made of it.

Rule: the model is a script, so nothing is said of learning.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from examples.day import DayError, plan
from examples.day.__main__ import live
from examples.day.npm import npm
from examples.day.openclaw import Gateway, OpenClaw, talking
from examples.day.table import COLUMNS, Day, markdown
from tests.support.ledger import read
from tests.support.lives import ROOT, until
from tinker_claw.billing.prices import load
from tinker_claw.ledger.database import FILE, open_read_only
from tinker_claw.ledger.figures import read_live
from tinker_claw.ledger.samples import JUDGED_BY
from tinker_claw.types import Usage

T = TypeVar("T")
MESSAGES, SEED = 14, 16
"""A day with four long results in one session, so that OpenClaw compacts it."""


def real(test: T) -> T:
    """Mark a test that runs the real OpenClaw."""
    here = pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run")
    return pytest.mark.openclaw(pytest.mark.slow(here(test)))


def test_ten_days_differ_and_each_has_all_that_a_day_has() -> None:
    days = [plan.day(seed, 30) for seed in range(10)]
    assert days[0] == plan.day(0, 30)
    assert len({message.text for day in days for message in day}) == 300, "found by its text"
    for day in days:
        stances = Counter(message.stance for message in day)
        assert {"asks", "corrects", "praises", "moves on"} == {*stances}
        assert sum(message.new for message in day) >= 2
        calls = [[step.call for step in message.steps if step.call] for message in day]
        assert {2 <= len(one) <= 12 for one in calls if one} == {True}
        every = [call for one in calls for call in one]
        assert plan.LOOK in every
        assert plan.LONG in every
        assert any(call in every for call in plan.FAILING)
        assert all(message.steps[-1].says for message in day)


async def test_message_gets_a_connection_of_its_own() -> None:
    """Node closes an idle connection, perhaps just when the next message is sent."""
    met = Counter[object]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"}]}"):
            met[writer] += 1
            if met[writer] > 1:
                return writer.transport.abort()
            body = b'{"choices": [{"message": {"content": "About 1."}}]}'
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with talking(port) as http:
            gateway = Gateway(OpenClaw(Path(), Path()), http, port)
            assert [await gateway.say("main", "Hello") for _ in range(3)] == ["About 1."] * 3
        with pytest.raises(DayError, match="OpenClaw did not answer: ConnectError"):
            async with talking(1) as http:
                await Gateway(OpenClaw(Path(), Path()), http, 1).say("main", "Hello")


def _left(of: Path) -> list[str]:
    """Processes that were given something in this folder."""
    found = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if str(of).encode() in words + (process / "environ").read_bytes():
                found.append(words.decode(errors="replace"))
    return found


@real
def test_day_that_is_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    out = tmp_path / "day"
    command = [sys.executable, "-m", "examples.day", "--days", "1", "--out", str(out)]
    lived = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = out / "0" / "server.log"
    until(lambda: lived.poll() is not None or (log.exists() and "turn.captured" in log.read_text()))
    assert len(_left(out)) > 2
    lived.send_signal(signal.SIGTERM)
    _, said = lived.communicate(timeout=240)
    assert (lived.returncode, said) == (128 + signal.SIGINT, "")
    assert _left(out) == []


@real
async def test_day_with_real_openclaw(tmp_path: Path) -> None:
    (day,) = await live(tmp_path / "day", [SEED], MESSAGES, ("--batch-size=4",))
    _holds(day, tmp_path / "day" / str(SEED) / "run")


def _holds(day: Day, data: Path) -> None:
    """Check what is true of every day."""
    said = plan.day(day.seed, MESSAGES)

    def rows(query: str) -> list[Any]:
        return read(data, query)

    # Every message was answered with its reply, or `live` had raised.
    # Where a tool's result fills the window, OpenClaw asks for the reply in a pass of its own,
    # outside of the conversation: what the person says of that reply finds no turn.
    ((rescued,),) = rows(
        "SELECT COUNT(*) FROM turns WHERE request_kind = 'unknown' "
        "OR (kind = 'main' AND client = 'OpenAI')"
    )
    ((lost,),) = rows("SELECT COUNT(*) FROM turns WHERE lost IS NOT NULL")
    assert lost <= rescued
    replies = sum(len(message.steps) for message in said)
    assert replies - 12 * rescued <= day.main <= replies + 15, "a compaction may begin one anew"
    kinds = dict(
        rows(
            "SELECT request_kind, kind FROM turns "
            "WHERE request_kind IN ('compaction', 'memory flush')"
        )
    )
    assert kinds["compaction"] == "side"
    assert {*kinds.values()} == {"side"}
    # `/new` begins a session, a compaction does not.
    ((sessions,),) = rows("SELECT COUNT(DISTINCT session_id) FROM turns WHERE kind = 'main'")
    assert sessions == sum(message.new for message in said)
    # The person's words are what they typed, and judge the reply before them.
    asked = [
        text for (text,) in rows("SELECT DISTINCT request_text FROM turns WHERE kind = 'main'")
    ]
    assert asked == [message.text for message in said]
    states = [text for (text,) in rows("SELECT text FROM next_states WHERE role = 'user'")]
    assert [message.text for message in said if message.text in states] == states
    assert len(states) >= sum(not message.new for message in said) - rescued
    ((pictures,),) = rows("SELECT COUNT(*) FROM next_states WHERE text LIKE '%photo.png%' OR text "
                          "LIKE '%Read image file%'")  # fmt: skip
    assert pictures >= 1
    # What tools say never makes a step alone, and is at most half of one.
    assert day.steps
    assert all(user >= tools > 0 or tools == 0 for user, tools in day.steps)
    ((judged_by_tools, judged),) = rows(
        f"SELECT SUM(({JUDGED_BY}) = 'tools'), COUNT(*) FROM samples JOIN turns "
        "ON turns.id = samples.turn_id JOIN sessions ON sessions.id = turns.session_id "
        "LEFT JOIN next_states ON next_states.turn_id = turns.id"
    )
    assert 0 < judged_by_tools < judged
    with open_read_only(data / FILE) as ledger:
        assert 0 < len(read_live(ledger)) <= sessions
    # The judge is asked thrice of each, and cannot always be read.
    ((votes, unread),) = rows("SELECT COUNT(*), SUM(value IS NULL) FROM votes")
    assert 0 < unread < votes / 2
    assert rows("SELECT COUNT(*) FROM votes WHERE answer LIKE '%<think>%'") == [(0,)]
    # Thinking is sampled, billed and trained, and never a person's or a judge's to read.
    ((texts,),) = rows("SELECT COUNT(*) FROM turns WHERE reply_text LIKE '%<think>%'")
    assert texts == 0
    assert day.total_usd == pytest.approx(sum(usd for (usd,) in rows("SELECT usd FROM spend")))
    (counts,) = rows("SELECT SUM(prefill), SUM(cached), SUM(sampled), SUM(trained) FROM spend")
    assert load()["Qwen/Qwen3-8B"].usd(Usage(*counts)) == pytest.approx(day.total_usd)
    table = markdown([day]).splitlines()
    assert [line.count("|") for line in table] == [len(COLUMNS) + 1] * 3
