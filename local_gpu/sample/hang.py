"""Whether a server hangs: a GPU that does not come back, a process that stands still, a network
that swallows what is sent. Nothing breaks off then; what is asked stays unanswered.

A server that owes answers and gives none for a while is asked for one token. It hangs if nothing at
all comes for as long as the prompts may take that it is computing, and if its engine has not done
anything else either, where it tells that.

Rule: only what an engine has computed is a sign of life: its HTTP side may answer without it.
Silence is counted in looks and not by the clock, so that a time in which this process itself stood
still is one look.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from local_gpu.sample.server import Busy, InferenceServer
from tinker_claw.errors import BackendError, OutageError, RequestError
from tinker_claw.types import SamplingParams

T = TypeVar("T")

_LOOK_S: Final = 0.5
_TOKEN_S: Final = 0.001
"""Seconds per token of a prompt. For slower servers see `Pulse.returned`."""
_LONGEST_STEP: Final = 16_384
"""Most tokens that an engine computes at once: vLLM reports progress after each such step."""


class PendingCall:
    """A request to a server, from its start to the end of the answer."""

    def __init__(self, pulse: Pulse, tokens: int, takes_s: float) -> None:
        self.tokens = tokens
        """Tokens of the prompt that are left to compute; 0 once anything has come."""
        self.takes_s = takes_s
        self.scope: asyncio.Timeout | None = None
        """Timeout around a wait for the server; None: the caller does something else at the
        moment."""
        self.cut: str | None = None
        """Reason for which it was cut off, or None."""
        self._pulse = pulse

    def wait_in(self, scope: asyncio.Timeout) -> None:
        """Raises OutageError if it was cut off before."""
        if self.cut:
            raise OutageError(self.cut)
        self.scope = scope

    def hear(self) -> None:
        """Note that the engine has computed something for this call."""
        self.tokens = 0
        self._pulse.heard += 1


class Pulse:
    """Open calls to one server, and its signs of life."""

    def __init__(self) -> None:
        self.heard = 0
        """Number of signs of life."""
        self._calls: set[PendingCall] = set()
        self._token_s = _TOKEN_S
        self._computing = False
        """Whether it had prompts to compute when it was cut off."""

    @contextmanager
    def call(self, tokens: int = 0, takes_s: float = 0.0) -> Generator[PendingCall]:
        """Register a call. `takes_s`: time besides computing a prompt of `tokens` tokens."""
        call = PendingCall(self, tokens, takes_s)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)

    def patience_s(self, still_s: float, *, tells: bool) -> float:
        """Seconds that nothing may come; `tells`: other progress would be seen."""
        tokens = sum(call.tokens for call in self._calls)
        computes_s = self._token_s * (min(tokens, _LONGEST_STEP) if tells else tokens)
        return still_s + computes_s + max((call.takes_s for call in self._calls), default=0.0)

    async def silent(self, seconds: float) -> bool:
        """Whether an answer was owed and nothing came for this long; returns early if not."""
        for _ in range(max(1, math.ceil(seconds / _LOOK_S))):
            heard = self.heard
            await asyncio.sleep(_LOOK_S)
            if self.heard != heard or not self._calls:
                return False
        return True

    def cut(self, why: str) -> None:
        """End every call as an outage."""
        self._computing = any(call.tokens for call in self._calls)
        for call in self._calls:
            call.cut = why
            if call.scope is not None and not call.scope.expired():
                call.scope.reschedule(asyncio.get_running_loop().time())

    def returned(self) -> None:
        """Note that the server is well again. If it was computing prompts, it may only have been
        slow: double its time per token, so that no prompt is too long for ever."""
        if self._computing:
            self._token_s, self._computing = 2 * self._token_s, False


async def ping(server: InferenceServer) -> None:
    """Ask for one token. Raises what the server raises, but a busy one is well; a hanging one never
    answers."""
    # A prompt of one token ends vLLM's engine on CPU (0.32) where a model has linear attention.
    with suppress(Busy):
        await server.sample(None, (0, 0), SamplingParams(max_tokens=1), 1)


async def hangs(server: InferenceServer, *, quiet_s: float, still_s: float) -> bool:
    """Whether a server hangs; returns at once while all is well.

    Args:
        quiet_s: so long it may say nothing without being asked.
        still_s: so long it may take over one token, besides what it computes.
    """
    if not await server.pulse.silent(quiet_s):
        return False
    return await stands_still(server.pulse, lambda: ping(server), server.progress, still_s)


async def stands_still(
    pulse: Pulse,
    ask: Callable[[], Awaitable[object]],
    progress: Callable[[], Awaitable[str]],
    still_s: float,
) -> bool:
    """Whether one token is not answered, and the engine does nothing else.

    It does not while nobody listens: then it has ended, or is starting.

    Args:
        pulse: of the connections by which it is asked.
        ask: for one token.
        progress: what changes with each step of its engine; "" where it does not tell.
        still_s: so long it may take over one token, besides what it computes.
    """
    before = await _answered(progress)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(_answered(ask))
        silent = await pulse.silent(pulse.patience_s(still_s, tells=before != ""))
        asked.cancel()
    return silent and await _answered(progress) in (None, before)


async def _answered(ask: Callable[[], Awaitable[T]]) -> T | None:
    """Answer of a call; None: there is none, and whoever waits for the server is told, too."""
    try:
        return await ask()
    except (BackendError, RequestError):
        return None
