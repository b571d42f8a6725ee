"""Episodes and groups as clients name them, in headers and bodies, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import MODEL, World, gateway
from tests.support.ledger import judgeable, sql
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason

EPISODE = {"X-Turn-Type": "episode"}
TOLD = {"X-Task-Id": "t", "X-Group-Id": "g", "X-Group-Size": "2"}


def of(session: str, **more: str) -> dict[str, str]:
    return {"X-Session-Id": session} | {name.replace("_", "-"): more[name] for name in more}


def sessions(world: World) -> list[tuple[Any, ...]]:
    rows = sql(world.ledger).rows(
        "SELECT key, sessions.task, name, size, episode FROM sessions "
        "LEFT JOIN groups ON groups.id = group_id ORDER BY sessions.id"
    )
    return [tuple(row) for row in rows]


def wrong(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


async def test_headers_say_what_a_session_is_an_attempt_at(world: World) -> None:
    await world.ask("hi", headers=of("a") | EPISODE)
    await world.ask("hi", headers=of("b") | TOLD)
    await world.ask("hi", headers=of("e", X_Task_Id="only a name"))
    await world.ask("hi", headers=of("f"), metadata={"mine": "x"})
    await world.ask("hi", headers=of("g") | TOLD | {"X-Turn-Type": "side"})
    await world.ask("hi", headers=of("h") | TOLD, model=f"{MODEL}@v0")
    assert sessions(world) == [
        ("a", None, None, None, 1),
        ("b", "t", "g", 2, 1),
        ("e", "only a name", None, None, 0),
        ("f", None, None, None, 0),
        ("g", None, None, None, 0),
        ("h", None, None, None, 0),
    ]
    assert set(world.column("reason")[:4]) == {None}


async def test_step_is_kept_whatever_its_environment_says_next(world: World) -> None:
    wrong = "Your previous response was not valid. You must respond with exactly one tool call."
    await world.ask("hi", headers=of("a") | EPISODE)
    await world.ask("hi", "fine", wrong, headers=of("a") | EPISODE)
    outcome = {"session": "a", "score": 1, "final": True}
    assert (await world.http.post("/feedback", json=outcome)).json()["counts"]
    assert judgeable(world.ledger) == [1, 2]


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        (of("a", X_Turn_Type="episodic"), {}, "X-Turn-Type"),
        (EPISODE, {}, "X-Session-Id"),
        (TOLD, {}, "X-Session-Id"),
        (of("a", X_Group_Id="g"), {}, "X-Group-Size"),
        (of("a", X_Group_Size="2"), {}, "X-Group-Id"),
        (of("a", X_Group_Id="g", X_Group_Size="0"), {}, "X-Group-Size"),
        (of("a", X_Group_Id="g", X_Group_Size="two"), {}, "X-Group-Size"),
        (of("a", X_Group_Id="g", X_Group_Size="1001"), {}, "X-Group-Size"),
    ],
)
async def test_what_is_not_told_in_full_is_refused_by_name(
    world: World, headers: dict[str, str], body: Any, param: str
) -> None:
    assert wrong(await world.ask("hi", headers=headers, **body)) == param
    assert sessions(world) == []


async def test_session_cannot_change_its_group_not_even_after_a_restart(
    tmp_path: Path, renderer: Renderer
) -> None:
    other = {"X-Group-Id": "other", "X-Group-Size": "2"}
    for _ in range(2):
        async with gateway(tmp_path, renderer) as world:
            assert (await world.ask("hi", headers=of("a") | TOLD)).status_code == 200
            assert wrong(await world.ask("hi", headers=of("a") | TOLD | other)) == "X-Group-Id"
            named = {"X-Group-Id": "g", "X-Group-Size": "2"}
            assert (await world.ask("hi", headers=of("a") | named)).status_code == 200


async def test_last_turn_of_an_episode_is_open_until_its_outcome_and_then_a_sample_may_be_made(
    world: World,
) -> None:
    done = {"X-Session-Done": "1"}
    await world.ask("hi", headers=of("a") | EPISODE | done)
    await world.ask("hi", headers=of("b") | done)
    assert world.column("state") == ["waiting", "refused"]
    assert judgeable(world.ledger) == []
    said = {"session": "a", "score": 0.25, "final": True}
    answer = (await world.http.post("/feedback", json=said)).json()
    assert (answer["counts"], answer["because"]) == (True, None)
    assert judgeable(world.ledger) == [1]
    assert world.woken == ["judge"]
    await world.ask("more", headers=of("a") | EPISODE)
    assert world.column("reason")[-1] == Reason.EPISODE_OVER


async def test_of_a_private_episode_nothing_is_kept(world: World) -> None:
    headers = of("a", X_Private="true") | TOLD
    assert (await world.ask("hi", headers=headers)).status_code == 200
    assert world.turns() == []
    assert sql(world.ledger).rows("SELECT * FROM groups") == []
