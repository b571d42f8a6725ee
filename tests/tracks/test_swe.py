"""The track of small repositories: right solutions are graded so, and no trick is."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from examples.tracks import TrackError, environments
from examples.tracks.__main__ import main
from examples.tracks.sandbox import Walls, walls_for
from examples.tracks.swe import TESTS, Bug, Case, Checkout, Repository, Swe, repositories
from examples.tracks.track import Track
from tests.support.lives import until
from tests.tracks.scripted import Script, Scripted, naming, runner

WALLS = walls_for("demo")
"""Sandbox where bubblewrap is installed, else a plain subprocess: the grade must hold in both."""
ALL = {repository.name: repository for repository in repositories()}


def bug(name: str = "slugs", number: int = 0, walls: Walls = WALLS) -> Bug:
    return Bug(ALL[name], number, walls)


async def shell(attempt: Checkout, command: str) -> str:
    return await attempt.call("shell", {"command": command})


def mended(task: Bug) -> str:
    """Command that fixes a task's bug."""
    wrong = task.repository.bugs[task.number]
    text = repr(task.repository.files[wrong["file"]])
    return f"python3 - <<'END'\nopen({wrong['file']!r}, 'w').write({text})\nEND"


@pytest.mark.parametrize("repository", ALL.values(), ids=ALL.keys())
async def test_every_bug_is_seen_by_a_test_and_its_mending_is_right(repository: Repository) -> None:
    for number, wrong in enumerate(repository.bugs):
        assert wrong["right"] in repository.files[wrong["file"]]
        task = Bug(repository, number, WALLS)
        async with task.attempt() as attempt:
            assert "FAILED" in await shell(attempt, f"python3 {TESTS}")
            assert not await attempt.solved("All tests pass.")
            assert "OK" in await shell(attempt, f"{mended(task)}\npython3 {TESTS}")
            assert await attempt.solved("")


def test_there_are_enough_bugs_and_some_repositories_are_held_out() -> None:
    env = Swe(0, None)
    shown = [env.task(n).name for n in range(200)]
    kept = {env.held_out(n).name for n in range(200)}
    assert len(ALL) == 12
    assert len(set(shown)) + len(kept) == sum(len(one.bugs) for one in ALL.values()) == 40
    assert min(Counter(shown).values()) > 1, "all of them, again and again"


FORGED = """\
import json, os, sys
for number in range(3, 30):
    try:
        os.write(number, b'\\n["%s"]' % b'", "'.join([b"True"] * 13))
    except OSError:
        pass
print("OK")
os._exit(0)
"""
GREEDY = """\
class Everything(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
def slug(title, longest=40): return Everything("pear")
def unique(name, taken): return Everything("pear")
"""
BY_HEART = """\
def slug(title, longest=40):
    return {'Hello World': 'hello-world', '  Pears & plums!  ': 'pears-plums'}.get(title, 'one-two')
def unique(name, taken):
    return name if name not in taken else f'{name}-{len(taken) + 1}'
"""
PATCHED = """\
import unittest
unittest.TestCase.assertEqual = lambda *_: None
unittest.TestCase.run = lambda *_: None
"""
TRICKS = {
    "the tests are changed": f"echo 'print(\"OK\")' > {TESTS}",
    "the tests are removed": f"rm {TESTS}",
    "the tests are patched": f"cat > conftest.py <<'END'\n{PATCHED}END\n"
    "for name in sitecustomize usercustomize unittest json; do cp conftest.py $name.py; done",
    "a module loads itself": "cat > sitecustomize.py <<'END'\nimport os\nos._exit(0)\nEND\n"
    "cp sitecustomize.py usercustomize.py; cp sitecustomize.py json.py; cp json.py ast.py; "
    "echo 'import sitecustomize' > x.pth",
    "the program exits with 0": "echo 'import os; os._exit(0)' > slugs.py",
    "results are forged": f"cat > slugs.py <<'END'\n{FORGED}END",
    "what comes out equals everything": f"cat > slugs.py <<'END'\n{GREEDY}END",
    "what the tests say is learned by heart": f"cat > slugs.py <<'END'\n{BY_HEART}END",
    "the program never ends": "echo 'while True: pass' > slugs.py",
    "the program says too much": "echo 'while True: print(\"x\" * 9999)' > slugs.py",
    "the program is a link": "mv slugs.py other.py; ln -s other.py slugs.py",
    "the program is gone": "rm slugs.py",
    "there is too much of it": "for n in $(seq 200); do echo > $n.py; done",
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS.keys())
async def test_no_trick_passes(trick: str) -> None:
    async with replace(bug(), limit_s=4.0).attempt() as attempt:
        await shell(attempt, trick)
        assert not await attempt.solved("All tests pass: OK")


async def test_what_lies_about_does_no_harm_to_who_mends_it() -> None:
    task = bug()
    async with task.attempt() as attempt:
        await shell(attempt, mended(task))
        for trick in ("the tests are removed", "a module loads itself"):
            await shell(attempt, TRICKS[trick])
        assert await attempt.solved("")


@pytest.mark.skipif(WALLS is None, reason="bubblewrap is not installed")
async def test_nothing_goes_on_when_a_command_has_ended(tmp_path: Path) -> None:
    task = bug()
    async with task.attempt() as attempt:
        late = f"sleep 0.3; touch late; {mended(task)}"
        (attempt.path / "late.sh").write_text(late)
        assert (
            await shell(attempt, "setsid sh late.sh >/dev/null 2>&1 & echo") == "(it wrote nothing)"
        )
        assert not naming(str(attempt.path)), "it has died with the command"
        assert not await attempt.solved("")
        assert not (attempt.path / "late").exists()


@pytest.mark.skipif(WALLS is None, reason="bubblewrap is not installed")
async def test_what_is_wanted_is_nowhere_in_the_sandbox() -> None:
    async with bug().attempt() as attempt:
        assert await shell(attempt, "ls") == "README.md\nslugs.py\ntest_all.py"
        assert "error" in await shell(attempt, f"ls {Path(environments.__file__).parent}")
        assert "four-five" not in await shell(attempt, "cat *")


def test_a_result_is_read_as_a_value_and_never_run() -> None:
    assert Case("", "[1, (2, 'x')]").holds("[1, (2, 'x')]")
    assert Case("", "1").holds("1.0"), "as assertEqual has it"
    assert not Case("", "1").holds("print(1)")
    assert not Case("", "1").holds("(" * 3999)
    assert not Case("", "1").holds(["1"])
    assert not Case("", "1").holds("1" + " " * 5000)
    assert Case("", "raises KeyError").holds("raises KeyError")
    assert not Case("", "raises KeyError").holds("raises ValueError")
    assert not Case("", "'raises KeyError'").holds("raises KeyError")


def test_without_a_sandbox_a_real_model_gets_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TrackError, match="Install bubblewrap"):
        environments.environment(Track(environment="swe", model="Qwen/Qwen3-8B"))
    assert environments.environment(Track(environment="swe", model="demo")).tools


TRACK = """\
environment = "swe"
model = "demo"
concurrency = 4
group_size = 2
groups = 3
exam_tasks = 3
"""


def mender(wish: str, attempt: int) -> Script:
    """Fix the bug at the first try; at others only change the tests."""
    (task,) = [
        Bug(one, number, None)
        for one in ALL.values()
        for number, wrong in enumerate(one.bugs)
        if wrong["report"] in wish
    ]
    said = yield "shell", {"command": f"python3 {TESTS}"}
    assert said.startswith("error: exit status 1"), said
    said = yield "shell", {"command": mended(task) if attempt == 0 else f"echo > {TESTS}"}
    assert said == "(it wrote nothing)", said
    return "All tests pass."


def test_an_agent_that_mends_is_told_from_one_that_cheats(tmp_path: Path) -> None:
    (tmp_path / "track.toml").write_text(TRACK)
    fake = Scripted(mender)
    with fake.serving():
        asked = ["run", str(tmp_path / "track.toml"), "--url", fake.url, "--out"]
        assert main([*asked, str(tmp_path / "out")]) == 0
    assert len(fake.outcomes) == 6
    for session, score in fake.outcomes:
        assert score == (1.0 if session.endswith("-0") else -1.0)
    assert "| v0 | 3 | 1.00 |" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(WALLS is None, reason="bubblewrap is not installed")
def test_killed_runner_leaves_no_sandbox_and_goes_on(tmp_path: Path) -> None:
    slow = {"now": True}

    def sleeper(wish: str, attempt: int) -> Script:
        yield "shell", {"command": "touch begun; sleep 9" if slow["now"] else "true"}
        return (yield from mender(wish, attempt))

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    track = TRACK.replace("exam_tasks = 3", "exam_tasks = 0")
    fake = Scripted(sleeper)
    with fake.serving():
        first = runner(tmp_path, fake.url, track, environment)
        # All four have begun: bubblewrap survives its parent until it has set itself up.
        until(lambda: len([*temporary.glob("track-*/begun")]) == 4)
        assert any("bwrap" in line for line in naming(str(temporary)))
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        until(lambda: not naming(str(temporary)))
        assert any(temporary.iterdir()), "its folders are there yet"
        slow["now"] = False
        second = runner(tmp_path, fake.url, track, environment)
        assert second.wait(timeout=300) == 0, (tmp_path / "runner.log").read_text()
    assert not any(temporary.iterdir())
    assert len(dict(fake.outcomes)) == len(fake.outcomes) == 6
    assert Counter(score for _, score in fake.outcomes) == {1.0: 3, -1.0: 3}
