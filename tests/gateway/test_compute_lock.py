"""A crowd of requests does not make the gateway deaf."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fakes import FakeSampler
from tests.gateways import gateway, spell
from tinker_claw.gateway.limits import ComputeLock
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import StopReason


class Rounds:
    """Counts the rounds of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        self.now += 1
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


async def test_no_two_requests_compute_in_one_round_of_the_event_loop() -> None:
    compute, rounds, seen = ComputeLock(), Rounds(), list[int]()

    async def request() -> None:
        for _ in range(3):
            async with compute:
                seen.append(rounds.now)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(request())
    rounds.stop()
    by_round = {now: seen.count(now) for now in seen}
    assert len(seen) == 60
    assert max(by_round.values()) <= 3, "what one request does, never what two do"
    assert sum(count > 1 for count in by_round.values()) <= 1, "only who finds nobody goes on"


async def test_a_request_that_is_alone_does_not_wait() -> None:
    compute, rounds = ComputeLock(), Rounds()
    before = rounds.now
    for _ in range(3):
        async with compute:
            pass
    assert rounds.now == before
    rounds.stop()


async def test_a_request_that_gives_up_lets_the_others_through() -> None:
    compute = ComputeLock()
    passed: list[int] = []

    async def request(number: int) -> None:
        async with compute:
            passed.append(number)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(request(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[3].cancel()
    assert passed == [0, 2, 4, 5]


async def test_a_reply_that_is_complete_when_its_client_hangs_up_is_kept(
    tmp_path: Path, renderer: Renderer
) -> None:
    sampler = FakeSampler(spell(renderer, "all of it"))
    reached = asyncio.Event()

    class Stuck(ComputeLock):
        """Nobody gets through once there is a reply."""

        async def __aenter__(self) -> None:
            if sampler.prompts:
                reached.set()
                await asyncio.Event().wait()
            await super().__aenter__()

    async with gateway(tmp_path, renderer, sampler, compute=Stuck()) as world:
        asking = asyncio.create_task(world.ask("hello", stream=True))
        await reached.wait()
        asking.cancel()
        for _ in range(500):
            if world.turns():
                break
            await asyncio.sleep(0.01)
        (turn,) = world.turns()
        assert turn.completion.tokens == spell(renderer, "all of it")
        assert turn.completion.stop_reason is StopReason.STOP
