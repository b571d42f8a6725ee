"""Lives of the product: real processes with a port and a data directory, started fast, that die by
SIGKILL where they are told.

Rule: the product knows nothing of this. A life is forked from a process that has imported
everything and started nothing; what is to kill it is wrapped around the product's own functions
before its `main` is called. One with a `python` is `run.py` in that interpreter instead, with
nothing wrapped.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 240
LOCAL = ("--backend", "local")
POINTS: dict[str, tuple[str, ...]] = {
    "intent": ("tinker_claw.ledger.steps:StepTable.begin",),
    "trained": (
        "local_gpu.trainer:LocalTrainer.train_step",
        "tinker_claw.backends.tinker.trainer:TinkerTrainer.train_step",
    ),
    "saving": ("local_gpu.model.files:write_moments",),
    "saved": (
        "local_gpu.trainer:LocalTrainer.save_state",
        "tinker_claw.backends.tinker.trainer:TinkerTrainer.save_state",
    ),
    "publishing": ("local_gpu.learn.learning:write_adapter",),
    "published": (
        "local_gpu.trainer:LocalTrainer.publish",
        "tinker_claw.backends.tinker.trainer:TinkerTrainer.publish",
    ),
    "asking": ("tinker_claw.learner.gate:_score",),
    "asked": ("tinker_claw.learner.gate:Gate.ask",),
    "committing": ("tinker_claw.ledger.steps:insert_version",),
    "committed": ("tinker_claw.ledger.steps:StepTable.commit",),
    "swapped": ("tinker_claw.policy:PolicyHolder.swap",),
    "turn being written": ("tinker_claw.ledger.turns:store_prompt",),
    "turn written": ("tinker_claw.ledger.turns:TurnTable.add",),
    "judging": ("tinker_claw.judge.judge:Judge.judge",),
    "judged": ("tinker_claw.ledger.judgements:JudgementTable.add",),
    "queued": ("tinker_claw.ledger.samples:SampleTable.add",),
    "state loaded": (
        "local_gpu.trainer:LocalTrainer.load_state",
        "tinker_claw.backends.tinker.trainer:TinkerTrainer.load_state",
    ),
}
"""Functions after whose return a life ends, by name of the point, even within a transaction."""


@dataclass(frozen=True)
class Fate:
    """Faults of a life. Places are written as `module:name`."""

    dies_at: str | None = None
    """Point of `POINTS`, or a place, at which it is killed; None: it is not killed."""
    passes: int = 0
    """Number of passes through that point before."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which functions take longer; they report their start (`Life.is_slow`)."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    clock_s: float = 0.0
    """Seconds by which its clock is ahead."""
    python: str = ""
    """Interpreter that it is started in, as a user does; then it has no other faults."""


BOUNDS: dict[str, Any] = {
    "tinker_claw.app.main:CLOSE_S": 2,
    "tinker_claw.app.main:STEP_S": 2,
    "tinker_claw.app.main:DRAIN_S": 1,
    "tinker_claw.app.server:DRAIN_S": 1,
}

_PRELOAD = (
    "pytest",
    "tests.support.lives",
    "tinker_claw.cli.main",
    "tinker_claw.app.main",
    "tinker",
    "tinker_claw.backends.tinker",
    "local_gpu.trainer",
    "examples.demo.judge",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.on",
)
_SLOW = "this takes long, as told"
_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(list(_PRELOAD))


@dataclass
class Life:
    """One process of the product."""

    process: ForkServerProcess
    url: str
    log: Path
    began_at: int
    """Position in the log at which its part begins."""

    @property
    def ended(self) -> int | None:
        """Exit status, negative for a signal; None: it still runs."""
        return self.process.exitcode

    def said(self) -> str:
        return self.log.read_bytes()[self.began_at :].decode(errors="replace")

    def is_slow(self) -> bool:
        """Whether a slowed function has begun."""
        return _SLOW in self.said()

    def stops(self) -> bool:
        """Whether it has received its first signal: from then on it has an alarm
        (app/server.py)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (signal.SIGALRM - 1) & 1)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return [event for event in events_in(self.said()) if name in (None, event["event"])]

    def serves(self) -> bool:
        """Wait until it answers, or has ended."""
        deadline = time.monotonic() + START_S
        while not self.events("serving"):
            if self.ended is not None:
                return bool(self.events("serving"))
            assert time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.01)
        return True

    def health(self) -> dict[str, Any]:
        return httpx.get(self.url.removesuffix("/v1") + "/healthz", timeout=240).json()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ends(self, timeout: float = 240) -> int:
        """Wait for the end; return the exit status."""
        self.process.join(timeout)
        assert self.ended is not None, f"it lives:\n{self.said()[-3000:]}"
        return self.ended

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ends()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def writes_at_most(self, size: int) -> None:
        """Bound its files to this size in bytes, as on a full disk; -1 lifts the bound."""
        assert self.process.pid is not None
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, hard))


def events_in(log: str) -> list[dict[str, Any]]:
    """Events of the log's whole lines: the last one may still be being written, or was cut off by a
    kill."""
    lines = log.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def until(happened: Callable[[], object], why: str = "in vain", seconds: float = 180) -> None:
    """Wait for a condition; the limit is long, for machines are busy."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


@contextmanager
def life(
    data: Path,
    *flags: str,
    port: int = 0,
    backend: Sequence[str] = LOCAL,
    fate: Fate | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Life]:
    """Start the product with the demo model; it is killed at the end if it still runs."""
    port = port or free_port()
    log = data.with_suffix(".log")
    began_at = log.stat().st_size if log.exists() else 0
    log.touch()
    arguments = ["--model-name", "demo", *backend, "--port", str(port)]
    arguments += ["--data-dir", str(data), *flags]
    process = fork(arguments, log, fate, env)
    try:
        yield Life(process, f"http://127.0.0.1:{port}/v1", log, began_at)
    finally:
        process.kill()
        process.join()


@contextmanager
def product(
    data: Path,
    *flags: str,
    constants: Mapping[str, Any] | None = None,
    python: str = "",
    backend: Sequence[str] = LOCAL,
    env: Mapping[str, str] | None = None,
) -> Iterator[Life]:
    """Start the product with the demo model, and wait until it serves."""
    fate = Fate(constants=constants or {}, python=python)
    with life(data, *flags, backend=backend, fate=fate, env=env) as running:
        assert running.serves(), running.said()[-3000:]
        yield running


def refused(data: Path, *flags: str) -> str:
    """Start one that cannot start, and return what it says."""
    with life(data, *flags) as running:
        assert running.ends() == 2
    assert "Traceback" not in running.said()
    return running.said()


def fork(
    arguments: Sequence[str],
    log: Path,
    fate: Fate | None = None,
    env: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """Run `run.py` with these arguments, in a forked process that has already imported
    everything."""
    process = _nursery.Process(
        target=_live, args=(list(arguments), str(log), fate or Fate(), dict(env or {}))
    )
    process.start()
    return process


def _live(arguments: list[str], log: str, fate: Fate, env: dict[str, str]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.chdir(ROOT)
    # Said here, too: the server of forks may have begun while a test had taken it away.
    os.environ.update({"OMP_NUM_THREADS": "1", "TINKER_CLAW_GATEWAY__API_KEY": "none"} | env)
    for name in [name for name, value in env.items() if not value]:
        del os.environ[name]  # an empty one takes away what this process has inherited
    torch.set_num_threads(1)  # which has read the variable before the fork
    if fate.python:
        os.execv(fate.python, [fate.python, str(ROOT / "run.py"), *arguments])
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nobody forked
    from tinker_claw.cli.main import main

    for place in POINTS.get(fate.dies_at, (fate.dies_at,)) if fate.dies_at else ():
        _replace(place, lambda call: _deadly(call, fate.passes))
    for place, seconds in fate.slow.items():
        _replace(place, lambda call, seconds=seconds: _slow(call, seconds))
    for place, value in fate.constants.items():
        _replace(place, lambda _, value=value: value)
    if fate.clock_s:
        _replace("time:time", lambda call: lambda: call() + fate.clock_s)
        _replace("local_gpu.model.files:datetime", lambda usual: _shifted(usual, fate.clock_s))
    sys.exit(main(arguments))


def _replace(place: str, make: Callable[[Any], Any]) -> None:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, name, make(getattr(owner, name)))


def _shifted(usual: type[datetime], seconds: float) -> type[datetime]:
    class Shifted(usual):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return usual.now(tz) + timedelta(seconds=seconds)

    return Shifted


def _tell_slow() -> None:
    with suppress(OSError):  # where the disk is full
        print(_SLOW, file=sys.stderr, flush=True)


def _slow(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Make a function slow. A plain one cannot be interrupted then, like a call into a foreign
    library."""

    @functools.wraps(call)
    def slowly(*args: Any, **kwargs: Any) -> Any:
        _tell_slow()
        time.sleep(seconds)
        return call(*args, **kwargs)

    @functools.wraps(call)
    async def slowly_async(*args: Any, **kwargs: Any) -> Any:
        _tell_slow()
        await asyncio.sleep(seconds)
        return await call(*args, **kwargs)

    return slowly_async if asyncio.iscoroutinefunction(call) else slowly


def _deadly(call: Callable[..., Any], passes: int) -> Callable[..., Any]:
    left = itertools.count(passes, -1)

    def passed(result: Any) -> Any:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    async def awaited(result: Any) -> Any:
        return passed(await result)

    @functools.wraps(call)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        return awaited(result) if asyncio.iscoroutinefunction(call) else passed(result)

    return deadly
