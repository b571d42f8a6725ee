"""Run one rank: join the others, load the base, carry out commands until told to close.

Rule: a rank that fails reports why and ends, and the others end with it. No rank is repaired while
it runs: the control process restarts all of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from local_gpu.config import LocalConfig
from local_gpu.device import device_fault
from local_gpu.halves import Learning
from local_gpu.learn.world import Alone, OutOfStep, World
from local_gpu.ranks.distributed import Distributed
from local_gpu.ranks.messages import (
    CLOSE,
    COMMANDS,
    EXPECTED,
    Command,
    Failure,
    RankAnswer,
    RankLost,
    Start,
    decode,
    encode,
)
from local_gpu.ranks.torchrun import LEASH, when_let_go
from tinker_claw.errors import ClawError, ConfigError

Build = Callable[[LocalConfig, World], Learning]
"""Builds this rank's learner; `config.device` is this rank's."""

_TROUBLE = "tinker-claw-trouble"
_LOOK_S = 0.1
_GOODBYE_S = 1.0
"""Delay before a failed rank ends: torchrun then ends rank 0, which must have reported why
before."""
_TICK_S = 30.0
"""Seconds between heartbeats while there is nothing to do; at most a quarter of the timeout."""
_JOIN_S = 900.0
"""Seconds for all machines to join: they may be started one after the other, by hand."""


def live(build: Build) -> int:
    """Run the rank to its end; return the exit status."""
    rank = int(os.environ["RANK"])
    leashed = LEASH in os.environ
    if leashed:
        # Safe at any time: files appear whole or not at all.
        when_let_go(lambda: os._exit(1))
    elif rank == 0:
        print(
            "Rank 0 is started by the control process. Start this machine with --node-rank 1 or "
            "more, and name the first machine by --master-addr and --master-port.",
            file=sys.stderr,
        )
        return 2
    size, store = int(os.environ["WORLD_SIZE"]), None
    if size > 1:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_JOIN_S)))
    link = Connection(os.dup(0)) if leashed and rank == 0 else None
    with _Voice(rank, link, store) as voice:
        start = voice.start()
        device = _device(start.config)
        config = replace(start.config, device=str(device))
        if size == 1:
            _carry_out(voice, Alone(), build, config)
        else:
            world = Distributed(device, store, rank=rank, size=size, timeout_s=start.timeout_s)
            _carry_out(voice, world, build, config)
            world.leave()
    return 0


def _carry_out(voice: _Voice, world: World, build: Build, config: LocalConfig) -> None:
    """Build the learner, then carry out rank 0's commands until it is told to close."""
    built: list[Learning] = []

    def make() -> Any:
        built.append(build(config, world))
        return built[0].facts

    def compare() -> Any:
        facts = built[0].facts
        if len(set(world.gather(facts))) > 1:
            raise ConfigError(f"The ranks have loaded different models as {config.model!r}.")
        return facts

    outcome = _tried(world, make)
    if isinstance(outcome, RankAnswer):
        outcome = _tried(world, compare)
    voice.send(outcome)
    if isinstance(outcome, Failure):
        return
    (learning,) = built
    name = None
    while name != CLOSE:
        command = voice.next(world)
        name = command.name
        if name not in COMMANDS:
            raise OutOfStep(f"There is no command {name!r}.")
        voice.send(_tried(world, lambda c=command: getattr(learning, c.name)(*c.arguments)))


def _tried(world: World, call: Callable[[], Any]) -> Failure | RankAnswer:
    """Run a call that every rank makes; return rank 0's value, or the first failure."""
    value, failure = None, None
    try:
        value = call()
    except EXPECTED as error:
        if device_fault(error):
            raise  # whatever this process computes next may fail as well
        failure = Failure(error)
    first = next((f for f in world.gather(failure) if f is not None), None)
    return RankAnswer(value) if first is None else first


class _Voice:
    """Messages of this rank to the control process: sent by rank 0 itself, by others through rank
    0."""

    def __init__(self, rank: int, link: Connection | None, store: Any | None) -> None:
        """`link`: rank 0's; `store`: torch's, of the rendezvous; None: this rank is alone."""
        self._rank = rank
        self._link = link
        self._store = store and store.clone()
        self._writing = threading.Lock()
        self._tick_s = _TICK_S
        if link is not None and store is not None:
            threading.Thread(target=self._pass_on, args=(store.clone(),), daemon=True).start()

    def __enter__(self) -> _Voice:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the process at once on an error, without cleanup: other ranks may be waiting for
        it."""
        if error is not None:
            traceback.print_exception(error)
            sys.stderr.flush()
            self._lose(error)
            os._exit(1)

    def start(self) -> Start:
        """Return rank 0's start message on every rank."""
        told = None if self._link is None else self._link.recv_bytes()
        if self._store is not None:
            if told is not None:
                self._store.set("start", told)
            told = self._store.get("start")
        assert told is not None
        start: Start = decode(told)
        self._tick_s = min(_TICK_S, start.timeout_s / 4)
        return start

    def next(self, world: World) -> Command:
        """Return the next command. While there is none, rank 0 sends heartbeats to the others."""
        if self._link is None:
            command: Command | None = None
            while command is None:
                command = world.share(command)
            return command
        while not self._link.poll(self._tick_s):
            world.share(None)
        try:
            return world.share(decode(self._link.recv_bytes()))
        except (EOFError, ConnectionError):
            os._exit(1)  # the control process is gone

    def _lose(self, error: BaseException) -> None:
        """Report why this rank ends, unless another rank did before: the first reason is the
        cause."""
        plain = isinstance(error, (ClawError, OutOfStep))
        sentence = str(error) if plain else f"{type(error).__name__}: {error}"
        fault = device_fault(error)
        lost = RankLost(self._rank, fault or sentence, outage=fault is not None)
        if self._store is None:
            with suppress(OSError):  # the control process is gone
                self.send(lost)
            return
        with suppress(RuntimeError):  # the store ends with the first machine
            if self._store.add(f"{_TROUBLE}-count", 1) == 1:
                self._store.set(_TROUBLE, encode(lost))
        time.sleep(_GOODBYE_S)

    def _pass_on(self, store: Any) -> None:
        """On rank 0: report the first rank that failed to the control process."""
        with suppress(RuntimeError):
            while not store.check([_TROUBLE]):
                time.sleep(_LOOK_S)
            self.send(decode(store.get(_TROUBLE)))

    def send(self, what: object) -> None:
        if self._link is not None:
            with self._writing:
                self._link.send_bytes(encode(what))


def _device(config: LocalConfig) -> torch.device:
    """This rank's GPU of its machine, or the CPU."""
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted != "cuda":
        return torch.device(wanted)
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(f"A rank found no GPU: this machine shows {count}, one for each rank.")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
