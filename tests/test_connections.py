"""Connections that never become a request, and too many of them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fakes import FakeSampler, Script
from tests.gateways import World, gateway, spell
from tinker_claw.render import Renderer
from tinker_claw.serve import connections

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(world: World, said: bytes = b"") -> Ends:
    place = urlsplit(world.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(said)
    return reader, writer


async def everything(ends: Ends) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(60):
        try:
            return await ends[0].read()
        except ConnectionResetError:
            return b""
        finally:
            ends[1].close()


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/chat", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-a: "]
)
async def test_who_never_finishes_the_headers_is_cut_off(
    said: bytes, tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    async with gateway(tmp_path, renderer) as world:
        ends = await connect(world, said)
        started = time.monotonic()
        cut = asyncio.create_task(everything(ends))
        while not cut.done():
            if said:
                ends[1].write(b"a")  # a byte now and then buys no time
            await asyncio.wait([cut], timeout=0.05)
        assert 0.2 < time.monotonic() - started < 20
        assert (await world.ask("hi")).status_code == 200


async def test_the_headers_of_a_second_request_have_their_limit_too(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    async with gateway(tmp_path, renderer) as world:
        whole = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        ends = await connect(world, whole)
        async with asyncio.timeout(60):
            head = await ends[0].readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].split()[0]
            await ends[0].readexactly(int(length))
        ends[1].write(whole[:20])
        assert await everything(ends) == b""


async def test_a_long_answer_is_no_silence(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    sampler = FakeSampler(Script(spell(renderer, "fine"), first_after_s=0.6))
    async with gateway(tmp_path, renderer, sampler) as world:
        assert (await world.ask("hi")).status_code == 200
        assert (await world.ask("hi", stream=True)).status_code == 200


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01 hello, is this TLS?\r\n\r\n", 400),
        (b"GET /healthz HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nbad header\r\n\r\n", 400),
    ],
)
async def test_what_is_no_request_is_refused_in_openais_shape(
    said: bytes, status: int, tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        head, _, body = (await everything(await connect(world, said))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status), head
        assert json.loads(body)["error"]["message"]


async def test_headers_without_end_are_refused(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        ends = await connect(world, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        told = asyncio.create_task(everything(ends))
        for _ in range(100):
            if told.done() or ends[1].is_closing():
                break
            ends[1].write(b"a" * 4096)
            await asyncio.wait([told], timeout=0.01)
        answer = await told
        assert b"431" in answer or b"400" in answer or answer == b""
        assert (await world.ask("hi")).status_code == 200


async def test_a_flood_of_silent_connections_keeps_nobody_out(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 40)
    async with gateway(tmp_path, renderer) as world:
        health = world.url.removesuffix("/v1") + "/healthz"
        flood = list[Ends]()
        for _ in range(5):
            flood += [await connect(world, b"GET /") for _ in range(30)]
            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                well = group.create_task(world.http.get(health, headers={"connection": "close"}))
                reply = group.create_task(world.ask("hi", headers={"connection": "close"}))
            assert (well.result().status_code, reply.result().status_code) == (200, 200)
            assert time.monotonic() - started < 20
        for _, writer in flood:
            writer.close()
