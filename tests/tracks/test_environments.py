"""The tracks' small worlds: tasks, tools, and grades."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.tracks import TrackError, environments, sandbox
from examples.tracks.screen import Screens
from examples.tracks.swe import Bug, Swe, repositories
from examples.tracks.terminal import Job, Terminal
from examples.tracks.tool_call import ToolCall, calculate
from examples.tracks.track import Track, read
from tests.house.test_floors import ROOT, imports, modules


def plain(seed: int = 0) -> Terminal:
    return Terminal(seed, None)


def test_tracks_import_nothing_of_the_product() -> None:
    """Neither do the modules beside the tracks that they import."""
    files = dict(modules())
    left = [name for name in files if name.startswith("examples.tracks")]
    assert len(left) > 5
    reached = set[str]()
    while left:
        name = left.pop()
        reached.add(name)
        targets = imports(name, files[name])
        assert not {t for t in targets if t.split(".")[0] in ("tinker_claw", "local_gpu")}, name
        left += [t for t in targets if t.startswith("examples") and t in files.keys() - reached]
    assert "examples.demo.server" in reached


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "tracks").glob("*.toml")), ids=str)
def test_shipped_tracks_are_tracks(file: Path) -> None:
    track = read(file, model="demo")
    assert track.environment == file.stem
    if track.environment in (
        "openenv",
        "verifiers",
    ):  # of third parties, which have their own tests
        return
    try:
        task = environments.environment(track).task(0)
    except TrackError as error:
        if track.environment != "gui":
            raise
        pytest.skip(str(error))
    if track.environment != "screen":  # one reply is all of an episode
        assert not isinstance(task, environments.Program)
        assert task.messages


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "environment"),
        ("environment = 'chess'\nsize = 1", "size"),
        ("environment = 'chess'\nsteps = '3'", "steps"),
        ("environment = 'chess'\ngroup_size = 0", "group_size"),
        ("environment = 'chess'\nurl = '127.0.0.1:30000/v1'", "url"),
        ("environment =", "TOML"),
    ],
)
def test_a_file_that_is_no_track_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "track.toml").write_text(text)
    with pytest.raises(TrackError, match=why):
        read(tmp_path / "track.toml")


def test_an_environment_that_is_not_there_is_named() -> None:
    with pytest.raises(TrackError, match=r"no environment 'chess'.*tool-call, terminal"):
        environments.environment(Track(environment="chess"))
    with pytest.raises(TrackError, match=r"needs verifiers, which is not installed here"):
        environments.environment(Track(environment="verifiers"))


@pytest.mark.parametrize("place", ["chess:Chess", "examples.tracks.terminal:Job"])
def test_an_environment_that_is_not_at_its_place_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setitem(environments.ENVIRONMENTS, "chess", place)
    with pytest.raises(TrackError, match=rf"chess \({place}\) cannot be loaded"):
        environments.environment(Track(environment="chess"))


def test_options_that_are_none_or_are_missing_are_named() -> None:
    track = Track(environment="openenv", options=(("url", "http://x"), ("reset", {})))
    assert environments.options(track, url=..., reset={}, low=0.0)["low"] == 0.0
    with pytest.raises(TrackError, match="reset is no option of openenv"):
        environments.options(track, url=...)
    with pytest.raises(TrackError, match="digit is no option of tool-call"):
        environments.environment(Track(environment="tool-call", options=(("digit", 1),)))
    with pytest.raises(TrackError, match="places"):
        environments.options(track, url=..., reset={}, places=...)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 + 4 * 5", "23"),
        ("-(7 - 9)", "2"),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: this is no expression"),
        ("__import__('os')", "error: this is no expression"),
        ("999999 * 9999999", "error: this is no expression"),
        ("True + 1", "error: this is no expression"),
        ("(" * 150 + "1" + ")" * 150, "error: an expression has at most"),
    ],
)
def test_calculator_works_out_numbers_and_nothing_else(expression: str, result: str) -> None:
    assert calculate(expression).startswith(result)


@pytest.mark.parametrize(
    ("make", "shows"),
    [
        (ToolCall, lambda task: task.expression),
        (lambda seed: Swe(seed, None), lambda task: task.repository.name),
        (Screens, lambda task: task.icons),
    ],
    ids=["tool-call", "swe", "screen"],
)
def test_tasks_are_drawn_from_the_seed_and_held_out_ones_are_others(make: Any, shows: Any) -> None:
    env, again, other = make(3), make(3), make(4)
    tasks, same, different, kept = (
        [shows(draw(number)) for number in range(100)]
        for draw in (env.task, again.task, other.task, env.held_out)
    )
    assert tasks == same != different
    assert not any(task in tasks for task in kept)


async def test_a_sum_is_solved_by_its_result_alone() -> None:
    task = ToolCall(seed=3).task(0)
    right = calculate(task.expression)
    async with task.attempt() as attempt:
        assert await attempt.call("calculator", {"expression": task.expression}) == right
        assert (await attempt.call("calculator", {"expression": 3})).startswith("error")
        assert (await attempt.call("browser", {})).startswith("error")
        assert await attempt.solved(f"{task.expression} = {right}")
        assert not await attempt.solved(f"{right}1")
        assert not await attempt.solved("I don't know.")


async def _done(job: Job, command: str) -> bool:
    async with job.attempt() as attempt:
        assert not await attempt.solved(""), f"{job.wish}: done before anything was"
        await attempt.call("shell", {"command": command})
        return await attempt.solved("Done.")


async def test_shell_says_what_came_of_a_command_and_ends_what_takes_too_long() -> None:
    async with plain().task(0).attempt() as attempt:
        assert await attempt.call("shell", {"command": "echo hi; echo there >&2"}) == "hi\nthere"
        assert await attempt.call("shell", {"command": "true"}) == "(it wrote nothing)"
        failed = await attempt.call("shell", {"command": "cat nothing"})
        assert failed.startswith("error: exit status 1\n")
        assert "nothing" in failed
        long = await attempt.call("shell", {"command": "yes | head -c 100000"})
        assert len(long) < 2100
        assert (await attempt.call("shell", {"command": 5})).startswith("error")
        longest = await attempt.call("shell", {"command": f": {'x' * 99_998}"})
        assert longest == "(it wrote nothing)"
        assert "at most" in await attempt.call("shell", {"command": f": {'x' * 200_000}"})
    async with replace(plain().task(0), limit_s=0.2).attempt() as attempt:
        assert (await attempt.call("shell", {"command": "sleep 100"})).startswith("error: it took")


async def test_a_link_to_what_is_wanted_is_not_what_was_wanted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("pear")
    job = Job("x", "Write pear into a.txt", {}, {"a.txt": "pear"}, None)
    assert not await _done(job, f"ln -s {tmp_path / 'elsewhere'} a.txt")
    assert await _done(job, "echo pear > a.txt")


def test_without_a_sandbox_only_the_shipped_models_have_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    track = Track(environment="terminal", model="Qwen/Qwen3-8B")
    with pytest.raises(TrackError, match=r"Qwen/Qwen3-8B types would run .* Install bubblewrap"):
        environments.environment(track)
    env = environments.environment(Track(environment="terminal", model="demo"))
    assert isinstance(env, Terminal)
    assert env.sandbox is None


async def test_each_process_of_a_command_has_its_limits(tmp_path: Path) -> None:
    limits = {"t": 10, "f": 20480, "v": 2097152, "d": 524288, "n": 256}
    ended = await sandbox.run(None, tmp_path, "; ".join(f"ulimit -{name}" for name in limits))
    assert [*map(int, ended.output.split())] == [*limits.values()]


async def test_folder_deeper_than_python_goes_is_no_solution_and_is_removed(tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(1100): os.mkdir('a'); os.chdir('a')"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        for task in (Bug(repositories()[0], 0, None), Job("x", "", {}, {"a.txt": "b"}, None)):
            async with task.attempt() as attempt:
                await attempt.call("shell", {"command": f'python3 -c "{deep}"'})
                assert os.listdir(attempt.path / "a" / "a") == ["a"]
                assert not await attempt.solved("")
            assert os.listdir(tmp_path) == []


async def test_file_that_nobody_may_read_or_reach_is_no_solution() -> None:
    far = "import os\nfor _ in range(20): os.mkdir('a' * 200); os.chdir('a' * 200)\n"
    async with Bug(repositories()[0], 0, None).attempt() as attempt:
        await attempt.call("shell", {"command": f"python3 -c \"{far}open('b' * 200, 'w')\""})
        assert not await attempt.solved("")
    job = Job("x", "", {"a.txt": "b"}, {"a.txt": "b", "c.txt": "d"}, None)
    for command in ("chmod 000 a.txt", "chmod 000 ."):
        assert not await _done(job, command)


def test_score_is_cut_to_an_outcome_and_none_if_it_is_no_number() -> None:
    scores = {0.25: 0.25, 7.0: 1.0, float("-inf"): -1.0, float("nan"): None}
    assert [*map(environments.outcome, scores)] == [*scores.values()]


@pytest.mark.parametrize("arguments", ["[" * 5000, r'{"command": "echo \ud83d"}', "[]"])
async def test_arguments_that_cannot_be_used_are_answered(arguments: str) -> None:
    async with plain().task(0).attempt() as attempt:
        call = {"id": "c", "function": {"name": "shell", "arguments": arguments}}
        said = await environments.result(call, attempt.call)
    assert "must be a JSON object" in said["content"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_in_the_sandbox_there_is_neither_a_network_nor_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    env = Terminal.of(Track(environment="terminal", model="Qwen/Qwen3-8B"))
    assert env.sandbox, "bubblewrap is there and does not work"
    async with env.task(0).attempt() as attempt:

        async def shell(command: str) -> str:
            return await attempt.call("shell", {"command": command})

        assert (await shell(f"cat {tmp_path / 'secret'}")).startswith("error")
        assert (await shell("ls /home /root /etc")).startswith("error")
        assert (await shell("touch /usr/x")).startswith("error")
        assert await shell("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo"
        assert await shell("ls /proc | grep -c '^[0-9]*$'") in ("2", "3", "4", "5", "6")
        assert await shell("echo here > a-file; cat a-file; pwd") == "here\n/work"
        assert (await shell("env")).count("\n") < 8


async def test_an_environment_that_cannot_start_says_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Torn(Terminal):
        @classmethod
        def of(cls, track: Track) -> Torn:
            return cls(0, None)

        async def __aenter__(self) -> Torn:
            raise ExceptionGroup("several", [ValueError("\nno server answers\n" + "line\n" * 100)])

        async def __aexit__(self, *what: object) -> None: ...

    monkeypatch.setattr("examples.tracks.terminal.Terminal", Torn)
    with pytest.raises(TrackError) as said:
        async with environments.prepared(Track("terminal")):
            pass
    assert str(said.value).endswith("terminal cannot start: ValueError: no server answers")
    traced = ValueError("no server: Traceback (most recent call last):\n  File x\nOSError: disk\n")
    assert environments.first_line(traced) == "ValueError: no server: OSError: disk"
