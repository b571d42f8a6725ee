"""`python -m benchmarks.gateway_floods`: what one odd body does to everybody else, and what a long
history costs, on each of the three wires.

Floods: a body of very many small things, or of one huge thing, is sent while /healthz is asked
every 20 ms. Histories: further turns behind 10, 100 and 300 messages, in turn with the bare route
that only reads the JSON.

Rule: servers, client and cores are those of `benchmarks.gateway`; the longest wait of /healthz
counts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
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
from benchmarks.agent_requests import MIX
from benchmarks.gateway_client import Answer, Connection, Cores, Measured, pulse, server
from benchmarks.gateway_server import CALL
from benchmarks.gateway_wires import WIRES, Json, Spoken

CONTEXT_TOKENS = 524_288
"""So large that bodies of any length that is served at all are read."""
SILENCE_S = 0.5
"""Longest silence that one body may cause."""
LENGTHS = (10, 100, 300)
"""Messages before the further turns."""
TURNS = 16
"""Further turns of one session."""
_REST_S = 0.01
_SETTLE_S = 0.3
"""Seconds before and after a flood in which /healthz is asked, too."""
Body = Callable[[Spoken], bytes]


def _user(text: str | list[Json]) -> Json:
    return {"role": "user", "content": text}


def _said(count: int) -> Body:
    said = [_user(f"{n} is a number") for n in range(count)]
    return lambda wire: wire.body([_user("go"), *said, _user("go on")])


def _calls(count: int) -> Body:
    """Calls of one message of the assistant."""
    function = {"name": "tool_1", "arguments": '{"a":1}'}
    calls = [{"id": f"call{n}", "type": "function", "function": function} for n in range(count)]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return lambda wire: wire.body([_user("go"), said, _user("go on")])


def _text(text: str) -> Body:
    return lambda wire: wire.body([_user(text)])


def _prose(length: int) -> str:
    random = Random(1)
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(5_000)]
    return " ".join(random.choices(words, k=length // 6))[:length]


def _nested(depth: int) -> Body:
    def body(wire: Spoken) -> bytes:
        tool = {"name": "deep", "description": "It digs.", "parameters": "HERE"}
        made = wire.body([_user("go")], [tool])
        return made.replace(b'"HERE"', b'{"a":' * depth + b"1" + b"}" * depth)

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
    """What one body did."""

    wire: str
    what: str
    megabytes: float
    status: int
    seconds: float
    cpu_s: float
    silence_s: float
    """Longest wait of /healthz meanwhile."""


@dataclass(frozen=True)
class Further:
    """Further turns behind a history."""

    wire: str
    messages: int
    ms: float
    """Median, as the client sees it."""
    cpu_ms: float
    bare_ms: float
    bare_cpu_ms: float

    @property
    def multiple(self) -> float:
        return self.ms / self.bare_ms

    @property
    def cpu_multiple(self) -> float:
        return self.cpu_ms / self.bare_cpu_ms


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


async def further(at: Measured, bare: Measured, wire: Spoken, messages: int, key: str) -> Further:
    """Time further turns behind a history, the bare route's in turn with ours."""
    system, tools = _head()
    said = [{"role": "system", "content": system}, *_history(key, messages)]
    ours, plain = [await Connection.open(one.url, wire.path) for one in (at, bare)]
    times = {ours: list[float](), plain: list[float]()}
    cpus = {ours: 0.0, plain: 0.0}
    for turn in range(TURNS + 1):
        body = wire.body(said, tools)
        for connection, process in ((plain, bare), (ours, at)):
            cpu = process.cpu_s()
            answer = await connection.ask(body)
            if answer.status != 200:
                raise RuntimeError(f"{wire.name}: HTTP {answer.status}: {answer.events[:300]!r}")
            if turn:  # the first one is new as a whole
                times[connection].append(answer.seconds)
                await asyncio.sleep(_REST_S)  # until the process waits, its time is not counted
                cpus[connection] += process.cpu_s() - cpu
            if connection is ours:
                said = [*said, *_went_on(wire.reply(answer.events), key, turn)]
    for connection in (ours, plain):
        connection.close()
    return Further(
        wire.name,
        messages,
        ms=1e3 * statistics.median(times[ours]),
        cpu_ms=1e3 * cpus[ours] / TURNS,
        bare_ms=1e3 * statistics.median(times[plain]),
        bare_cpu_ms=1e3 * cpus[plain] / TURNS,
    )


def _head() -> tuple[str, list[Json]]:
    """System prompt and tools of OpenClaw's size."""
    sent = json.loads(MIX[0].head + MIX[0].tail)
    return sent["messages"][0]["content"], [tool["function"] for tool in sent["tools"]]


def _history(key: str, messages: int) -> list[Json]:
    """Rounds of a question, a call, its result and an answer, and then a question."""
    said, random = list[Json](), Random(key)
    words = _prose(60_000).split()
    called = json.loads(CALL.split("\n")[1])
    while len(said) < messages:
        n, text = len(said), " ".join(random.choices(words, k=60))
        function = {
            "name": called["name"],
            "arguments": json.dumps(called["arguments"], separators=(",", ":")),
        }
        call = {"id": f"call{n}", "type": "function", "function": function}
        said += [
            _user(f"{key} {text}"),
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"{text} {text}"},
            {"role": "assistant", "content": text},
        ]
    return [*said[: messages - messages % 4], _user(f"{key} go on")]


def _went_on(reply: Json, key: str, turn: int) -> list[Json]:
    """The reply, and what is said after it."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{key} found {turn}"}
        for call in reply.get("tool_calls", ())
    ]
    return [reply, *(results or [_user(f"{key} go on, {turn}")])]


async def measure(
    folder: Path,
    say: Callable[[str], None],
    *,
    ids: int = vocabulary.FULL,
    floods: Sequence[str] = (),
    wires: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 3,
    at_once: int = 300,
) -> tuple[list[Silence], list[Further]]:
    """Run the benchmark once. `floods`, `wires`: names; () is all."""
    cores, everywhere = Cores.take(), os.sched_getaffinity(0)
    tokenizer = vocabulary.load(ids, say)
    spoken = [wire for wire in WIRES if not wires or wire.name in wires]
    silences, turns = list[Silence](), list[Further]()
    os.sched_setaffinity(0, {cores.client})
    context = str(CONTEXT_TOKENS)
    try:
        with server("bare_server", cores.server) as bare:
            for wire in spoken:
                directory = str(folder / wire.name)
                with server(
                    "gateway_server", cores.server, directory, str(tokenizer), context
                ) as at:
                    for messages in lengths:
                        say(f"{wire.name}: further turns behind {messages} messages")
                        some = [
                            await further(at, bare, wire, messages, f"{wire.name}{messages}-{n}")
                            for n in range(rounds)
                        ]
                        turns.append(sorted(some, key=lambda one: one.cpu_multiple)[rounds // 2])
                    for what, body in FLOODS.items():
                        if not floods or what in floods:
                            say(f"{wire.name}: {what}")
                            found = await flood(at, cores.client, wire, what, body(wire))
                            say(f"  {found.status}, silence {found.silence_s:.2f} s")
                            silences.append(found)
                    say(f"{wire.name}: {at_once} at once")
                    silences.append(await crowd(at, cores.client, wire, at_once))
    finally:
        os.sched_setaffinity(0, everywhere)
    return silences, turns


def show(console: Console, silences: Sequence[Silence], turns: Sequence[Further]) -> None:
    """Print the tables."""
    table = Table("body", "wire", "MB", "HTTP", "time", "CPU", "silence", "goal")
    for one in silences:
        table.add_row(
            one.what,
            one.wire,
            f"{one.megabytes:.1f}",
            str(one.status),
            f"{one.seconds:.2f} s",
            f"{one.cpu_s:.2f} s",
            f"{one.silence_s:.2f} s",
            "met" if one.silence_s <= SILENCE_S else "not met",
        )
    console.print(table)
    table = Table("further turns", "wire", "median", "CPU", "bare CPU", "x bare", "x bare, CPU")
    for one in turns:
        table.add_row(
            f"behind {one.messages} messages",
            one.wire,
            f"{one.ms:.1f} ms",
            f"{one.cpu_ms:.1f} ms",
            f"{one.bare_cpu_ms:.2f} ms",
            f"{one.multiple:.1f}",
            f"{one.cpu_multiple:.1f}",
        )
    console.print(table)


def main() -> None:
    """Read flags, measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_floods")
    parser.add_argument("--wire", action="append", choices=[wire.name for wire in WIRES])
    parser.add_argument("--only", action="append", choices=[*FLOODS], help="these bodies only")
    arguments = parser.parse_args()
    console, started = Console(width=140), time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - started:4.0f} s  {line}", style="dim")

    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(
            measure(Path(name), say, floods=arguments.only or (), wires=arguments.wire or ())
        )
    show(console, *figures)


if __name__ == "__main__":
    sys.exit(main())
