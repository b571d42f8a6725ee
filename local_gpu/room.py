"""Priority for people who wait for a reply in this process over all other computation.

Rule: this changes when something is computed, never what. Other computation is delayed by a bounded
time, however many people come.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

LONGER: Final = 0.5
"""Share of its time by which learning may take longer, so that people wait less."""
PERSONS: Final = 2.0
"""While people wait, their passes get this many times as long as those of others."""


class Room:
    """Replies and samplers that wait for the GPU. Used from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._replies: dict[object, object] = {}
        """Replies that people wait for, each with the sampler that computes it."""
        self._silent: set[object] = set()
        """Replies without a token yet."""
        self._taken = False
        """Whether a sampler is computing a pass."""
        self._queue: list[object] = []
        """Samplers that wait to compute a pass, in order of arrival."""
        self._persons_until = 0.0

    @property
    def silent(self) -> bool:
        """Whether somebody waits for the first token of a reply."""
        return bool(self._silent)

    def enter(self, reply: object, whose: object) -> None:
        """Note that a person waits for this reply."""
        with self._changed:
            self._replies[reply] = whose
            self._silent.add(reply)
            self._changed.notify_all()

    def begin(self, reply: object) -> None:
        """Note a reply's first token. A reply that never entered is no error, here and below."""
        with self._changed:
            self._silent.discard(reply)
            self._changed.notify_all()

    def leave(self, reply: object) -> None:
        """Note that nobody waits for this reply any more."""
        with self._changed:
            self._replies.pop(reply, None)
            self._silent.discard(reply)
            self._changed.notify_all()

    def take_turn(self, whose: object) -> None:
        """Wait until no other pass is computed, and no sampler with precedence waits.

        A sampler that computes for no person also waits until people have had `PERSONS` times as
        long as the last pass for others took.
        """
        with self._changed:
            self._queue.append(whose)
            while (wait := self._wait_s(whose)) > 0:
                self._changed.wait(min(wait, threading.TIMEOUT_MAX))
            self._queue.remove(whose)
            self._taken = True

    def end_turn(self, others_s: float) -> None:
        """`others_s`: how long the pass took, if it was for no person."""
        with self._changed:
            self._taken = False
            persons_until = time.monotonic() + PERSONS * others_s
            self._persons_until = max(self._persons_until, persons_until)
            self._changed.notify_all()

    def _wait_s(self, whose: object) -> float:
        serving = self._replies.values()
        first = next((other for other in self._queue if other in serving), self._queue[0])
        if self._taken or first is not whose:
            return math.inf
        if not self._replies or whose in serving:
            return 0.0
        return self._persons_until - time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait until every reply has its first token, but at most this many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._silent, seconds)


class Breaks(TorchDispatchMode):
    """Pauses this thread between two of torch's operations while somebody waits for a first token.

    This is fine-grained enough for models of any size, and no batch is split differently: the
    numbers are the same, bit for bit.
    """

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room
        self._began = time.perf_counter()
        self._paused_s = 0.0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._room.silent:
            now = time.perf_counter()
            worked_s = now - self._began - self._paused_s
            self._room.pause(max(0.0, LONGER * worked_s - self._paused_s))
            self._paused_s += time.perf_counter() - now
        return func(*args, **(kwargs or {}))
