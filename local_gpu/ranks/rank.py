"""Run one rank: join the others, load the base, carry out commands for as long as its parent lives.

Rule: a rank that fails says why and ends; the control process then ends the others. No rank is
repaired while it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from local_gpu.config import LocalConfig
from local_gpu.device import device_fault
from local_gpu.halves import Learning
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.world import Alone, OutOfStep, World
from local_gpu.model.load import base_of, keep_memory_whole, open_base
from local_gpu.ranks.messages import (
    BUILD,
    COMMANDS,
    Failure,
    RankAnswer,
    RankCommand,
    RankLost,
    RankPart,
    receive,
    send,
)
from local_gpu.ranks.shard import Shards
from tinker_claw.errors import ClawError, ConfigError

T = TypeVar("T")

Build = Callable[[LocalConfig, World], Learning]
"""Builds this rank's learner; `config.device` is this rank's."""

_EXPECTED: Final = (ClawError, OSError)
"""Errors that a command may raise without ending the ranks; anything else ends them."""
_APART: Final = timedelta(hours=1)
"""Longest wait for another rank in a sum: they differ by less within one command."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which of the ranks this is, and where they meet."""

    rank: int
    size: int
    meeting: Path
    """A file that does not exist yet, for all of them."""
    log: Path
    """File that all of them append to."""


def live(build: Build, config: LocalConfig, place: RankPlace, link: Connection) -> None:
    """Run a rank until its parent ends it, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _log_to(place.log)
    print(f"Rank {place.rank} of {place.size} is process {os.getpid()}.")
    try:
        _carry_out(link, build, config, place)
    except EOFError:
        os._exit(1)  # the parent is gone
    except BaseException as error:
        with suppress(OSError):
            send(link, _lost(error))
        raise  # into the log; if cleaning up waits for other ranks, the parent ends it


def build_learner(config: LocalConfig, world: World) -> LearningCore:
    """Build a learner with the whole base on this rank's device, or with its layers sharded over
    all ranks."""
    if config.shard != "on" or not isinstance(world, Ranks):
        return LearningCore(config, base_of(config), world)
    cuda = torch.device(config.device).type == "cuda"
    if cuda:
        keep_memory_whole()
    dtype = "bfloat16" if config.dtype == "auto" and cuda else config.dtype
    # It does not fit on one GPU: every rank loads it into CPU memory first.
    base = open_base(config.model, device="cpu", dtype=dtype, threads=config.threads)
    base = replace(base, device=world.device)
    return LearningCore(config, base, world, Shards(base, world.device, world.size))


class Ranks:
    """Implements `World`: tensors by NCCL on CUDA and gloo elsewhere, the rest by the parent."""

    def __init__(self, device: torch.device, place: RankPlace, link: Connection) -> None:
        # All on this machine: nothing listens on an address that another can reach.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=place.meeting.absolute().as_uri(),
            rank=place.rank,
            world_size=place.size,
            timeout=_APART,
        )
        self.device = device
        self.rank = place.rank
        self.size = place.size
        self._link = link
        self.sum(torch.ones(1, device=device))  # fails at once if GPUs cannot communicate

    def sum(self, flat: Tensor) -> None:
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:
            raise OutOfStep(f"The ranks lost one another ({error}).", follows=True) from error

    def gather(self, mine: T) -> list[T]:
        send(self._link, RankPart(mine))
        return receive(self._link)


def _carry_out(link: Connection, build: Build, config: LocalConfig, place: RankPlace) -> None:
    """Answer commands, of which the first builds the learner."""
    learning: Learning | None = None

    def begin() -> Any:
        nonlocal learning
        device = _device(config, place)
        world = Alone() if place.size == 1 else Ranks(device, place, link)
        learning = build(replace(config, device=str(device), threads=_threads(config)), world)
        return learning.facts

    while True:
        command: RankCommand = receive(link)
        if command.name == BUILD:
            send(link, _tried(begin))
            continue
        assert learning is not None
        assert command.name in COMMANDS
        method = getattr(learning, command.name)
        send(link, _tried(lambda m=method, c=command: m(*c.arguments)))


def _tried(call: Callable[[], Any]) -> Failure | RankAnswer:
    try:
        return RankAnswer(call())
    except _EXPECTED as error:
        if device_fault(error):
            raise  # whatever this process computes next may fail as well
        return Failure(error)


def _lost(error: BaseException) -> RankLost:
    fault = device_fault(error)
    plain = isinstance(error, (ClawError, OutOfStep))
    sentence = fault or (str(error) if plain else f"{type(error).__name__}: {error}")
    if isinstance(error, OutOfStep):
        return RankLost(sentence, fault is not None, error.follows, error.budget)
    return RankLost(sentence, fault is not None)


def _device(config: LocalConfig, place: RankPlace) -> torch.device:
    """This rank's GPU, or the CPU."""
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted != "cuda":
        return torch.device(wanted)
    number = config.train_gpus[place.rank] if config.train_gpus else place.rank
    if number >= (count := torch.cuda.device_count()):
        raise ConfigError(f"GPU {number} is to learn, but torch sees {count} GPUs here.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _threads(config: LocalConfig) -> int | None:
    """Threads of this rank: its share of the CPU's, unless something else was asked for."""
    if config.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config.threads
    return max(1, (os.cpu_count() or 1) // config.ranks)


def _end_with_parent() -> None:
    """Safe at any time: files appear whole or not at all."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _log_to(file: Path) -> None:
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream, which in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(number, which)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(number)
