"""Ten thousand requests that are nearly right, over HTTP: served whole, or refused in order.

Rule: what was answered with 200 is one turn in the ledger with the tokens that were sampled; what
was refused is a 4xx that says why, and no turn. There is no third kind.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.lab.mutations import Mutants
from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import MODEL, World, gateway, read_events, spell
from tests.support.ledger import sql
from tinker_claw.formats.body import ROOM
from tinker_claw.gateway.index import STREAM_TOKENS, TURN_KEYS
from tinker_claw.render.prompt_cache import CAPACITY
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Charge, SamplingParams, TokenChunk, Tokens, uncharged

REQUESTS = 10_000
CONNECTIONS = 6
LONGEST_S = 60
INDEX = 300 * TURN_KEYS + 10 * STREAM_TOKENS
"""Bytes of the index of turns, as it says of itself."""
GROWTH_MB = (1.3 * (CAPACITY + ROOM) + INDEX) / 1e6
"""Growth in MB from the first thousand requests to the last: cached prompts and pieces of bodies,
what their objects take beside them, the index of turns, and no more."""


REPLIES = (
    "fine, it is done",
    "<think>\nwhy not?\n</think>\n\nfine",
    '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>',
    'so\n<tool_call>\n{"name": "exec", "arguments": {"comm\n</tool_call>',
    "<tool_call>\n<tool_call>\n</think>\nnaïve ☃ \U0001f47e",
    "",
)


class Recorder(FakeSampler):
    """A sampler that recites its replies in turn, and records which prompt got which."""

    def __init__(self, *replies: Tokens) -> None:
        super().__init__(*replies)
        self._replies = replies
        self.given = Counter[tuple[int, Tokens]]()

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk, None]:
        self.say(Script(self._replies[self.given.total() % len(self._replies)], chunk=7))
        given = list[int]()
        try:
            async for chunk in super().stream(prompt, params, charge):
                given += chunk.tokens
                yield chunk
        finally:
            self.prompts.clear()
            self.params.clear()
            self.given[hash(prompt), tuple(given)] += 1


@dataclass
class Found:
    """Answers that came back."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    usages: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    """Prompt and completion tokens of whole answers with one reply."""
    replies: int = 0
    """Number of replies in all answers: a request may have several."""
    objects: int = 0
    wrong: list[str] = field(default_factory=list[str])


@pytest.mark.slow
async def test_ten_thousand_bent_requests_lose_no_turn_and_break_nothing(
    tmp_path: Path, renderer: Renderer
) -> None:
    replies = [spell(renderer, text) for text in REPLIES]
    # The second half of a letter is cut off; the last one is all that was allowed.
    sampler = Recorder(*replies, replies[-2][:-2], spell(renderer, "on and on " * 8, end=""))
    mutants, found = Mutants(MODEL), Found()
    async with gateway(tmp_path, renderer, sampler, context_tokens=40_000, student_topk=2) as world:
        await _send(world, mutants, found, range(1000))
        before_mb = _memory_mb()
        await _send(world, mutants, found, range(1000, REQUESTS))
        grown_mb = _memory_mb() - before_mb
        assert found.wrong == []
        assert sum(found.statuses.values()) == REQUESTS
        assert found.objects >= REQUESTS / 2
        assert found.statuses[200] >= REQUESTS / 5, found.statuses
        assert found.statuses[400] >= REQUESTS / 5, found.statuses
        _assert_all_in_the_ledger(world, sampler, found)
        assert (await world.ask("are you well?")).status_code == 200
        assert (await world.http.get(world.url.removesuffix("/v1") + "/healthz")).is_success
    assert grown_mb < GROWTH_MB


def _assert_all_in_the_ledger(world: World, sampler: Recorder, found: Found) -> None:
    written, usages = Counter[tuple[int, Tokens]](), Counter[tuple[int, int]]()
    for row in sql(world.ledger).rows("SELECT id FROM turns ORDER BY id"):
        turn = world.ledger.turns.get(row["id"])
        assert len(turn.completion.logprobs) == len(turn.completion.tokens)
        written[hash(turn.prompt), turn.completion.tokens] += 1
        usages[len(turn.prompt), len(turn.completion.tokens)] += 1
    assert written.total() == found.replies >= found.statuses[200]
    assert written == sampler.given
    assert found.usages <= usages


async def _send(world: World, mutants: Mutants, found: Found, numbers: range) -> None:
    left = iter(numbers)
    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(_talk(world.url, mutants, found, left))


async def _talk(url: str, mutants: Mutants, found: Found, left: Iterator[int]) -> None:
    """Send requests on one connection, as long as it lasts, until none is left."""
    place = urlsplit(url)
    path = f"{place.path}/chat/completions".encode()
    ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    for number in left:
        reader, writer = ends or await asyncio.open_connection(place.hostname, place.port)
        ends = reader, writer
        mutant = mutants.make(number)
        found.objects += mutant.is_object
        head = {"host": place.netloc.encode(), "content-length": b"%d" % len(mutant.body)}
        lines = [b"%s: %s\r\n" % (n.encode(), v) for n, v in (mutant.headers | head).items()]
        writer.write(b"POST %s HTTP/1.1\r\n%s\r\n%s" % (path, b"".join(lines), mutant.body))
        try:
            async with asyncio.timeout(LONGEST_S):
                status, headers, body = await _response(reader)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            found.wrong.append(f"number {number}: no answer, {error!r}")
            writer.close()
            ends = None
        else:
            _judge(found, number, status, headers, body)
    if ends is not None:
        ends[1].close()


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    if "content-length" in headers:
        return (
            int(first.split()[1]),
            headers,
            await reader.readexactly(int(headers["content-length"])),
        )
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return int(first.split()[1]), headers, body


def _judge(found: Found, number: int, status: int, headers: dict[str, str], body: bytes) -> None:
    found.statuses[status] += 1
    try:
        if status != 200:
            error = json.loads(body)["error"]
            fine = 400 <= status < 500 and set(error) == {"message", "type", "param", "code"}
            fine = fine and bool(error["message"])
        elif headers["content-type"].startswith("text/event-stream"):
            events = read_events(body.decode())
            ends = [c["finish_reason"] for e in events for c in e.get("choices", ())]
            fine = events[-1] == {} and ends[-1] is not None
            found.replies += 1
        else:
            answer = json.loads(body)
            usage, choices = answer["usage"], len(answer["choices"])
            found.usages[usage["prompt_tokens"], usage["completion_tokens"]] += choices == 1
            found.replies += choices
            fine = True
    except (ValueError, KeyError, IndexError, TypeError, AssertionError):
        fine = False
    if not fine:
        found.wrong.append(f"number {number}: {status} {body[:300]!r}")


def _memory_mb() -> float:
    """Resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
