"""Connections that never become a request, and too many of them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from tests.fakes import FakeSampler, Script
from tests.gateways import World, gateway, spell
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


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/chat", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-a: "]
)
async def test_who_never_finishes_the_headers_is_cut_off(
    said: bytes, tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    async with gateway(tmp_path, renderer) as world:
        ends = await connect(world, said)
        started = time.monotonic()
        cut = asyncio.create_task(everything(ends))
        while not cut.done():
            if said:
                ends[1].write(b"a")  # a byte now and then buys no time
            await asyncio.wait([cut], timeout=0.05)
        await cut
        assert time.monotonic() - started > 0.2
        assert (await world.ask("hi")).status_code == 200


async def test_the_headers_of_a_second_request_have_their_limit_too(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.3)
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
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    sampler = FakeSampler(Script(spell(renderer, "fine"), first_after_s=0.6))
    async with gateway(tmp_path, renderer, sampler) as world:
        assert (await world.ask("hi")).status_code == 200
        assert (await world.ask("hi", stream=True)).status_code == 200


async def test_headers_without_end_close_the_connection(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        ends = await connect(world, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        told = asyncio.create_task(everything(ends))
        for _ in range(100):
            if told.done() or ends[1].is_closing():
                break
            ends[1].write(b"a" * 4096)
            await asyncio.wait([told], timeout=0.01)
        assert await told == b""
        assert (await world.ask("hi")).status_code == 200


async def test_a_flood_of_silent_connections_keeps_nobody_out(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST", 40)
    async with gateway(tmp_path, renderer) as world:
        health = world.url.removesuffix("/v1") + "/healthz"
        flood = list[Ends]()
        for _ in range(5):
            flood += [await connect(world, b"GET /") for _ in range(30)]
            async with asyncio.TaskGroup() as group:
                well = group.create_task(world.http.get(health, headers={"connection": "close"}))
                reply = group.create_task(world.ask("hi", headers={"connection": "close"}))
            assert (well.result().status_code, reply.result().status_code) == (200, 200)
        for _, writer in flood:
            writer.close()


def _silent(world: World, count: int) -> list[socket.socket]:
    """Open connections that the kernel accepts while the event loop stands still."""
    place = urlsplit(world.url)
    return [socket.create_connection((place.hostname, place.port)) for _ in range(count)]


def _open(ends: list[socket.socket]) -> int:
    """Number of connections that the server still holds open."""
    return sum(_state(one) == _ESTABLISHED for one in ends)


def _state(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


_ESTABLISHED = 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel how a connection is")
async def test_no_more_connections_are_held_than_may_be_however_fast_they_come(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST", 20)
    async with gateway(tmp_path, renderer) as world:
        health = world.url.removesuffix("/v1") + "/healthz"
        assert (await world.http.get(health, headers={"connection": "close"})).status_code == 200
        flood = _silent(world, 150)
        well = await world.http.get(health)
        assert well.status_code == 200, "it came behind all of them"
        assert _open(flood) < 20
        assert _open(flood[-15:]) == 15, "those that have been silent longest go first"
        for one in flood:
            one.close()


LIMITED = """
import asyncio, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from fastapi import FastAPI
from tinker_claw.app.server import Server, listen, url_of

app = FastAPI(openapi_url=None)
app.add_api_route("/healthz", lambda: {"status": "ok"})


async def main():
    with listen("127.0.0.1", 0) as listening:
        print(url_of(listening), flush=True)
        await Server(app).serve(sockets=[listening])


asyncio.run(main())
"""


async def test_a_flood_does_not_use_up_the_descriptors() -> None:
    few, pipe = 64, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LIMITED, str(few)), stdout=pipe, stderr=pipe
    )
    try:
        assert process.stdout is not None
        place = urlsplit((await process.stdout.readline()).decode().strip())
        flood = [await asyncio.open_connection(place.hostname, place.port) for _ in range(4 * few)]
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await everything((reader, writer))).startswith(b"HTTP/1.1 200")
        for _, flooding in flood:
            flooding.close()
    finally:
        process.terminate()
        _, said = await process.communicate()
    assert b"out of system resource" not in said, said


@pytest.fixture
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel hold few unread bytes, and for a short time."""
    monkeypatch.setattr(server, "WRITE_S", 0.3)
    monkeypatch.setattr(server, "SEND_BYTES", 2048)


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


async def _given_up(deaf: socket.socket) -> None:
    async with asyncio.timeout(60):
        while _state(deaf) == _ESTABLISHED:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel how a connection is")
@pytest.mark.usefixtures("little_is_kept")
async def test_who_stops_reading_a_stream_gives_up_its_place_and_the_turn_is_cut(
    tmp_path: Path, renderer: Renderer
) -> None:
    words = "and so on " * 300
    async with gateway(tmp_path, renderer, max_concurrent=1, max_queue=0) as world:
        world.say(words)
        body = {"model": "demo", "messages": [{"role": "user", "content": "tell"}], "stream": True}
        with await _deaf(world, "/v1/chat/completions", json.dumps(body).encode()) as deaf:
            await _given_up(deaf)
        world.say("here")
        async with asyncio.timeout(60):
            while (await world.ask("is there room?")).status_code != 200:
                pass
        cut, whole = world.turns()
        assert cut.completion.stop_reason is StopReason.ABORT
        assert 0 < len(cut.completion.tokens) < len(spell(renderer, words))
        assert world.column("untrained_because") == ["the client hung up", None]
        assert world.sampler.aborted == 1
        assert whole.completion.stop_reason is StopReason.STOP


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel how a connection is")
@pytest.mark.usefixtures("little_is_kept")
async def test_who_does_not_read_a_whole_answer_is_not_kept_either(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, max_concurrent=1, max_queue=0) as world:
        world.say("and so on " * 900)
        body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "tell"}]})
        with await _deaf(world, "/v1/chat/completions", body.encode()) as deaf:
            await _given_up(deaf)
        world.say("here")
        assert (await world.ask("is there room?")).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel how a connection is")
@pytest.mark.usefixtures("little_is_kept")
async def test_who_asks_again_and_again_without_reading_is_not_kept_either(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        with await _deaf(world, "/healthz") as deaf:
            more = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(deaf, more), 60)
            await _given_up(deaf)


async def test_a_slow_reader_gets_all_of_a_long_answer(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_S", 5.0)
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
