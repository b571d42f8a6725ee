"""Limits on intake: slots, queues, places, and bodies that do not come."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.test_auth import ANNA, BEN, USERS, bearer
from tests.gateway.test_gateway_refusals import assert_error
from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import World, gateway, served, spell
from tests.support.openclaw import assistant, openclaw, user
from tinker_claw.gateway.limits import COME_BACK_S, Limits
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import SECRETS
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Charge, NextState, SamplingParams, Tokens, uncharged


class Gate(FakeSampler):
    """A sampler that answers when told to."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Script(tokens, chunk=len(tokens)))
        self.opened = asyncio.Event()
        self.inside = 0
        self.most = 0
        self.entered = asyncio.Condition()

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        async with self.entered:
            self.entered.notify_all()
        try:
            await self.opened.wait()
            async for chunk in super().stream(prompt, params, charge):
                yield chunk
        finally:
            self.inside -= 1

    async def filled(self, number: int) -> None:
        async with asyncio.timeout(60), self.entered:
            await self.entered.wait_for(lambda: self.inside >= number)


class Turnstile(Gate):
    """A sampler that answers one request at a time, and records the order."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(spell(renderer, "fine"))
        self.opened.set()
        self.out = asyncio.Semaphore(0)
        self.order: list[str] = []
        self._renderer = renderer

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> Any:
        text = self._renderer.decode(prompt)
        self.order.append("person" if "person" in text else "episode")
        async for chunk in super().stream(prompt, params, charge):
            await self.out.acquire()
            yield chunk


class Queue:
    """A view of the requests that wait for a slot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0
        self._grown = asyncio.Condition()
        slot = Limits.slot

        @asynccontextmanager
        async def seen(limits: Limits, user: str, *, episode: bool = False) -> AsyncGenerator[None]:
            self._now += 1
            waiting, waits = asyncio.create_task(self._tell()), True
            try:
                async with slot(limits, user, episode=episode):
                    self._now, waits = self._now - 1, False
                    yield
            finally:
                self._now -= waits
                await waiting

        monkeypatch.setattr(Limits, "slot", seen)

    async def _tell(self) -> None:
        async with self._grown:
            self._grown.notify_all()

    async def holds(self, number: int) -> None:
        """Wait until this many requests wait."""
        async with asyncio.timeout(60), self._grown:
            await self._grown.wait_for(lambda: self._now >= number)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


def episode(name: object, **more: str) -> dict[str, str]:
    return {"X-Turn-Type": "episode", "X-Session-Id": f"try-{name}"} | more


@pytest.fixture
def gate(renderer: Renderer) -> Gate:
    return Gate(spell(renderer, "fine"))


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    tmp_path: Path, renderer: Renderer, gate: Gate
) -> None:
    async with (
        gateway(tmp_path, renderer, gate, max_concurrent=1, max_queue=1) as world,
        asyncio.TaskGroup() as group,
    ):
        taken = [group.create_task(world.ask("a", stream=True)) for _ in range(2)]
        await gate.filled(1)
        await _until(world, 429)
        for stream in (False, True):
            refused = await world.ask("one too many", stream=stream)
            assert_error(refused, 429, code="rate_limit_exceeded", type="rate_limit_error")
            assert refused.headers["retry-after"] == str(COME_BACK_S)
        healthy = await world.http.get("/../healthz")
        assert healthy.json()["status"] == "ok"
        gate.opened.set()
        assert [(await task).status_code for task in taken] == [200, 200]
        assert (await world.ask("now there is room")).status_code == 200
        assert len(world.turns()) == 3


async def test_one_users_flood_does_not_keep_another_waiting(
    tmp_path: Path, renderer: Renderer, gate: Gate
) -> None:
    async with (
        gateway(tmp_path, renderer, gate, users=USERS, max_concurrent=4, max_queue=6) as world,
        asyncio.TaskGroup() as group,
    ):
        flood = [group.create_task(world.ask("x", headers=bearer(ANNA))) for _ in range(30)]
        await gate.filled(3)
        refused = [task.result() for task in await _first(flood, 20)]
        assert {answer.status_code for answer in refused} == {429}
        assert gate.inside == 3, "one slot is kept for whoever has none"
        ben = group.create_task(world.ask("me, too", headers=bearer(BEN)))
        await gate.filled(4)
        gate.opened.set()
        assert (await ben).status_code == 200
        answers = await asyncio.gather(*flood)
        assert sorted(a.status_code for a in answers) == [200] * 10 + [429] * 20


async def test_a_person_does_not_wait_behind_128_episodes_and_none_of_them_fails(
    tmp_path: Path, renderer: Renderer, gate: Gate, queue: Queue
) -> None:
    async with (
        gateway(tmp_path, renderer, gate, max_concurrent=8) as world,
        asyncio.TaskGroup() as group,
    ):
        tries = [
            group.create_task(world.ask("go", headers=episode(n), stream=n % 2 == 0))
            for n in range(128)
        ]
        await gate.filled(6)
        await queue.holds(122)
        healthy = await world.http.get("/../healthz")
        assert healthy.status_code == 200
        assert gate.inside == 6, "two slots are left for persons"
        person = [group.create_task(world.ask("me", stream=True)) for _ in range(2)]
        await gate.filled(8)
        gate.opened.set()
        answers = await asyncio.gather(*tries, *person)
        assert {answer.status_code for answer in answers} == {200}
        assert len(world.turns()) == 130
        assert gate.most == 8
        waits = [(seen["episode"], seen["waited_s"]) for seen in world.observer.seen]
        assert len([1 for of_episode, _ in waits if of_episode]) == 128


async def test_a_freed_slot_is_a_persons_first(
    tmp_path: Path, renderer: Renderer, queue: Queue
) -> None:
    """Also before an exam, which asks for a version by name and is no main turn."""
    gate = Turnstile(renderer)
    async with (
        gateway(tmp_path, renderer, gate, max_concurrent=1) as world,
        asyncio.TaskGroup() as group,
    ):
        for number in range(4):
            by_group = {"X-Group-Id": "four", "X-Group-Size": "4", "X-Session-Id": f"try-{number}"}
            group.create_task(world.ask("go", headers=by_group if number else episode(number)))
        await gate.filled(1)
        exam = episode("exam", **{"X-Turn-Type": "Episode"})
        group.create_task(world.ask("go", headers=exam, model="demo@v0"))
        await queue.holds(4)
        for kind in ("main", "side", ""):
            headers = {"X-Turn-Type": kind} if kind else {}
            group.create_task(world.ask("person", headers=headers))
        await queue.holds(7)
        for _ in range(8):
            gate.out.release()
    assert gate.order == ["episode"] + 3 * ["person"] + 4 * ["episode"]
    persons = [params.person for params in gate.params]
    assert persons == [who == "person" for who in gate.order], "so that samplers know as well"
    assert world.observer.seen[-1]["kind"] == "side", "the exam came last"


async def test_a_flood_of_episodes_leaves_their_user_places_of_their_own(
    tmp_path: Path, renderer: Renderer, gate: Gate, queue: Queue
) -> None:
    async with (
        gateway(tmp_path, renderer, gate, max_concurrent=1, max_queue=1) as world,
        asyncio.TaskGroup() as group,
    ):
        tries = [group.create_task(world.ask("go", headers=episode(n))) for n in range(4)]
        refused = [task.result() for task in await _first(tries, 2)]
        assert [answer.status_code for answer in refused] == [429, 429]
        me = group.create_task(world.ask("me, too"))
        await queue.holds(2)
        gate.opened.set()
        assert (await me).status_code == 200


async def test_a_users_requests_hold_so_many_bytes_and_no_more(
    tmp_path: Path, renderer: Renderer, gate: Gate, queue: Queue
) -> None:
    long = "and so on " * 900
    async with (
        gateway(
            tmp_path, renderer, gate, users=USERS, max_concurrent=2, max_held_bytes=15_000
        ) as world,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(world.ask(long, headers=bearer(ANNA)))
        await gate.filled(1)
        for stream in (False, True):
            refused = await world.ask(long, headers=bearer(ANNA), stream=stream)
            assert_error(refused, 429, code="rate_limit_exceeded", type="rate_limit_error")
            assert refused.headers["retry-after"] == str(COME_BACK_S)
        for headers in (bearer(BEN), bearer(ANNA) | episode(1)):
            group.create_task(world.ask(long, headers=headers))
        await queue.holds(1)
        await gate.filled(2)
        gate.opened.set()
        assert (await first).status_code == 200
        assert (await world.ask(long, headers=bearer(ANNA))).status_code == 200


async def test_who_hangs_up_while_waiting_gives_up_place_and_turn(
    tmp_path: Path, renderer: Renderer, gate: Gate
) -> None:
    async with (
        gateway(tmp_path, renderer, gate, max_concurrent=1, max_queue=1) as world,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(world.ask("first"))
        await gate.filled(1)
        for stream in (True, False):
            gone = asyncio.create_task(world.ask("gone", stream=stream))
            await _until(world, 429)
            gone.cancel()
            await asyncio.wait([gone])
            await _until(world, 400)
        gate.opened.set()
        assert (await first).status_code == 200
        assert (await world.ask("next")).status_code == 200
        assert gate.most == 1


async def test_every_slot_comes_back_however_a_request_ends(
    tmp_path: Path, renderer: Renderer
) -> None:
    bad = {"temperature": "hot"}
    tokens = spell(renderer, "fine")
    sampler = FakeSampler(Script(tokens, fail_after=0))
    async with gateway(tmp_path, renderer, sampler, max_concurrent=1, max_queue=0) as world:
        for stream in (False, True):
            assert (await world.ask("x", stream=stream, **bad)).status_code == 400
            assert (await world.ask("x", stream=stream)).status_code == (200 if stream else 503)
        world.say("fine")
        assert (await world.ask("x")).status_code == 200


@pytest.mark.parametrize("of_episode", [False, True])
async def test_among_many_users_one_may_have_several_slots(of_episode: bool) -> None:
    users = [f"user {n}" for n in range(1000)]
    limits, done, inside = Limits(users, 64, 256), asyncio.Event(), Counter[str]()

    async def use(user: str, episode: bool) -> None:
        async with limits.slot(user, episode=episode):
            inside[user] += 1
            await done.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(64):
            group.create_task(use("user 0", of_episode))
        await asyncio.sleep(0)
        assert inside == {"user 0": 48}, "a quarter is kept for those who have none"
        for user in users[1:9]:
            group.create_task(use(user, False))
        await asyncio.sleep(0)
        assert len(inside) == 9
        done.set()


async def test_a_waiter_who_is_cancelled_as_he_is_called_passes_his_slot_on() -> None:
    limits, done = Limits(["a"], 1, 9), list[str]()

    async def use(name: str) -> None:
        async with limits.slot("a"):
            done.append(name)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        async with limits.slot("a"):
            called, before = group.create_task(use("called")), group.create_task(use("before"))
            group.create_task(use("last"))
            await asyncio.sleep(0)
            before.cancel()
        called.cancel()  # it has the slot, and has not run since
    assert done == ["last"]
    async with asyncio.timeout(60), limits.slot("a"):
        pass


@served(body_s=0.5, max_concurrent=1, max_queue=0)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_does_not_come_is_a_408(chunked: bool, world: World) -> None:
    length = "transfer-encoding: chunked" if chunked else "content-length: 500"
    piece = b"1\r\n{\r\n" if chunked else b"{"
    reader, writer = await _connect(world)
    writer.write(f"{_line('POST')}{length}\r\n\r\n".encode() + piece)
    head, body = (await reader.read()).split(b"\r\n\r\n", 1)
    writer.close()
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert (await world.ask("there is room again")).status_code == 200


@served(users=USERS)
async def test_who_has_no_key_is_refused_before_the_body_is_read(world: World) -> None:
    reader, writer = await _connect(world)
    writer.write(f"{_line('POST')}content-length: 5000000\r\n\r\n".encode())
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_what_is_many_times_the_context_is_refused_before_it_is_rendered(
    world: World,
) -> None:
    for messages in ([user("x" * 140_000)], [user("x")] * 5000):
        refused = await world.ask(*messages)
        assert_error(refused, 400, code="context_length_exceeded", param="messages")
        assert "so long" in refused.text
    assert (await world.ask("hi")).status_code == 200


async def test_what_cannot_fit_is_refused_and_what_was_said_counts(world: World) -> None:
    world.say("hello")
    session = {"X-Session-Id": "s"}
    await world.reply(openclaw("good morning"), **session)
    words = "this is far too much " * 2400
    later = openclaw("good morning", assistant("hello"), user(words))
    refused = await world.http.post(
        "/chat/completions", json={"model": "demo"} | later, headers=session
    )
    assert_error(refused, 400, code="context_length_exceeded", param="messages")
    assert world.next_states()[1] == NextState("user", words.strip())


class Slow(Redactor):
    """A redactor that searches for as long as it is told to."""

    def __init__(self) -> None:
        super().__init__([SECRETS])
        self.begun, self.may_end = threading.Event(), threading.Event()

    def holds(self, text: str) -> str | None:
        if len(text) > 100_000:
            self.begun.set()
            assert self.may_end.wait(60), "nobody else was served meanwhile"
        return super().holds(text)


@pytest.mark.parametrize("stream", [False, True])
async def test_others_are_served_while_a_large_body_is_searched(
    stream: bool, tmp_path: Path, renderer: Renderer
) -> None:
    redactor = Slow()
    async with (
        gateway(tmp_path, renderer, context_tokens=100_000, redactor=redactor) as world,
        asyncio.TaskGroup() as group,
    ):
        large = group.create_task(world.ask("no blanks, " * 30_000, stream=stream))
        assert await asyncio.to_thread(redactor.begun.wait, 60)
        healthy = await world.http.get("/../healthz")
        assert healthy.status_code == 200
        assert (await world.ask("me, too")).status_code == 200
        assert not large.done()
        redactor.may_end.set()
        assert_error(await large, 400, code="context_length_exceeded", param="messages")


@served(context_tokens=100000)
@pytest.mark.parametrize("secret", [False, True])
async def test_a_long_text_is_kept_as_a_short_one_would_be(secret: bool, world: World) -> None:
    key = "sk-proj-4f9aK2mZq8LwX7vTbN3cR5yH" if secret else "no key"
    text = "and so on " * 5_000 + key
    for _ in range(2):
        assert (await world.ask(text)).status_code == 200
    for kept in world.column("request_text"):
        assert ("[redacted" in kept) is secret
        assert kept.startswith("and so on")
        assert (key in kept) is not secret


def _line(method: str) -> str:
    return (
        f"{method} /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        "content-type: application/json\r\n"
    )


async def _connect(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(world.url)
    return await asyncio.open_connection(place.hostname, place.port)


async def _first(tasks: list[asyncio.Task[Any]], number: int) -> list[asyncio.Task[Any]]:
    """Return the tasks that are done, as soon as there are this many."""
    async with asyncio.timeout(60):
        while len(done := [task for task in tasks if task.done()]) < number:
            await asyncio.wait(
                [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
    return done


async def _until(world: World, status: int) -> None:
    """Wait until one more request is a 429, too many, or a 400 again. It is tried with an empty
    body, which takes a place for no time."""
    async with asyncio.timeout(60):
        while (await world.http.post("/chat/completions", content=b"")).status_code != status:
            pass
