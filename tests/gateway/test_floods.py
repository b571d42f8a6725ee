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

import httpx
import pytest

from benchmarks.gateway_wires import WIRES, Json, Spoken
from tests.support.gateways import MODEL, World, gateway, served
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


async def post(world: World, path: str, content: bytes) -> httpx.Response:
    """Send a body; nothing is done for each thing in it on the event loop."""
    headers = {"content-type": "application/json"}
    with counting(_WORK) as calls:
        response = await world.http.post(path, content=content, headers=headers)
    assert max(calls.values()) < COUNT / 10, calls.most_common(3)
    return response


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("body", [parts, messages, calls, tools])
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_what_takes_time_for_each_thing_in_a_body_leaves_the_event_loop_alone(
    tmp_path: Path, renderer: Renderer, wire: Spoken, body: Callable[[Spoken], bytes], fits: bool
) -> None:
    content, tokens = body(wire), 500_000 if fits else 7_000
    async with gateway(tmp_path, renderer, context_tokens=tokens) as world:
        for _ in range(2):  # new, and known
            response = await post(world, wire.path, content)
            assert response.status_code == (200 if fits else 400), response.text
        assert len(world.turns()) == (2 if fits else 0)


@served(context_tokens=500000)
@pytest.mark.parametrize(
    ("wire", "path"), [(WIRES[1], "/responses/input_tokens"), (WIRES[2], "/messages/count_tokens")]
)
async def test_counting_tokens_leaves_the_event_loop_alone(
    world: World, wire: Spoken, path: str
) -> None:
    for body in (parts, messages, calls, tools):
        response = await post(world, path, body(wire))
        assert response.status_code == 200, response.text
        assert response.json()["input_tokens"] > COUNT
