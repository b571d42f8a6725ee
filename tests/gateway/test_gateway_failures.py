"""Clients that hang up, and samplers that fail, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import MODEL, chat, gateway, spell
from tests.support.ledger import one
from tests.support.waits import eventually
from tinker_claw.gateway.respond import STOPPED
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
async def test_reply_that_is_cut_by_a_stop_says_so_to_its_client_and_in_its_turn(
    tmp_path: Path, renderer: Renderer, path: str, stream: bool
) -> None:
    asked = {"input": "hi"} if path == "/responses" else {"messages": chat("hi"), "max_tokens": 99}
    sampler = FakeSampler(Script(spell(renderer, "one two three four"), holds_after=3))
    async with httpx.AsyncClient(timeout=60, verify=False) as http:
        async with gateway(tmp_path, renderer, sampler, drain_s=0) as world:
            body = {"model": MODEL, "stream": stream} | asked
            asking = asyncio.create_task(http.post(f"{world.url}{path}", json=body))
            async with asyncio.timeout(60):
                await sampler.holding.wait()
        response = await asking
    assert response.status_code == (200 if stream else 503)
    assert str(STOPPED) in response.text
    assert one(tmp_path, "SELECT reason FROM turns") == Reason.STOPPED


async def test_stop_waits_for_no_client_that_reads_nothing(
    tmp_path: Path, renderer: Renderer
) -> None:
    """Its buffers are full, so that it cannot even be told."""
    long = FakeSampler(Script((*spell(renderer, "x", end="") * 400_000,), chunk=100_000))
    with ExitStack() as stack:
        async with gateway(
            tmp_path, renderer, long, drain_s=0, max_reply_tokens=10**6, context_tokens=10**6
        ) as world:
            address = ("127.0.0.1", httpx.URL(world.url).port or 0)
            body = json.dumps({"model": MODEL, "messages": chat("hi"), "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}"
            deaf = stack.enter_context(closing(socket.create_connection(address)))
            deaf.sendall(
                f"{head}\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n".encode()
                + body
            )
            await eventually(lambda: long.prompts)
