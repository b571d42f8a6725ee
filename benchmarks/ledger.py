"""Measure a ledger after long use: file size, write times, and silences of the serving loop.

The loop is silent while a session is forgotten.

    python -m benchmarks.ledger [--turns 100000] [--directory DIR]

Turns are as OpenClaw's. Sessions begin with the same ten thousand tokens and grow by what is said
and done. Replies have about 300 tokens, with the four candidates per token that the default method
needs, and logprobs as a model's (float32). They are written with `TurnTable.add`, one transaction
each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import in_session
from tinker_claw.served import Identity, Place, Prompt, RequestKind, ServedTurn
from tinker_claw.types import Completion, Kind, NextState, SamplingParams, StopReason

VOCABULARY = 151_936
SYSTEM = 9_700
"""Tokens of system prompt and tools, the same for all sessions of a day."""
SESSION = 8
"""Turns of a session."""
DAY = 150
"""Sessions of a day; the system prompt changes with the date that it contains."""
TOPK = 4


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run."""

    turns: int
    prompt_tokens: float
    """Mean tokens of a prompt."""
    completion_tokens: float
    file_bytes: int
    bytes_per_turn: float
    add_ms_median: float
    add_ms_p99: float
    forgotten_turns: int
    forget_s: float
    silence_ms: float
    """Longest silence of the loop, in milliseconds, while the session was forgotten; a turn was
    written every 50 ms meanwhile."""
    silence_ms_p99: float


class Talk:
    """An endless source of made-up turns."""

    def __init__(self, ledger: Ledger, seed: int = 0) -> None:
        self._ledger = ledger
        self._rng = random.Random(seed)
        self._number = 0
        self._system = self._ids(SYSTEM)
        self._pool = [self._f32(self._logprobs(400)) for _ in range(97)]
        self._prompt: list[int] = []
        self._session = 0
        self._history: list[str] = []

    def turn(self) -> ServedTurn:
        """Make the next turn of the session, or the first one of the next session."""
        rng = self._rng
        if self._number % (SESSION * DAY) == 0:
            self._system[SYSTEM - 300 :] = self._ids(300)
        if self._number % SESSION == 0:
            self._prompt = [*self._system, *self._ids(200)]
            self._session = self._ledger.turns.session("me", f"session {self._number}")
            self._history = [f"{rng.getrandbits(128):032x}"]
        reply = self._ids(rng.randint(150, 450))
        prompt = tuple(self._prompt)
        who = Identity(
            "key",
            Kind.MAIN,
            "user turn: OpenClaw's agent, with a user's message and its timestamp",
            RequestKind.USER,
            trace=f"{rng.getrandbits(128):032x}",
        )
        text = "please " * rng.randint(5, 40)
        turn = ServedTurn(
            Place(who, self._session, tuple(self._history), text),
            "me",
            0,
            Prompt(prompt, len(prompt) - 9),
            self._completion(reply),
            reply_text=" ".join(f"{i:x}" for i in reply),
            reply_digest=f"{rng.getrandbits(128):032x}",
        )
        self._prompt += [*reply, *self._ids(rng.randint(20, 400))]
        self._history += [turn.reply_digest, f"{rng.getrandbits(128):032x}"]
        self._number += 1
        return turn

    def _ids(self, count: int) -> list[int]:
        """Draw random token ids with the frequencies of text."""
        draw = self._rng.random
        return [int(VOCABULARY ** draw()) for _ in range(count)]

    def _logprobs(self, count: int) -> list[float]:
        """Draw random logprobs: most tokens of a reply are near certain, a few are not."""
        return [-(10 ** self._rng.uniform(-6, 1)) for _ in range(count)]

    @staticmethod
    def _f32(values: Sequence[float]) -> list[float]:
        return array("f", values).tolist()

    def _completion(self, reply: list[int]) -> Completion:
        n, draw = len(reply), self._rng.choice
        near = [[token, *self._ids(TOPK - 1)] for token in reply]
        columns = [draw(self._pool)[self._rng.randrange(90) :] * 2 for _ in range(TOPK)]
        return Completion(
            tokens=tuple(reply),
            logprobs=tuple(columns[0][:n]),
            topk_ids=tuple(map(tuple, near)),
            topk_logprobs=tuple(zip(*(column[:n] for column in columns), strict=True)),
            stop_reason=StopReason.STOP,
            params=SamplingParams(max_tokens=4096, stop_tokens=(7, 8), student_topk=TOPK),
        )


def measure(directory: Path, turns: int) -> Result:
    """Write this many turns and measure; the ledger stays in the directory."""
    ledger = Ledger(directory)
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    talk, seconds, prompts, replies = Talk(ledger), list[float](), 0, 0
    before = 0
    for number in range(turns):
        turn = talk.turn()
        if number % SESSION:
            ledger.turns.add_next_state(before, NextState("user", turn.place.text))
        started = time.perf_counter()
        before = ledger.turns.add(turn)
        seconds.append(time.perf_counter() - started)
        prompts += len(turn.prompt.tokens)
        replies += len(turn.completion.tokens)
        if sys.stderr.isatty() and number % 1000 == 0:
            print(f"\r{number} of {turns}", end="", file=sys.stderr)
    size = ledger.path.stat().st_size
    forgotten, took, silences = asyncio.run(_forget(ledger, talk))
    ledger.close()
    seconds.sort()
    return Result(
        turns=turns,
        prompt_tokens=prompts / turns,
        completion_tokens=replies / turns,
        file_bytes=size,
        bytes_per_turn=size / turns,
        add_ms_median=1e3 * seconds[turns // 2],
        add_ms_p99=1e3 * seconds[int(turns * 0.99)],
        forgotten_turns=forgotten,
        forget_s=took,
        silence_ms=1e3 * silences[-1],
        silence_ms_p99=1e3 * silences[int(len(silences) * 0.99)],
    )


async def _forget(ledger: Ledger, talk: Talk) -> tuple[int, float, list[float]]:
    """Forget a session as the gateway does; return its turns, the seconds, and all silences."""
    silences, done = list[float](), asyncio.Event()

    async def serve() -> None:
        while not done.is_set():
            for _ in range(10):
                asleep = time.perf_counter()
                await asyncio.sleep(0.005)
                silences.append(time.perf_counter() - asleep - 0.005)
            writing = time.perf_counter()
            ledger.turns.add(talk.turn())
            silences.append(time.perf_counter() - writing)

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.1)
    started = time.perf_counter()
    what = await ledger.forget_in_thread(in_session("2", None))
    took = time.perf_counter() - started
    done.set()
    await serving
    return len(what.turns), took, sorted(silences)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description="Size and speed of a long ledger.")
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, default=None, help="kept; else a temporary one")
    arguments = parser.parse_args()
    if arguments.directory is not None:
        print(json.dumps(asdict(measure(arguments.directory, arguments.turns)), indent=2))
        return
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(asdict(measure(Path(place), arguments.turns)), indent=2))


if __name__ == "__main__":
    main()
