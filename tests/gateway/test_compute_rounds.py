"""A crowd of requests does not make the gateway deaf."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.fakes import FakeSampler
from tests.support.gateways import gateway, spell
from tinker_claw.gateway.rounds import ComputeRounds
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
    compute, rounds, seen = ComputeRounds(), Rounds(), list[int]()

    async def request() -> None:
        for wait in (False, False, True, False, False, True):
            await compute.own_round()
            seen.append(rounds.now)
            if wait:
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(request())
    rounds.stop()
    assert len(seen) == 120
    assert {seen.count(now) for now in seen} == {3}, "what one request does, never what two do"


async def test_a_request_that_gives_up_lets_the_others_through() -> None:
    compute = ComputeRounds()
    passed: list[int] = []

    async def request(number: int) -> None:
        await compute.own_round()
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

    class Stuck(ComputeRounds):
        """A sampler that blocks everybody once there is a reply."""

        async def own_round(self) -> None:
            if sampler.prompts:
                reached.set()
                await asyncio.Event().wait()
            await super().own_round()

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
