"""Killed at any instant under load, the product loses nothing, trains nothing twice, and goes on.

`pytest tests/app/test_torture.py --kills 200` kills it more often than every day needs.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import httpx
import pytest

from tests.support.clients import Talkers, talking
from tests.support.ledger import check, one, read
from tests.support.lives import BOUNDS, POINTS, Fate, Life, life, until
from tests.support.ports import free_port
from tests.support.tinker import wire_process

pytestmark = pytest.mark.slow

BATCH = 2
FLAGS = ("--batch-size", "2", "--lora-rank", "4", "--learning-rate", "1e-3")
LOCAL = ("--backend", "local")
SERVICE = {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}


@dataclass(frozen=True)
class End:
    """How a life of the product ends."""

    point: str | None
    """Point in the code at which it is killed; None: at any instant."""
    passes: int = 0
    after_s: float = 0.0
    """Seconds from the start of the process to a kill at any instant."""
    python: str = ""
    """Whether the process was started by exec; such a process can only be killed at any instant."""
    room: int | None = None
    """Bytes that the ledger's log may still grow by once it serves; then the disk is full."""

    @property
    def name(self) -> str:
        if self.room is not None:
            return "the disk fills"
        return self.point or ("any instant, started by exec" if self.python else "any instant")


def ends_of(kills: int, seed: int) -> list[End]:
    """Make ends: every point in turn, every fifth time any instant, and now and then a process as a
    user starts it, or a disk that fills before the end."""
    rng, ends = random.Random(seed), list[End]()
    for point in cycle(POINTS):
        if len(ends) >= kills:
            return ends[:kills]
        if len(ends) % 5 == 4:
            early = rng.random() < 0.3  # often before it serves
            at = rng.uniform(0, 0.4) if early else rng.uniform(0.4, 3)
            ends.append(End(None, after_s=at))
        if len(ends) % 10 == 7:
            ends.append(
                End(None, after_s=rng.uniform(0.2, 3), room=rng.choice((0, 50_000, 300_000)))
            )
        if len(ends) % 20 == 18:
            ends.append(End(None, after_s=rng.uniform(0.5, 12), python=sys.executable))
        # A state is loaded once in a life.
        ends.append(End(point, passes=0 if point == "state loaded" else rng.randrange(3)))
    raise AssertionError("a cycle has no end")


def is_sound(running: Life, data: Path, who: Talkers, *, remote: bool) -> None:
    """Check that everything clients have seen is stored, and that the newest version serves."""
    before = check(data, who.seen, batch_size=BATCH, remote=remote)
    with suppress(httpx.TransportError):  # a life that is to end may have done so
        serving = running.health()["policy_version"]
        assert before <= serving <= one(data, "SELECT MAX(id) FROM versions")


def full(running: Life, data: Path, room: int) -> None:
    """Bound the size of files by that of the ledger's log plus `room`."""
    running.writes_at_most((data / "ledger.sqlite3-wal").stat().st_size + room)


def torture(
    data: Path,
    kills: Sequence[End],
    *,
    backend: Sequence[str] = LOCAL,
    env: Mapping[str, str] | None = None,
) -> str:
    """Live through all these ends, then live and learn; return the figures."""
    remote, port, began = backend != LOCAL, free_port(), time.monotonic()
    with talking(f"http://127.0.0.1:{port}/v1") as who:
        for end in kills:
            fate = Fate(end.point, end.passes, python=end.python)
            born = time.monotonic()
            with life(data, *FLAGS, port=port, backend=backend, fate=fate, env=env) as doomed:
                if end.room is not None and doomed.serves():
                    is_sound(doomed, data, who, remote=remote)
                    full(doomed, data, end.room)
                    born = time.monotonic()
                if end.point is None:
                    who.wanted.set()
                    time.sleep(max(0.0, end.after_s + born - time.monotonic()))
                    doomed.kill()
                elif doomed.serves():
                    is_sound(doomed, data, who, remote=remote)
                    who.wanted.set()
                assert doomed.ends() == -9, f"{end}\n{doomed.said()[-3000:]}"
                who.wanted.clear()
        with life(data, *FLAGS, port=port, backend=backend, env=env) as last:
            assert last.serves()
            is_sound(last, data, who, remote=remote)
            start = last.health()["policy_version"]
            who.wanted.set()
            until(lambda: last.health()["policy_version"] > start, "it learns no more")
            who.over.set()
            due = "SELECT COUNT(*) FROM turns WHERE state = 'judging'"
            until(lambda: one(data, due) == 0, "turns are not judged")
            assert last.health()["status"] == "ok"
            assert last.stop() == 0
    check(data, who.seen, batch_size=BATCH, remote=remote)
    assert "Traceback" not in data.with_suffix(".log").read_text()
    steps = dict(read(data, "SELECT status, COUNT(*) FROM steps GROUP BY status"))
    return (
        f"{len(kills)} kills in {time.monotonic() - began:.0f} s, at "
        f"{dict(Counter(end.name for end in kills))}; {len(who.seen)} replies "
        f"seen, {who.broken} broken off; steps {steps}, "
        f"{one(data, 'SELECT COUNT(*) FROM versions')} versions"
    )


def test_killed_anywhere_it_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--kills")
    print(torture(tmp_path / "data", ends_of(count, seed=count)))


def test_killed_while_the_gate_asks_a_version_it_is_asked_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    print(torture(data, [End("asking"), End("asking", passes=40), End("asked"), End("asked", 1)]))
    noted = "json_extract(metrics, '$.gate.asked')"
    for status, asked in read(data, f"SELECT status, {noted} FROM steps"):
        assert (asked is not None) == (status == "committed"), "no version serves unasked"


def test_killed_beside_a_service_that_goes_on_it_loses_nothing(tmp_path: Path) -> None:
    """The same through the Tinker wire; at the end the service goes, and the product still ends in
    order."""
    data = tmp_path / "data"
    ends = [
        *(End(point) for point in ("trained", "saved", "published")),
        End("swapped", passes=1),
        End("turn written", passes=2),
    ]
    with wire_process(tmp_path / "box") as box:
        remote = ("--backend", "tinker", "--base-url", box.url)
        print(torture(data, ends, backend=remote, env=SERVICE))
        with (
            life(data, *FLAGS, backend=remote, env=SERVICE, fate=Fate(constants=BOUNDS)) as last,
            talking(last.url) as who,
        ):
            assert last.serves()
            who.wanted.set()
            until(lambda: len(who.seen) > 2, "nobody answers")
            box.process.kill()
            until(lambda: last.health()["status"] == "degraded", "it does not notice")
            assert last.stop() == 0
            who.over.set()
    check(data, who.seen, batch_size=BATCH, remote=True)
    assert "Traceback" not in last.said()
