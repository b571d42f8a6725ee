"""Connections whose client sends too much, or does not read; the server of a background task."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import World, gateway, spell
from tinker_claw import connections
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import StopReason

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(world: World, said: bytes = b"") -> Ends:
    place = urlsplit(world.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(said)
    return reader, writer


async def everything(ends: Ends) -> bytes:
    """Read until the server closes."""
    async with asyncio.timeout(60):
        try:
            return await ends[0].read()
        except ConnectionResetError:
            return b""
        finally:
            ends[1].close()


async def test_headers_without_end_close_the_connection(world: World) -> None:
    ends = await connect(world, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: ")
    told = asyncio.create_task(everything(ends))
    for _ in range(100):
        if told.done() or ends[1].is_closing():
            break
        ends[1].write(b"a" * 4096)
        await asyncio.wait([told], timeout=0.01)
    await told  # it ends
    assert (await world.ask("hi")).status_code == 200


async def test_a_connection_without_a_request_is_closed(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes on sending a head, or has had an answer; not one that has asked."""
    for name in ("REQUEST_S", "IDLE_S"):
        monkeypatch.setattr(connections, name, 0.5)
    sampler = FakeSampler(Script(spell(renderer, "fine"), holds_after=1))
    async with gateway(tmp_path, renderer, sampler) as world:
        body = {"model": "demo", "messages": [{"role": "user", "content": "wait"}]}
        asking = asyncio.create_task(world.http.post("/chat/completions", json=body))
        get = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
        said = {"silent": b"", "half a head": get, "answered": get + b"\r\n"}
        ends = {name: await connect(world, sent) for name, sent in said.items()}
        heads = asyncio.create_task(_send_slowly(ends["half a head"][1]))
        read = {name: await everything(end) for name, end in ends.items()}
        await heads
        assert (read["silent"], read["half a head"]) == (b"", b"")
        assert read["answered"].startswith(b"HTTP/1.1 200")
        assert not asking.done()
        sampler.go_on.set()
        assert (await asking).status_code == 200


async def _send_slowly(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"x: 1\r\n")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/healthz"])
async def test_a_body_with_two_lengths_is_refused(path: str, world: World) -> None:
    """What follows the shorter one is not taken for a request."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    lengths = "content-length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    second = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = await everything(await connect(world, f"{head}{lengths}{second}".encode()))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"Send Content-Length or Transfer-Encoding, not both." in answer
    assert not world.turns()


async def _deaf(world: World, path: str, body: bytes = b"", **headers: str) -> socket.socket:
    """A client that sends a request and never reads."""
    place = urlsplit(world.url)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    deaf.setblocking(False)
    await asyncio.get_running_loop().sock_connect(deaf, (place.hostname, place.port))
    lines = {"host": "localhost", "content-type": "application/json"} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    method = "POST" if body else "GET"
    said = f"{method} {path} HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(deaf, said + body)
    return deaf


async def test_a_slow_reader_gets_all_of_a_long_answer(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_BYTES", 2048)
    async with gateway(tmp_path, renderer) as world:
        world.say("and so on " * 600)
        body = {"model": "demo", "messages": [{"role": "user", "content": "tell"}], "stream": True}
        said = json.dumps(body).encode()
        with await _deaf(world, "/v1/chat/completions", said, connection="close") as slow:
            loop, got = asyncio.get_running_loop(), b""
            async with asyncio.timeout(60):
                while piece := await loop.sock_recv(slow, 1000):
                    got += piece
        assert b"data: [DONE]" in got
        (turn,) = world.turns()
        assert turn.completion.stop_reason is StopReason.STOP
