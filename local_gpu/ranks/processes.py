"""The processes of the ranks, and one conversation with all of them.

Rule: they live no longer than this object, nor than this process.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Collection
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from local_gpu.config import LocalConfig
from local_gpu.ranks.messages import (
    Failure,
    RankAnswer,
    RankCommand,
    RankLost,
    RankPart,
    receive,
    send,
)
from local_gpu.ranks.rank import Build, RankPlace, live

_CAUSE_S = 5.0
"""Seconds in which a rank that is the cause of another's end must say so, or be seen to have
died."""
_TAIL_BYTES = 3000


class RanksLostError(Exception):
    """The ranks cannot go on."""

    def __init__(self, why: RankLost) -> None:
        super().__init__(why.sentence)
        self.why = why


class Processes:
    """All ranks, each a child of this process with a pipe of its own."""

    def __init__(self, build: Build, config: LocalConfig, log: Path) -> None:
        """Start them.

        Args:
            build: a function of a module, which children import.
            log: file that all of them append to.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._from = log.stat().st_size if log.exists() else 0
        self._folder = tempfile.TemporaryDirectory(prefix="tinker-claw-ranks-")
        meeting = Path(self._folder.name) / "meeting"
        self._links: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        context = get_context("spawn")  # a fork would copy locks of threads, and CUDA's state
        for rank in range(config.ranks):
            ours, theirs = context.Pipe()
            place = RankPlace(rank, config.ranks, meeting, log)
            process = context.Process(target=live, args=(build, config, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def ask(self, command: RankCommand, seconds: float) -> list[RankAnswer | Failure]:
        """Have every rank carry out a command; return their answers, in rank order.

        Raises:
            RanksLostError: one died, failed, or took longer than this.
        """
        count, until = len(self._links), time.monotonic() + seconds
        answers: dict[int, RankAnswer | Failure] = {}
        parts: dict[int, Any] = {}
        followers: dict[int, RankLost] = {}
        self._send_all(command)
        while len(answers) < count:
            received = self._receive({*answers, *parts, *followers}, until)
            if not received:
                late = RankLost(f"They were silent for {seconds:.0f} s ({command.name})")
                raise RanksLostError(next(iter(followers.values()), late))
            for rank, message in received.items():
                match message:
                    case RankPart(value):
                        parts[rank] = value
                    case RankLost(follows=True):
                        followers[rank] = message
                        until = min(until, time.monotonic() + _CAUSE_S)
                    case RankLost():
                        raise RanksLostError(message)
                    case _:
                        answers[rank] = message
            if len(parts) == count:
                self._send_all([parts[rank] for rank in range(count)])
                parts.clear()
            elif parts and len(parts) + len(answers) == count:
                raise RanksLostError(RankLost(f"They are out of step ({command.name})"))
        return [answers[rank] for rank in range(count)]

    def ended(self) -> RankLost | None:
        """Return why they cannot go on, if one of them died while it had nothing to do."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                return self._died(rank)
        return None

    def stop(self) -> None:
        """End them at once, from any thread."""
        for process in self._processes:
            process.kill()
        for process in self._processes:  # until then it has its GPU's memory
            process.join()
        self._folder.cleanup()

    def tail(self) -> str:
        """Return the end of the ranks' output."""
        with self._log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._from, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def _send_all(self, message: object) -> None:
        for rank, link in enumerate(self._links):
            try:
                send(link, message)
            except OSError as error:
                raise RanksLostError(self._died(rank)) from error

    def _receive(self, silent: Collection[int], until: float) -> dict[int, Any]:
        """Receive messages until then, by rank, of all ranks but those in `silent`."""
        links = {link: rank for rank, link in enumerate(self._links) if rank not in silent}
        ready = wait(list(links), max(0.0, until - time.monotonic()))
        messages: dict[int, Any] = {}
        for link in ready:
            assert isinstance(link, Connection)
            rank = links[link]
            try:
                messages[rank] = receive(link)
            except (EOFError, OSError):
                messages[rank] = self._died(rank)
        return messages

    def _died(self, rank: int) -> RankLost:
        process = self._processes[rank]
        process.join(_CAUSE_S)
        code = process.exitcode
        how = "was lost" if code is None else f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return RankLost(f"Rank {rank} (process {process.pid}) {how}")
