"""Every request of the captures gets its session, purpose and next state, through a real gateway.

The table was written by hand, from the requests themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.captures import Captured, load
from tests.support.gateways import MODEL, gateway, spell
from tests.support.ledger import sql
from tests.support.pictures import seeing_renderer
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import NextState

NOWHERE = "side calls without a session"
CRON = "openclaw-cron-2f5d440694afaa2377fd85f7a5378c96"
CRON_JOB = "agent:main:cron:ccb55dd2-7e5e-47a4-8593-2648c8320502"
DASHBOARD_1 = "f3ba348f-ad34-48bc-8495-5ecc875bc625"
DASHBOARD_2 = "86069dad-2ce9-4f81-a697-068d7d2b4040"
MAIN = "10748c31-90e6-4b1f-b74b-900f478ec8a4"
CHILD = "2363b730-cc44-4c70-aacd-3fb9dc762262"
ACCEPTANCE = "acc-1795221500-31098"

READ = "[result 1 of 1, read]\nthe secret word is BANANA\n"
RAN = (
    "[result 1 of 2, exec]\nhello-from-exec\n1795220406\n/home/user/claw/ws\n\n"
    "[result 2 of 2, ls]\n"
    '".git/"\n"AGENTS.md"\n"BOOTSTRAP.md"\n"IDENTITY.md"\n"SOUL.md"\n"USER.md"\n"note.txt"'
)
SPAWNED = "[result 1 of 1, tool_call]\n"


@dataclass(frozen=True)
class Row:
    line: int
    request_kind: str
    session: str
    kind: str = "main"
    user: str | None = None
    """Next words of the user."""
    tool: str | None = None
    """Beginning of the tool results that came next."""


def side(line: int, call: str, session: str = NOWHERE) -> Row:
    return Row(line, call, session, "side")


USER, TOOL = "user turn", "tool loop"
TABLE: dict[str, list[Row]] = {
    "acceptance": [
        Row(1, USER, ACCEPTANCE, user="What was my first message? Answer briefly."),
        Row(3, USER, ACCEPTANCE, user="Thanks, say goodbye."),
        Row(5, USER, ACCEPTANCE),
    ],
    "err_500": [
        Row(1, USER, "err-500"),
        Row(3, "retry", "err-500"),
        Row(5, "retry", "err-500"),
    ],
    "err_cut": [
        Row(1, USER, "err-cut"),
        Row(3, "retry", "err-cut", user="next after cut"),
        Row(5, USER, "err-cut"),
    ],
    "err_empty": [
        Row(1, USER, "err-empty"),
        Row(3, "re-ask", "err-empty", user="next after empty"),
        Row(5, USER, "err-empty"),
    ],
    "err_length": [
        Row(1, USER, "err-length", user="next after length"),
        Row(3, USER, "err-length"),
    ],
    "gateway_side": [
        Row(1, USER, "gw-A", user="gateway turn two"),
        Row(3, USER, "gw-A"),
        Row(5, USER, DASHBOARD_1),
        Row(7, USER, MAIN),
        side(10, "isolated cron", CRON),
        side(12, "cron", MAIN),
        side(14, "recap"),
        Row(16, USER, DASHBOARD_2, user="second message about fjords"),
        side(18, "recap"),
        Row(20, USER, "gw-S", tool=SPAWNED),
        side(22, "recap"),
        Row(24, TOOL, "gw-S"),
        side(26, "recap"),
        side(28, "subagent", CHILD),
        side(30, "announcement", "gw-S"),
        side(32, "recap"),
        side(34, "title"),
        Row(36, USER, DASHBOARD_2),
        side(38, "recap"),
        side(40, "recap"),
        side(42, "heartbeat", MAIN),
        Row(44, USER, "par-1"),
        side(46, "recap"),
        side(48, "recap"),
        Row(50, USER, "par-2"),
        side(52, "recap"),
    ],
    "tools_multiturn": [
        Row(1, USER, "sess-A", user="Read note.txt then run a command"),
        Row(3, USER, "sess-A", tool=READ),
        Row(5, TOOL, "sess-A", tool=RAN),
        Row(7, TOOL, "sess-A", user="Think about it"),
        Row(9, USER, "sess-A", user="once more (turn 4)"),
        Row(11, USER, "sess-A", user="turn 5"),
        Row(13, USER, "sess-A"),
        Row(15, USER, "sess-B"),
        Row(17, USER, "49a63739-f4f7-469e-add6-55140245e0e9"),
        Row(19, USER, "4f49ee16-a4b1-4fc0-9a0f-a80888417edc"),
    ],
    "variant_affinity": [
        Row(1, USER, "Sess_X.1", user="do a tool"),
        Row(3, USER, "Sess_X.1", tool="[result 1 of 1, exec]\nhi"),
        Row(5, TOOL, "Sess_X.1", user="three"),
        Row(7, USER, "Sess_X.1"),
    ],
    # The image itself stands in a message of OpenClaw's behind the result, and is nobody's words.
    "variant_image": [
        Row(1, USER, "img", tool="[result 1 of 1, read]\nRead image file [image/png]"),
        Row(3, TOOL, "img"),
    ],
    "variant_reasoning": [
        Row(1, USER, "Sess_X.1", user="do a tool"),
        Row(3, USER, "Sess_X.1", tool="[result 1 of 1, exec]\nhi"),
        Row(5, TOOL, "Sess_X.1", user="three"),
        Row(7, USER, "Sess_X.1"),
    ],
}
AFFINITY = ("session_id", "x-session-affinity", "x-client-request-id")
LOST = "a reply that never arrived"


def captured(scenario: str) -> list[Captured]:
    return [one for one in load() if one.scenario == scenario]


def unnamed(one: Captured) -> Captured:
    """The request as OpenClaw sends it unless it is told to name sessions in headers."""
    headers = {name: value for name, value in one.headers.items() if name not in AFFINITY}
    body = {name: value for name, value in one.body.items() if name != "prompt_cache_key"}
    return replace(one, headers=headers, body=body)


def spoken(answer: dict[str, Any]) -> str:
    """The answer as the model writes it."""
    if answer["kind"] in ("error", "cut"):
        return LOST
    calls = [
        json.dumps({"name": call["name"], "arguments": call["args"]})
        for call in answer.get("calls", ())
    ]
    calls = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    thought = f"<think>\n{answer['reasoning']}\n</think>\n\n" if "reasoning" in answer else ""
    said = [answer["text"]] if answer.get("text") else []
    return thought + "\n".join([*said, *calls])


def test_the_table_is_complete() -> None:
    rows = {(scenario, row.line) for scenario, rows in TABLE.items() for row in rows}
    assert rows == {(one.scenario, one.line) for one in load()}
    assert len(rows) == 60


@pytest.mark.parametrize("affinity", [True, False], ids=["", "without affinity"])
@pytest.mark.parametrize("scenario", TABLE)
async def test_conversations_are_followed(
    tmp_path: Path, renderer: Renderer, scenario: str, *, affinity: bool
) -> None:
    sees = scenario == "variant_image"
    renderer = seeing_renderer(tmp_path / "seeing") if sees else renderer
    requests = [one if affinity else unnamed(one) for one in captured(scenario)]
    async with gateway(tmp_path, renderer, context_tokens=200_000, sees=sees) as world:
        for one in requests:
            world.sampler.say(spell(renderer, spoken(one.answer)))
            response = await world.http.post(
                "/chat/completions",
                json=one.body | {"model": MODEL},
                headers={n: v for n, v in one.headers.items() if n != "accept-encoding"},
            )
            assert response.status_code == 200, response.text
        rows = sql(world.ledger).rows(
            "SELECT turns.id, request_kind, kind, key, trace FROM turns "
            "JOIN sessions ON sessions.id = session_id ORDER BY turns.id"
        )
        got = [
            Row(
                one.line,
                row["request_kind"],
                row["key"],
                row["kind"],
                **_next(world.ledger.turns.next_state(row["id"])),
            )
            for row, one in zip(rows, requests, strict=True)
        ]
        if not affinity:  # a cron job has only its Runtime line; a name of its own is kept
            got = [replace(row, session=CRON) if row.session == CRON_JOB else row for row in got]
        wanted = TABLE[scenario]
        assert [_shortened(row, like) for row, like in zip(got, wanted, strict=True)] == wanted
        traces = [one.headers.get("traceparent", "--").split("-")[1] or None for one in requests]
        assert [row["trace"] for row in rows] == traces


def _next(state: NextState | None) -> dict[str, str]:
    return {state.role: state.text} if state else {}


def _shortened(row: Row, like: Row) -> Row:
    if row.tool is None or like.tool is None:
        return row
    return Row(
        row.line, row.request_kind, row.session, row.kind, row.user, row.tool[: len(like.tool)]
    )
