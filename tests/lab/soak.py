"""`python -m tests.lab.soak`: the product for twenty minutes under load, with everything going
wrong in turn, and a report of what grew.

Rule: one real process of the product, whose sampler and trainer answer at once and whose caps are
a hundredth, so that each wraps many times; loopback only, bounded in time and number. What befalls
it is done from outside. After each fault learning must move again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import mmap
import os
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.gateway_client import Connection, share
from tests.support.bad_judges import bad_judge_beside
from tests.support.fakes import FakeSampler, FakeTrainer, Script, rated
from tests.support.ledger import one, read
from tests.support.lives import Fate, Life, life
from tests.support.ports import free_port
from tinker_claw.errors import OutageError
from tinker_claw.policy import Sampler, Trainer
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import (
    Adam,
    Charge,
    LossPass,
    SamplingParams,
    StepReport,
    TokenLogprobs,
    Tokens,
    uncharged,
)

BATCH = 16
TALKERS = 24
LONG = 1000
"""Token limit of a request above which the reply is as long as it may be."""
SETTLE_S = 120.0
"""Seconds that learning may take to move again after a fault, on a busy machine."""
SILENCE_S = 30.0
"""Silence of the event loop in seconds that means it was stuck, and not only waiting on a busy
machine."""
QUIET = "none"
AROUND_S = 5.0
"""Seconds around a fault in which a request may still fail: it was under way."""
FEWEST_LOOKS = 30
"""Fewest looks without a fault from which a trend is computed."""
MORE_DESCRIPTORS, MORE_THREADS = 8, 3
"""Most new descriptors and threads in the whole of the last life: connections to the judge come and
go, and each pool of threads may add one. A leak with every thousandth turn would add a hundred."""
RSS_BYTES = 400
"""Growth of memory per turn that means a leak. A turn that stays in memory by its name alone takes
more: a page of the index takes 300 bytes, and a turn has up to three. The allocator's own growth is
less."""
LEDGER_BYTES = 3_000
"""Most bytes in the ledger for a turn whose texts and tokens were dropped, with its votes and its
sample; a whole turn has 8,000."""
FLAGS = (
    "--batch-size",
    str(BATCH),
    "--lora-rank",
    "4",
    "--context-tokens",
    "8192",
    "--max-concurrent",
    "16",
    "--keep-days",
    "1",
)
CAPS = {
    "tinker_claw.gateway.app:MAX_QUEUE": 64,
    "tinker_claw.app.wiring:IDLE_S": 60.0,
    "tinker_claw.gateway.respond:KEEPALIVE_S": 0.5,
    "tinker_claw.gateway.index:TURN_KEYS": 400,
    "tinker_claw.gateway.index:STREAM_TOKENS": 15_000,
    "tinker_claw.gateway.index:SESSIONS": 1_000,
    "tinker_claw.gateway.index:TRACES": 40,
    "tinker_claw.gateway.privacy:TRACES": 40,
    "tinker_claw.gateway.secrets:TEXTS": 280,
    "tinker_claw.render.prompt_cache:PromptCache.__init__.__defaults__": (720_000,),
    "tinker_claw.app.main:UPKEEP_S": 6.0,
    "tinker_claw.app.main:DAY_S": 300.0,
}
"""Caps of the product at a hundredth of their values; a day is five minutes."""


# The process under test


class Answers(FakeSampler):
    """A sampler that answers a few words at once, whatever the prompt, and keeps nothing."""

    def __init__(self, ref: str, flag: Path) -> None:
        super().__init__(ref=ref)
        self._flag = flag
        tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self._words = tokenizer.encode("the sum is seven and the list is long").ids
        self._end = tokenizer.token_to_id("<|im_end|>") or 0
        self._rng = random.Random(ref)

    async def logprobs(self, *args: Any, **kwargs: Any) -> TokenLogprobs:
        self.scored.clear()
        self.scored_images.clear()
        return await super().logprobs(*args, **kwargs)

    def _take(self, prompt: Tokens, params: SamplingParams) -> Script:
        most = params.max_tokens
        length = most - 1 if most > LONG else self._rng.randint(4, 16)
        return Script((*self._rng.choices(self._words, k=length), self._end), chunk=50)

    def _answers(self) -> None:
        _reach(self._flag)


class Learns(FakeTrainer):
    """A trainer that takes each step at once; every ref that it gave stays valid."""

    def __init__(self, flag: Path) -> None:
        super().__init__(context_tokens=8192)
        self._flag = flag

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        self.steps.clear()
        return await super().train_step(passes, adam, charge)

    async def open(self, ref: str) -> Sampler:
        return Answers(ref, self._flag)

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        _reach(self._flag)
        self.suspect = False

    def _sampler(self, ref: str) -> FakeSampler:
        return Answers(f"{ref}-{os.getpid()}-{self.weights}", self._flag)

    def fails(self, what: str) -> bool:
        _reach(self._flag)
        return super().fails(what)


def _reach(flag: Path) -> None:
    if flag.exists():
        raise OutageError("the service is away, as told")


@asynccontextmanager
async def open_learns(settings: Any, *_: Any, **__: Any) -> AsyncGenerator[Trainer]:
    """Replaces the product's function that opens a backend."""
    yield Learns(_flag(settings.run.directory))


def _flag(data: Path) -> Path:
    """File whose existence means that the service is away."""
    return data.with_suffix(".away")


@dataclass
class Clock:
    """A clock ahead of `time.time` by the number in a file."""

    path: Path
    _page: mmap.mmap | None = None

    def __call__(self) -> float:
        if self._page is None:
            with self.path.open("r+b") as file:
                self._page = mmap.mmap(file.fileno(), 8)
        return time.clock_gettime(time.CLOCK_REALTIME) + struct.unpack("d", self._page[:8])[0]

    def set(self, ahead_s: float) -> None:
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(struct.pack("d", ahead_s))  # in place: others have the page in memory

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_page": None}


# Those around it

POISON = ("bad gzip", "brackets", "NUL", "content null", "cut gzip", "invalid UTF-8", "refusal")


def vote(case: str) -> str:
    """Accept a reply of three, and hint at the others."""
    words = case.rpartition("next state, written by the user>>\n")[2].split("\n")[0]
    return rated(random.choice((1, -1, -1)), words, "Answer in one short sentence without a list.")


@dataclass
class Traffic:
    """Sessions that begin, go on for a few turns and end, at a set rate."""

    url: str
    rate: float
    """Turns per second of all sessions together."""
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(end time, seconds) of each turn that was answered."""
    failed: list[tuple[float, str]] = field(default_factory=list)
    """(start time, reason) of each turn that was not."""
    over: bool = False
    _next: float = 0.0

    async def talk(self, number: int) -> None:
        lines: list[Connection] = []
        try:
            await self._converse(number, lines)
        finally:
            for line in lines:
                line.close()

    async def _converse(self, number: int, lines: list[Connection]) -> None:
        rng, count = random.Random(number), 0
        while not self.over:
            count += 1
            messages = [{"role": "user", "content": _words(rng, 30)}]
            for _ in range(rng.choice((1, 1, 2, 3))):
                reply = await self._turn(lines, f"s{number}-{count}", messages)
                if reply is None:
                    break
                messages += [
                    {"role": "assistant", "content": reply},
                    {"role": "user", "content": _words(rng, 8)},
                ]

    async def _turn(
        self, lines: list[Connection], session: str, messages: list[dict[str, str]]
    ) -> str | None:
        """Take a turn over one kept connection; return the reply, or None if there was none."""
        self._next = max(self._next, time.monotonic() - 0.5) + 1 / self.rate
        await asyncio.sleep(self._next - time.monotonic())
        body = {"model": "demo", "messages": messages, "max_tokens": 60, "stream": True}
        body["prompt_cache_key"] = session
        began = time.monotonic()
        try:
            if not lines:
                lines.append(await Connection.open(self.url))
            answer = await lines[0].ask(json.dumps(body).encode())
        except (OSError, EOFError) as error:
            if lines:
                lines.pop().close()
            self.failed.append((began, type(error).__name__))
            await asyncio.sleep(0.2)  # an agent, too, waits before it asks again
            return None
        text = answer.events.decode()
        if answer.status != 200 or "data: [DONE]" not in text:
            self.failed.append((began, f"{answer.status} {text[-200:]}"))
            await asyncio.sleep(0.1)
            return None
        self.latencies.append((time.monotonic(), answer.seconds))
        events = (json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {"))
        return "".join(
            choice["delta"].get("content") or "" for e in events for choice in e.get("choices", ())
        )


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(10**6)}" for _ in range(count))


# What is measured


@dataclass(frozen=True)
class Look:
    """Figures of the process at one moment."""

    at: float
    """Seconds since the soak began."""
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int
    turns: int
    ledger_bytes: int
    silence_ms: float
    """Longest answer of /healthz since the look before."""
    version: int
    fault: str


@dataclass
class Soak:
    """State of one run."""

    seconds: float
    rate: float
    folder: Path
    say: Callable[[str], object]
    began: float = field(default_factory=time.monotonic)
    looks: list[Look] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)
    """Seconds until learning moved again, by fault."""
    wrong: list[str] = field(default_factory=list)
    fault: str = QUIET
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each fault, until learning moved again."""
    _silence: float = 0.0

    async def run(self) -> None:
        self.data = self.folder / "data"
        self.clock = Clock(self.folder / "clock")
        self.clock.set(0)
        self.port = free_port()
        self.traffic = Traffic(f"http://127.0.0.1:{self.port}/v1", self.rate)
        with bad_judge_beside() as self.judge, ExitStack() as self.lives:
            self.judge.vote = vote
            await self._born()
            self.began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                around = [group.create_task(self.traffic.talk(n)) for n in range(TALKERS)]
                around += [group.create_task(self._watch()), group.create_task(self._ask())]
                try:
                    await self._calendar()
                finally:
                    self.traffic.over = True
                    for task in around:
                        task.cancel()
            await asyncio.to_thread(self._end)

    async def _born(self) -> None:
        fate = Fate(
            constants={
                "tinker_claw.app.wiring:open_trainer": open_learns,
                "time:time": self.clock,
                **CAPS,
            }
        )
        flags = (*FLAGS, "--judge-url", self.judge.url)
        self.life: Life = self.lives.enter_context(
            life(self.data, *flags, port=self.port, fate=fate)
        )
        assert await asyncio.to_thread(self.life.serves), self.life.said()[-3000:]

    async def _calendar(self) -> None:
        faults = (
            self._kill,  # first, so that one life lasts through all the others
            self._poison,
            self._judge_away,
            self._service_away,
            self._full_disk,
            self._clock_jump,
            self._storm,
            self._stalled_readers,
        )
        span = self.seconds / (len(faults) + 2)
        await asyncio.sleep(span)
        for number, strike in enumerate(faults):
            self.fault = strike.__name__.lstrip("_").replace("_", " ")
            self.say(f"{self._now():6.0f} s  {self.fault}")
            struck = time.monotonic()
            await strike(span / 3)
            if self.life.ended is not None:
                raise SystemExit(f"{self.fault} ended it:\n{self.life.said()[-3000:]}")
            took = await self._moves()
            self.moved[self.fault] = took
            self.spans[self.fault] = (struck, time.monotonic())
            self.say(f"{self._now():6.0f} s  learning moved again after {took:.1f} s")
            self.fault = QUIET
            await asyncio.sleep(max(0.0, (number + 2) * span - self._now()))
        await asyncio.sleep(max(0.0, self.seconds - self._now()))

    async def _poison(self, for_s: float) -> None:
        for self.judge.spoilt in POISON:
            await asyncio.sleep(for_s / len(POISON))
        self.judge.spoilt = None

    async def _judge_away(self, for_s: float) -> None:
        self.judge.spoilt = "away"
        await asyncio.sleep(for_s)
        self.judge.spoilt = None

    async def _service_away(self, for_s: float) -> None:
        _flag(self.data).touch()
        await asyncio.sleep(for_s)
        _flag(self.data).unlink()

    async def _full_disk(self, for_s: float) -> None:
        self.life.writes_at_most(0)
        await asyncio.sleep(for_s)
        self.life.writes_at_most(-1)

    async def _clock_jump(self, for_s: float) -> None:
        for ahead in (7200.0, -7200.0, 0.0):
            self.clock.set(ahead)
            await asyncio.sleep(for_s / 3)

    async def _kill(self, for_s: float) -> None:
        for _ in range(3):
            await asyncio.to_thread(self.life.kill)
            await self._born()
            await asyncio.sleep(for_s / 3)

    async def _storm(self, for_s: float) -> None:
        """Open two thousand connections that send nothing."""
        silent: list[socket.socket] = []
        try:
            for _ in range(2000):
                with suppress(OSError):
                    silent.append(socket.create_connection(("127.0.0.1", self.port), timeout=5))
                await asyncio.sleep(for_s / 4000)
            await asyncio.sleep(for_s / 2)
        finally:
            for each in silent:
                each.close()

    async def _stalled_readers(self, for_s: float) -> None:
        """Ask for a long reply and read nothing of it, on many connections."""
        body = json.dumps(
            {
                "model": "demo",
                "messages": [{"role": "user", "content": "everything"}],
                "max_tokens": 6000,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        stalled: list[socket.socket] = []
        try:
            for _ in range(12):
                each = socket.socket()
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.connect(("127.0.0.1", self.port))
                each.sendall(head + body)
                stalled.append(each)
            await asyncio.sleep(for_s)
        finally:
            for each in stalled:
                each.close()

    async def _moves(self) -> float:
        """Wait for a newer version to serve; return the seconds."""
        start, began = await self._version(), time.monotonic()
        while time.monotonic() - began < SETTLE_S:
            if await self._version() > start >= 0:
                return time.monotonic() - began
            await asyncio.sleep(0.2)
        self.wrong.append(f"after {self.fault} learning did not move within {SETTLE_S:.0f} s")
        return SETTLE_S

    async def _version(self) -> int:
        with suppress(Exception):
            return int((await self._health())["policy_version"])
        return -1

    async def _health(self) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=60) as http:
            return (await http.get(f"http://127.0.0.1:{self.port}/healthz")).json()

    async def _ask(self) -> None:
        """Record the longest silence of the loop, seen from outside."""
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                began = time.monotonic()
                with suppress(httpx.TransportError):
                    await http.get(f"http://127.0.0.1:{self.port}/healthz")
                    self._silence = max(self._silence, time.monotonic() - began)
                await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(max(1.0, self.seconds / 240))
            with suppress(OSError, LookupError):  # it was just killed
                self.looks.append(await asyncio.to_thread(self._look))

    def _look(self) -> Look:
        pid = self.life.process.pid
        assert pid is not None
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        silence, self._silence = self._silence, 0.0
        return Look(
            at=self._now(),
            pid=pid,
            rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(fields["Threads"]),
            turns=one(self.data, "SELECT MAX(id) FROM turns") or 0,
            ledger_bytes=sum(p.stat().st_size for p in self.data.glob("ledger.sqlite3*")),
            silence_ms=silence * 1000,
            version=one(self.data, "SELECT MAX(id) FROM versions"),
            fault=self.fault,
        )

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _end(self) -> None:
        """Check that it ends in order, and that its records are whole."""
        if self.life.stop() != 0:
            self.wrong.append("it did not end in order")
        if read(self.data, "PRAGMA integrity_check")[0][0] != "ok":
            self.wrong.append("the ledger is damaged")
        if "Traceback" in self.data.with_suffix(".log").read_text():
            self.wrong.append("there is a traceback in the log")

    def failures(self) -> dict[str, int]:
        """Number of failed requests, by the fault at that time."""
        return dict(Counter(self.befell(at) for at, _ in self.traffic.failed))

    def befell(self, at: float) -> str:
        """Fault at a moment, or just before it."""
        for fault, (start, end) in self.spans.items():
            if start - AROUND_S <= at <= end + AROUND_S:
                return fault
        return QUIET

    def judge_it(self) -> None:
        """Check that nothing grew, and that nothing forbidden happened."""
        loud = [why for at, why in self.traffic.failed if self.befell(at) == QUIET]
        if loud:
            self.wrong.append(f"{len(loud)} requests failed while nothing was wrong: {loud[0]}")
        if max(look.silence_ms for look in self.looks) > 1000 * SILENCE_S:
            self.wrong.append(f"/healthz was silent for more than {SILENCE_S:.0f} s")
        quiet = self.late()
        if len(quiet) < FEWEST_LOOKS:
            return
        turns = quiet[-1].turns - quiet[0].turns
        for name, most in (("descriptors", MORE_DESCRIPTORS), ("threads", MORE_THREADS)):
            grown = slope([(k.turns, float(getattr(k, name))) for k in quiet]) * turns
            if grown > most:
                self.wrong.append(f"{grown:.1f} more {name}")
        for name, most in (("rss_bytes", RSS_BYTES), ("ledger_bytes", LEDGER_BYTES)):
            each = slope([(k.turns, float(getattr(k, name))) for k in quiet])
            if each > most:
                self.wrong.append(f"{each:.0f} {name} more with every turn")

    def late(self) -> list[Look]:
        """Looks without a fault in the last life, without its first quarter, in which caches
        fill."""
        last = [look for look in self.looks if look.pid == self.looks[-1].pid]
        return [k for k in last[len(last) // 4 :] if self.befell(self.began + k.at) == QUIET]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Median of the slopes over a quarter of the points: a single step, as an allocator makes it
    when long replies come, is no growth."""
    pairs = zip(points, points[len(points) // 4 :], strict=False)
    slopes = [(y - x) / (b - a) for (a, x), (b, y) in pairs if b > a]
    return statistics.median(slopes) if slopes else 0.0


def report(soak: Soak) -> dict[str, Any]:
    """Report the growth in the life that lasted to the end, and the figures of the whole run."""
    soak.judge_it()
    last, late = soak.looks[-1], soak.late()
    answered = [seconds * 1000 for _, seconds in soak.traffic.latencies]
    quiet = [s * 1000 for at, s in soak.traffic.latencies if soak.befell(at) == QUIET]

    def each_turn(name: str) -> float:
        return slope([(k.turns, float(getattr(k, name))) for k in late])

    return {
        "seconds": round(last.at),
        "turns": last.turns,
        "turns_per_s": round(last.turns / last.at, 1),
        "versions": last.version,
        "answered": len(answered),
        "failed_requests": soak.failures(),
        "rss_mb": round(last.rss_bytes / 2**20),
        "rss_bytes_a_turn": round(each_turn("rss_bytes")),
        "descriptors": last.descriptors,
        "threads": last.threads,
        "ledger_mb": round(last.ledger_bytes / 1e6, 1),
        "ledger_bytes_a_turn": round(each_turn("ledger_bytes")),
        "p50_ms_quiet": round(share(quiet or [math.nan], 0.5), 1),
        "p95_ms_quiet": round(share(quiet or [math.nan], 0.95), 1),
        "silence_ms": round(max(look.silence_ms for look in soak.looks)),
        "moved_again_after_s": {fault: round(took, 1) for fault, took in soak.moved.items()},
        "wrong": soak.wrong,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="how long (1200)")
    parser.add_argument("--rate", type=float, default=120.0, help="turns a second (120)")
    parser.add_argument("--out", type=Path, help="where to keep data, log and report.json")
    options = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(options.seconds, options.rate, folder, lambda text: console.print(text))
        asyncio.run(soak.run())
        figures = report(soak)
        (folder / "report.json").write_text(
            json.dumps(figures | {"looks": [asdict(look) for look in soak.looks]}, indent=1)
        )
    table = Table("what", "figure")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
