"""`python -m benchmarks.gateway_floods`: what one odd body does to everybody else, on each of the
three wires.

A body of very many small things, or of one huge thing, is sent while /healthz is asked every 20 ms.

Rule: servers, client and cores are those of `benchmarks.gateway`; the longest wait of /healthz
counts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks import vocabulary
from benchmarks.gateway_client import Answer, Connection, Cores, Measured, pulse, server
from benchmarks.gateway_wires import WIRES, Json, Spoken

CONTEXT_TOKENS = 524_288
"""So large that bodies of any length that is served at all are read."""
SILENCE_S = 0.5
"""Longest silence that one body may cause."""
_SETTLE_S = 0.3
"""Seconds before and after a flood in which /healthz is asked, too."""
Body = Callable[[Spoken], bytes]


def _user(text: str | list[Json]) -> Json:
    return {"role": "user", "content": text}


def _said(count: int) -> Body:
    messages = [_user(f"{n} is a number") for n in range(count)]
    return lambda wire: wire.body([_user("go"), *messages, _user("go on")])


def _calls(count: int) -> Body:
    """Calls of one message of the assistant."""
    function = {"name": "tool_1", "arguments": '{"a":1}'}
    calls = [{"id": f"call{n}", "type": "function", "function": function} for n in range(count)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return lambda wire: wire.body([_user("go"), message, _user("go on")])


def _text(text: str) -> Body:
    return lambda wire: wire.body([_user(text)])


def _prose(length: int) -> str:
    random = Random(1)
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(5_000)]
    return " ".join(random.choices(words, k=length // 6))[:length]


def _nested(depth: int) -> Body:
    def body(wire: Spoken) -> bytes:
        tool = {"name": "deep", "description": "It digs.", "parameters": "HERE"}
        request = wire.body([_user("go")], [tool])
        return request.replace(b'"HERE"', b'{"a":' * depth + b"1" + b"}" * depth)

    return body


def _images(count: int) -> Body:
    data = base64.b64encode(_png()).decode()
    url = f"data:image/png;base64,{data}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    part = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url},
        "messages": {"type": "image", "source": source},
    }
    field = {"chat": "messages", "responses": "input", "messages": "messages"}

    def body(wire: Spoken) -> bytes:
        images = [part[wire.name]] * count
        return wire.body([_user("go")], **{field[wire.name]: [_user(images)]})

    return body


def _png() -> bytes:
    """A black image of 32 x 32 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">2I5B", 32, 32, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes(3 * 32)) * 32)
    parts = ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


FLOODS: dict[str, Body] = {
    "20,000 messages of the user": _said(20_000),
    "100,000 calls in one message": _calls(100_000),
    "10 MB of prose in one message": _text(_prose(10_000_000)),
    "10 MB of control tokens": _text("<|im_end|>" * 1_000_000),
    "10 MB of lines that name /private": _text("/private?\n" * 1_000_000),
    "10 MB of what looks like secrets": _text("password = sk-abcdefgh\n" * 430_000),
    "JSON nested 100,000 deep": _nested(100_000),
    "20,000 images": _images(20_000),
}


@dataclass(frozen=True)
class Silence:
    """Effects of one body."""

    wire: str
    what: str
    megabytes: float
    status: int
    seconds: float
    cpu_s: float
    silence_s: float
    """Longest wait of /healthz meanwhile."""


async def flood(at: Measured, core: int, wire: Spoken, what: str, body: bytes) -> Silence:
    """Send one body, and ask /healthz meanwhile."""
    with pulse(at.url, core) as waits:
        await asyncio.sleep(_SETTLE_S)
        connection, cpu = await Connection.open(at.url, wire.path), at.cpu_s()
        answer = await _asked(connection, body)
        cpu = at.cpu_s() - cpu
        connection.close()
        await asyncio.sleep(_SETTLE_S)
    return Silence(
        wire=wire.name,
        what=what,
        megabytes=len(body) / 1e6,
        status=answer.status,
        seconds=answer.seconds,
        cpu_s=cpu,
        silence_s=max(waits),
    )


async def _asked(connection: Connection, body: bytes) -> Answer:
    """The answer; status 0 stands for none."""
    started = time.perf_counter()
    try:
        return await connection.ask(body)
    except (OSError, EOFError):  # a timeout, or the server has hung up
        return Answer(0, b"", time.perf_counter() - started)


async def crowd(at: Measured, core: int, wire: Spoken, count: int) -> Silence:
    """Send many small requests of one client at once."""
    bodies = [wire.body([_user(f"{n} is a number")]) for n in range(count)]
    with pulse(at.url, core) as waits:
        await asyncio.sleep(_SETTLE_S)
        cpu, started = at.cpu_s(), time.perf_counter()

        async def one(body: bytes) -> Answer:
            connection = await Connection.open(at.url, wire.path)
            answer = await connection.ask(body)
            connection.close()
            return answer

        answers = await asyncio.gather(*map(one, bodies))
        seconds = time.perf_counter() - started
        await asyncio.sleep(_SETTLE_S)
    worst = max(answer.status for answer in answers)
    size, cpu = sum(map(len, bodies)) / 1e6, at.cpu_s() - cpu
    what = f"{count} small requests at once"
    return Silence(wire.name, what, size, worst, seconds, cpu, max(waits))


async def measure(
    folder: Path,
    say: Callable[[str], None],
    *,
    ids: int = vocabulary.FULL,
    floods: Sequence[str] = (),
    wires: Sequence[str] = (),
    at_once: int = 300,
) -> list[Silence]:
    """Run the benchmark once. `floods`, `wires`: names; () is all."""
    cores, everywhere = Cores.take(), os.sched_getaffinity(0)
    tokenizer = vocabulary.load(ids, say)
    spoken = [wire for wire in WIRES if not wires or wire.name in wires]
    silences = list[Silence]()
    os.sched_setaffinity(0, {cores.client})
    context = str(CONTEXT_TOKENS)
    try:
        for wire in spoken:
            directory = str(folder / wire.name)
            with server("gateway_server", cores.server, directory, str(tokenizer), context) as at:
                for what, body in FLOODS.items():
                    if not floods or what in floods:
                        say(f"{wire.name}: {what}")
                        silence = await flood(at, cores.client, wire, what, body(wire))
                        say(f"  {silence.status}, silence {silence.silence_s:.2f} s")
                        silences.append(silence)
                say(f"{wire.name}: {at_once} at once")
                silences.append(await crowd(at, cores.client, wire, at_once))
    finally:
        os.sched_setaffinity(0, everywhere)
    return silences


def show(console: Console, silences: Sequence[Silence]) -> None:
    """Print the table."""
    table = Table("body", "wire", "MB", "HTTP", "time", "CPU", "silence", "goal")
    for silence in silences:
        table.add_row(
            silence.what,
            silence.wire,
            f"{silence.megabytes:.1f}",
            str(silence.status),
            f"{silence.seconds:.2f} s",
            f"{silence.cpu_s:.2f} s",
            f"{silence.silence_s:.2f} s",
            "met" if silence.silence_s <= SILENCE_S else "not met",
        )
    console.print(table)


def main() -> None:
    """Read flags, measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_floods")
    parser.add_argument("--wire", action="append", choices=[wire.name for wire in WIRES])
    parser.add_argument("--only", action="append", choices=[*FLOODS], help="these bodies only")
    arguments = parser.parse_args()
    console, started = Console(width=140), time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - started:4.0f} s  {line}", style="dim")

    with tempfile.TemporaryDirectory() as name:
        silences = asyncio.run(
            measure(Path(name), say, floods=arguments.only or (), wires=arguments.wire or ())
        )
    show(console, silences)


if __name__ == "__main__":
    sys.exit(main())
