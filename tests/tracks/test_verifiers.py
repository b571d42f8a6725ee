"""verifiers' own harnesses, unmodified, train through the gateway by the one command.

Not in the default suite: `make verifiers` installs it, `make test-verifiers` runs this.
"""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import subprocess
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import one, read
from tests.support.lives import ROOT, life, until

pytestmark = pytest.mark.verifiers
FLAGS = ("--method", "binary", "--prm-m", "1",
         "--batch-size", "4", "--lora-rank", "4", "--learning-rate", "1e-3")  # fmt: skip
SIZE, GROUPS = 4, 2
TRACK = """\
environment = "verifiers"
model = "{model}"
concurrency = 4
group_size = 4
groups = 2
exam_tasks = 2
max_turns = 4
max_tokens = 48
[options]
taskset = {taskset}
harness = "{harness}"
"""


@contextmanager
def track(
    request: pytest.FixtureRequest,
    folder: Path,
    harness: str,
    url: str,
    model: str = "demo",
    taskset: str = '"short_answers"',
) -> Generator[subprocess.Popen[bytes]]:
    said = TRACK.format(harness=harness, model=model, taskset=taskset)
    (folder / "track.toml").write_text(said)
    programs = request.config.getoption("verifiers").absolute() / "bin"
    paths = (str(ROOT), str(ROOT / "tests" / "tracks" / "tasksets"))
    command = [programs / "python", "-m", "examples.tracks", "run", folder / "track.toml"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--url", url, "--out", folder / "out"],
            env=os.environ
            | {"NLTK_DATA": str(folder / "nltk")}
            | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stored(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "out" / "state.sqlite3")) as reader:
        return reader.execute(query).fetchall()


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_harness_of_verifiers_trains_as_it_is_also_when_it_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path, harness: str
) -> None:
    data = tmp_path / "data"
    with life(data, *FLAGS) as gateway:
        assert gateway.serves()
        with track(request, tmp_path, harness, gateway.url) as killed:
            until(lambda: one(data, "SELECT COUNT(*) FROM turns WHERE kind = 'main'") >= 3)
            killed.send_signal(signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
        answered = stored(tmp_path, "SELECT session, COUNT(*) FROM replies GROUP BY session")
        with track(request, tmp_path, harness, gateway.url) as second:
            assert second.wait(timeout=1200) == 0, (tmp_path / "log").read_text()
        until(lambda: one(data, "SELECT COUNT(*) FROM groups WHERE over = 1") == GROUPS)
        until(lambda: one(data, "SELECT COUNT(*) FROM turns WHERE state = 'queued'") == 0)
        assert gateway.stop() == 0
    told = stored(tmp_path, "SELECT session, score FROM episodes WHERE reported ORDER BY session")
    assert len(told) == SIZE * GROUPS
    assert None not in dict(told).values(), (tmp_path / "log").read_text()
    kept = read(
        data,
        "SELECT sessions.key, score FROM feedback JOIN sessions ON sessions.id = session_id "
        "WHERE final = 1 AND episode = 2 ORDER BY sessions.key",
    )
    assert [tuple(row) for row in kept] == told
    assert one(data, "SELECT COUNT(*) FROM steps WHERE status = 'committed'") >= 1
    trained = read(
        data,
        "SELECT sessions.key, COUNT(*) AS n FROM samples JOIN turns ON turns.id = turn_id "
        "JOIN sessions ON sessions.id = session_id WHERE state = 'trained' GROUP BY session_id",
    )
    replies = dict(stored(tmp_path, "SELECT session, COUNT(*) FROM replies GROUP BY session"))
    assert trained
    assert all(row["n"] <= replies[row["key"]] for row in trained), "each reply once"
    turns = read(
        data,
        "SELECT sessions.key, COUNT(*) AS n FROM turns JOIN sessions ON sessions.id = session_id "
        "WHERE kind = 'main' GROUP BY session_id",
    )
    asked = {row["key"]: row["n"] for row in turns}
    assert all(asked[session] == n for session, n in answered), "nobody is asked again"
    exams = stored(tmp_path, "SELECT version, COUNT(*) FROM exams GROUP BY version")
    assert [tries for _, tries in exams] == [2, 2]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "2 tasks, 4 tries each: 8 episodes" in report
    assert "| v0 | 2 |" in report


@pytest.mark.parametrize(
    ("taskset", "learns"),
    [
        ('"two_sides"', True),
        ('"with_tools"', True),
        ('{ id = "textarena", game = "Hangman-v0" }', False),  # the small model guesses no letter
    ],
    ids=["several turns and roles", "tools", "textarena"],
)
def test_what_a_task_set_declares_is_built_and_learned_from(
    request: pytest.FixtureRequest, tmp_path: Path, taskset: str, learns: bool
) -> None:
    words = tmp_path / "nltk" / "corpora" / "words"  # which textarena would fetch
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\nplum\nkite\nlamp\nrope\nstamp\nshell\n")
    data = tmp_path / "data"
    with life(data, *FLAGS) as gateway:
        assert gateway.serves()
        with track(request, tmp_path, "null", gateway.url, taskset=taskset) as playing:
            assert playing.wait(timeout=1200) == 0, (tmp_path / "log").read_text()
        until(lambda: one(data, "SELECT COUNT(*) FROM groups WHERE over = 1") == GROUPS)
        until(lambda: one(data, "SELECT COUNT(*) FROM turns WHERE state = 'queued'") == 0)
        assert gateway.stop() == 0
    log = (tmp_path / "log").read_text()
    told = stored(tmp_path, "SELECT score FROM episodes WHERE reported")
    assert len(told) == SIZE * GROUPS
    assert (None,) not in told, log
    steps = one(data, "SELECT COUNT(*) FROM steps WHERE status = 'committed'")
    assert (steps > 0) == learns
    turns = read(
        data,
        "SELECT sessions.key, kind, COUNT(*) AS n FROM turns "
        "JOIN sessions ON sessions.id = session_id GROUP BY session_id, kind",
    )
    main = {row["key"]: row["n"] for row in turns if row["kind"] == "main"}
    assert len(main) == SIZE * GROUPS, "one role trains"
    if "two_sides" in taskset:
        assert set(main.values()) == {3}
        persons = [row["n"] for row in turns if row["key"] in {f"{key}-person" for key in main}]
        assert persons == [2] * SIZE * GROUPS, "the other role asks the gateway, too"
        assert "waiting for the tool servers of two_sides" in log


def test_a_real_model_gets_no_shell_without_a_container(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with track(request, tmp_path, "bash", "http://127.0.0.1:1/v1", "Qwen/Qwen3-8B") as refused:
        assert refused.wait(timeout=300) == 1
    assert "say runtime = 'docker'" in (tmp_path / "log").read_text()


def test_tools_that_do_not_start_are_a_sentence(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with life(tmp_path / "data", *FLAGS) as gateway:
        assert gateway.serves()
        with track(request, tmp_path, "null", gateway.url, taskset='"torn_tools"') as refused:
            assert refused.wait(timeout=600) == 1
        assert gateway.stop() == 0
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("Stopped: The environment verifiers cannot start: ToolsetError: ")
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_as_many_episodes_as_cores_run_at_a_time(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each asks with an address of its own, so nothing else holds them back."""
    data, room = tmp_path / "data", {"taskset": '"short_answers"\nat_once = 1'}
    with life(data, *FLAGS) as gateway:
        assert gateway.serves()
        with track(request, tmp_path, "null", gateway.url, **room) as playing:
            assert playing.wait(timeout=600) == 0, (tmp_path / "log").read_text()
        assert gateway.stop() == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum("episodes of short_answers run at a time" in line for line in lines) == 1
    times = read(
        data,
        "SELECT sessions.key, MIN(turns.id) AS first, MAX(turns.id) AS last FROM turns "
        "JOIN sessions ON sessions.id = session_id WHERE kind = 'main' GROUP BY session_id "
        "ORDER BY first",
    )
    assert len(times) >= SIZE * GROUPS
    assert all(a["last"] < b["first"] for a, b in itertools.pairwise(times)), "one after the other"
