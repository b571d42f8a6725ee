"""One body of very many small things does not make the gateway deaf.

Rule: time is not measured. What costs time for each message, part, call or tool is counted where it
runs, and the thread of the event loop must not run it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.gateway_wires import WIRES, Json, Spoken
from tests.support.gateways import MODEL, World, gateway
from tinker_claw.render.renderer import Renderer

COUNT = 3000
_WORK = (
    *(f"tinker_claw/formats/{name}.py" for name in ("body", "chat", "fields", "messages")),
    "tinker_claw/formats/responses.py",
    "tinker_claw/privacy/redact.py",
    "tinker_claw/conversation/openclaw.py",
    "tinker_claw/prose.py",
    "tinker_claw/render/outside_text.py",
    "tinker_claw/render/prompt_cache.py",
    "/renderers/",
)
"""Where things are read, searched and laid out one by one."""


@contextmanager
def counting(files: tuple[str, ...]) -> Generator[Counter[str]]:
    """Count the calls, in this thread, of functions in these files, by name."""
    calls = Counter[str]()

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event == "call" and any(file in frame.f_code.co_filename for file in files):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def user(text: str | list[Json]) -> Json:
    return {"role": "user", "content": text}


def parts(wire: Spoken) -> bytes:
    return wire.body([user([{"type": "text", "text": f"{n} "} for n in range(COUNT)])], model=MODEL)


def messages(wire: Spoken) -> bytes:
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": f"number {n}"} for n in range(COUNT)]
    return wire.body([*said, user("go on")], model=MODEL)


def calls(wire: Spoken) -> bytes:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": "ls", "arguments": f'{{"a":{n}}}'}}
        for n in range(COUNT)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": made}
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in made]
    return wire.body([user("go"), said, *told], model=MODEL)


def tools(wire: Spoken) -> bytes:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    offered = [
        {"name": f"tool_{n}", "description": f"Number {n}.", "parameters": parameters}
        for n in range(COUNT)
    ]
    return wire.body([user("go")], offered, model=MODEL)


@pytest.mark.parametrize("body", [parts, messages, calls, tools])
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_what_takes_time_for_each_thing_in_a_body_leaves_the_event_loop_alone(
    tmp_path: Path, renderer: Renderer, wire: Spoken, body: Callable[[Spoken], bytes]
) -> None:
    written = body(wire)
    async with gateway(tmp_path, renderer, context_tokens=500_000) as world:
        for _ in range(2):  # new, and known
            with counting(_WORK) as found:
                response = await world.http.post(
                    wire.path, content=written, headers={"content-type": "application/json"}
                )
            assert response.status_code == 200, response.text
            assert max(found.values()) < COUNT / 10, found.most_common(3)
        assert len(world.turns()) == 2


@pytest.mark.parametrize("body", [parts, messages, calls, tools])
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_refusing_what_cannot_fit_leaves_the_event_loop_alone(
    tmp_path: Path, renderer: Renderer, wire: Spoken, body: Callable[[Spoken], bytes]
) -> None:
    written = body(wire)
    async with gateway(tmp_path, renderer, context_tokens=7_000) as world:
        with counting(_WORK) as found:
            response = await world.http.post(
                wire.path, content=written, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400, response.text
        assert max(found.values()) < COUNT / 10, found.most_common(3)
        assert world.turns() == []


@pytest.mark.parametrize(
    ("wire", "path"), [(WIRES[1], "/responses/input_tokens"), (WIRES[2], "/messages/count_tokens")]
)
async def test_counting_tokens_leaves_the_event_loop_alone(
    tmp_path: Path, renderer: Renderer, wire: Spoken, path: str
) -> None:
    async with gateway(tmp_path, renderer, context_tokens=500_000) as world:
        for body in (parts, messages, calls, tools):
            with counting(_WORK) as found:
                response = await world.http.post(
                    path, content=body(wire), headers={"content-type": "application/json"}
                )
            assert response.status_code == 200, response.text
            assert response.json()["input_tokens"] > COUNT
            assert max(found.values()) < COUNT / 10, found.most_common(3)


@pytest.mark.parametrize("wire", WIRES[1:], ids=lambda wire: wire.name)
async def test_items_of_one_reply_are_joined_once(
    world: World, renderer: Renderer, wire: Spoken
) -> None:
    """Joining each to all before it would take the square of their number."""
    few = 300  # fewer things than are read in a thread
    said = [{"role": "assistant", "content": f"{n} "} for n in range(few)]
    body = wire.body([user("go"), *said, user("go on")], model=MODEL)
    with counting(("tinker_claw/formats/fields.py",)) as found:
        response = await world.http.post(
            wire.path, content=body, headers={"content-type": "application/json"}
        )
    assert response.status_code == 200, response.text
    assert found["fields.one_reply"] == 1
    said_text = renderer.decode(world.turns()[0].prompt)
    assert "".join(f"{n} " for n in range(few)).strip() in said_text
