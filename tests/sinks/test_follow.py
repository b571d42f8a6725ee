"""The program that reports steps to a sink, with TensorBoard, whose own reader reads its files."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.plugins.test_plugins import lay
from tests.support.ledger import step_counts
from tests.support.lives import ROOT, until
from tests.support.stories import SECRET, Told
from tinker_claw.app import reporting
from tinker_claw.retry import Backoff


def scalars(data: Path) -> dict[str, list[tuple[int, float]]]:
    """Points of every curve, as TensorBoard has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(data / "sinks" / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(p.step, p.value) for p in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def steps(data: Path) -> list[int]:
    if not (data / "sinks" / "tensorboard").exists():
        return []
    return [step for step, _ in scalars(data).get("step/version", [])]


@contextmanager
def following(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tinker_claw.sinks.follow", "tensorboard", str(data)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def follow_to_the_end(data: Path) -> None:
    with following(data) as process:
        process.communicate(timeout=240)
        assert process.returncode == 0


def learn(told: Told, *names: str) -> None:
    for name in names:
        told.step(told.sampled(name, 1)[1])


def test_every_step_is_in_the_files_once_and_no_word_is(tmp_path: Path) -> None:
    told = Told(tmp_path)
    learn(told, "a", "b")
    follow_to_the_end(tmp_path)
    learn(told, "c")
    for _ in range(2):
        follow_to_the_end(tmp_path)
    found = scalars(tmp_path)
    assert found["step/version"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert found["step/losses/1"] == [(1, -0.5), (2, -0.5), (3, -0.5)]
    written = b"".join(f.read_bytes() for f in (tmp_path / "sinks").rglob("*") if f.is_file())
    assert b"step/version" in written
    assert SECRET.encode() not in written
    told.ledger.close()


def test_kills_cost_no_step(tmp_path: Path) -> None:
    told, rng = Told(tmp_path), random.Random(0)
    for life in range(4):
        before = len(steps(tmp_path))
        with following(tmp_path) as process:
            learn(told, *(f"{life} {n}" for n in range(rng.randrange(1, 4))))
            until(lambda had=before: len(steps(tmp_path)) > had)  # type: ignore[misc]
            learn(told, f"{life} last")
            process.kill()
    follow_to_the_end(tmp_path)
    committed = step_counts(told.ledger)["committed"]
    # A kill before the note sends one step again.
    assert sorted({*steps(tmp_path)}) == list(range(1, committed + 1))
    assert len(steps(tmp_path)) <= committed + 4
    told.ledger.close()


def test_one_that_a_killed_gateway_left_behind_doubles_nothing(tmp_path: Path) -> None:
    told = Told(tmp_path)
    with following(tmp_path) as left, following(tmp_path) as next_one:
        learn(told, "a")
        until(lambda: steps(tmp_path) == [1])
        assert left.stdin is not None
        left.stdin.close()
        learn(told, "b")
        next_one.communicate(timeout=240)
        assert next_one.returncode == 0
    assert steps(tmp_path) == [1, 2]
    told.ledger.close()


async def test_a_sink_that_fails_is_a_line_in_the_log_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "RESTARTS", Backoff(first_s=0.01, longest_s=0.1))
    told = Told(tmp_path)
    learn(told, "a")
    (tmp_path / "sinks").mkdir()
    in_the_way = tmp_path / "sinks" / "tensorboard"
    in_the_way.write_text("no folder")
    with capture_logs() as logs:
        task = asyncio.create_task(reporting.report("tensorboard", tmp_path))
        await asyncio.to_thread(until, lambda: logs)
        assert (logs[0]["event"], logs[0]["log_level"]) == ("sink.failed", "warning")
        assert "ended with status 1" in logs[0]["error"]
        assert logs[0]["log"] == str(tmp_path / "sinks" / "tensorboard.log")
        in_the_way.unlink()
        await asyncio.to_thread(until, lambda: steps(tmp_path) == [1])
        learn(told, "b")
        task.cancel()
        await asyncio.wait([task])
    assert steps(tmp_path) == [1, 2], "it was told at the end of what was left"
    told.ledger.close()


DEAF = """
import socket
class Deaf:
    def __init__(self, run): ...
    def write(self, report):
        socket.create_connection(("127.0.0.1", {port})).recv(1)
    def close(self): ...
"""


async def test_a_sink_that_hangs_is_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "END_S", 0.1)
    told = Told(tmp_path)
    learn(told, "a")
    with socket.create_server(("127.0.0.1", 0)) as deaf, capture_logs() as logs:
        deaf.setblocking(False)
        lay(
            tmp_path,
            "claw_deaf",
            DEAF.format(port=deaf.getsockname()[1]),
            "sink deaf=claw_deaf:Deaf",
        )
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        task = asyncio.create_task(reporting.report("deaf", tmp_path))
        connection, _ = await asyncio.get_running_loop().sock_accept(deaf)
        task.cancel()
        await asyncio.wait([task])
        connection.close()
    assert [event["event"] for event in logs] == ["sink.killed"]
    assert not (tmp_path / "sinks" / "deaf.step").exists(), "it is told again at the next start"
    told.ledger.close()
