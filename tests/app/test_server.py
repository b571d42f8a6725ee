"""Connections whose client sends too much, or does not read; the server of a background task."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from tests.support.gateways import World, gateway
from tinker_claw.app import server
from tinker_claw.errors import ConfigError
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


async def test_headers_without_end_close_the_connection(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        ends = await connect(world, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        told = asyncio.create_task(everything(ends))
        for _ in range(100):
            if told.done() or ends[1].is_closing():
                break
            ends[1].write(b"a" * 4096)
            await asyncio.wait([told], timeout=0.01)
        await told  # it ends
        assert (await world.ask("hi")).status_code == 200


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
    monkeypatch.setattr(server, "SEND_BYTES", 2048)
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


async def test_what_a_user_of_a_background_server_fails_with_comes_out_as_it_is() -> None:
    """The error is not in a group, which code that turns errors into sentences would not look
    into."""

    async def use() -> None:
        async with server.in_background(FastAPI()) as url, httpx.AsyncClient() as client:
            assert (await client.get(url)).status_code == 404
            raise ConfigError("the port is taken")

    with pytest.raises(ConfigError, match="the port is taken"):
        await use()


def test_a_collection_leaves_alone_what_lives_as_long_as_the_process() -> None:
    """Run in a process of its own, as frozen objects stay frozen."""
    run = (
        "import gc, tinker_claw.app.wiring\n"
        "from tinker_claw.app.server import spare_collector\n"
        "before = len(gc.get_objects())\n"
        "spare_collector()\n"
        "assert len(gc.get_objects()) < before / 20, (len(gc.get_objects()), before)\n"
        "cycle = []\n"
        "cycle.append(cycle)\n"
        "del cycle\n"
        "assert gc.isenabled() and gc.collect()\n"
    )
    subprocess.run([sys.executable, "-c", run], check=True, timeout=120)
