"""Plug-ins of an installed package: one file and one entry each, and no fork.

The package lies in a folder beside this file, as an installer leaves it; a path is all that is set.
(Not beside it: pytest puts the folders of tests on the path.)
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.demo.options import parse as demo_flags
from examples.personalize.__main__ import main as personalize
from examples.personalize.experiment import TINY, load
from examples.tracks import TrackError, environments
from examples.tracks.track import Track
from tests.support.clients import HELLO, learn
from tests.support.gateways import MODEL, World, gateway
from tests.support.lives import ROOT, product, until
from tests.support.stories import Told, run
from tinker_claw import plugins
from tinker_claw.errors import ConfigError
from tinker_claw.formats import spoken
from tinker_claw.formats.chat import Chat
from tinker_claw.methods import build
from tinker_claw.render.renderer import Renderer
from tinker_claw.sinks.base import check_installed
from tinker_claw.turn_state import Reason
from tinker_claw.types import NextState

CALLING = '<think>hm</think>Let me see.\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
HERE = Path(__file__).parent / "installed"
INSTALLED = {"PYTHONPATH": str(HERE)}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_is_told_all_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"no method 'sft'; choose combine, .*, sdft, nudge, running-mean$"
    ):
        build("sft")
    with pytest.raises(ConfigError, match=r"no sink 'visdom'; choose tensorboard, wandb, csv$"):
        check_installed(("csv", "visdom"))


@pytest.mark.parametrize("value", ["tinker_claw.methods:OPD", "tinker_claw.methods:build"])
def test_a_plug_in_that_is_not_the_method_of_its_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    entry = plugins.EntryPoint("mine", value, "tinker_claw.methods")
    monkeypatch.setattr(plugins, "added", lambda kind: {"mine": entry})
    with pytest.raises(ConfigError, match=r"the plug-in mine is not a Method of that name"):
        build("mine")


def lay(folder: Path, name: str, source: str, *entries: str) -> None:
    """Leave a package of one module in a folder, as an installer does; `entries`: KIND NAME=OBJECT
    of its entry points."""
    (folder / f"{name}.py").write_text(source)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    said = [re.sub(r"^(\w+) ", r"[tinker_claw.\1s]\n", entry) + "\n" for entry in entries]
    (about / "entry_points.txt").write_text("".join(said))


FORMAT = """
from tinker_claw.formats.base import WireFormat
class Half(WireFormat):
    about, routes = "half", ()
    def parse(self, body, route, user): ...
class Bare(Half):
    def reply(self, request, head): ...
    def error(self, error): ...
class Other: ...
"""


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("Half", "abstract methods error, reply"),
        ("Bare", "`routes`"),
        ("Other", "under WireFormat"),
        ("Nothing", "no attribute"),
    ],
)
def test_a_format_that_no_request_could_use_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, why: str
) -> None:
    lay(tmp_path, f"claw_{which.lower()}", FORMAT, f"format mine=claw_{which.lower()}:{which}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"mine \(claw_\w+:{which}\) cannot be loaded: .*{why}"):
        spoken()


def test_two_packages_with_one_name_are_refused_by_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("claw_one", "claw_two"):
        lay(tmp_path, name, "", *(f"{kind} mine={name}:X" for kind in plugins.KINDS))
    monkeypatch.syspath_prepend(tmp_path)
    for find in (build, lambda name: check_installed((name,)), lambda _: spoken()):
        with pytest.raises(ConfigError, match=r"two packages add a \w+ 'mine', claw_\w+:X and"):
            find("mine")
    with pytest.raises(TrackError, match=r"Two packages add an environment 'mine': claw_"):
        environments.environment(Track(environment="mine"))
    for parse in (demo_flags, personalize):
        with pytest.raises(SystemExit, match="two packages add a method 'mine', claw_"):
            parse([])


def test_doctor_tells_of_each_kind_and_of_a_format_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plug_ins(*flags: str) -> str:
        where = ("--backend", "local", "--model-name", "demo", "--data-dir", str(tmp_path / "data"))
        report = run("doctor", *where, *flags).stdout
        (line,) = re.findall(r"^(.*\bplugins .*)$", report, re.MULTILINE)
        return line

    monkeypatch.syspath_prepend(HERE)
    assert "sink csv; environment doubles" in plug_ins("--report-to", "csv")
    monkeypatch.syspath_prepend(tmp_path)
    lay(tmp_path, "claw_broken", "", "format broken=claw_broken:No")
    line = plug_ins()
    assert line.startswith("FAIL ")
    assert "the plug-in broken (claw_broken:No) cannot be loaded" in line


@pytest.mark.usefixtures("installed")
def test_the_demo_and_the_experiment_take_an_installed_method(tmp_path: Path) -> None:
    assert demo_flags(["--method", "nudge", "--out", str(tmp_path)]).method == "nudge"
    assert load(TINY, methods=("running-mean",)).methods == ("running-mean",)


def figures(data: Path) -> dict[tuple[int, str], float]:
    """Figures in the CSV sink, each once."""
    with (data / "sinks" / "steps.csv").open(newline="") as file:
        rows = [(int(step), name, float(value)) for step, name, value in csv.reader(file)]
    found = {(step, name): value for step, name, value in rows}
    assert len(found) == len(rows)
    return found


def test_a_sink_without_a_package_gets_every_step_once(tmp_path: Path) -> None:
    told = Told(tmp_path)
    for name in ("a", "b"):
        told.step(told.sampled(name, 1)[1])
        subprocess.run(
            [sys.executable, "-m", "tinker_claw.sinks.follow", "csv", str(tmp_path)],
            cwd=ROOT,
            env=os.environ | INSTALLED,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    found = figures(tmp_path)
    assert {step for step, _ in found} == {1, 2}
    assert found[2, "step/version"] == 2.0
    told.ledger.close()


@pytest.mark.usefixtures("installed")
async def test_ollamas_users_are_answered(world: World) -> None:
    url = world.url.removesuffix("/v1")
    assert (await world.http.get(f"{url}/api/tags")).json()["models"][0]["name"] == MODEL
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "look"}], "tools": tools}
    world.say(CALLING, "Two files.", "fine")
    streamed = await world.http.post(f"{url}/api/chat", content=json.dumps(asked))
    assert "content-type" not in streamed.request.headers
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    *pieces, last = map(json.loads, streamed.text.splitlines())
    said = "".join(piece["message"]["content"] for piece in pieces)
    assert said.strip() == "Let me see."
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["eval_count"] == len(world.turns()[0].completion.tokens)

    calls = pieces[-1]["message"]["tool_calls"]
    assert calls == [{"function": {"name": "ls", "arguments": {}}}]
    asked["messages"] += [
        {"role": "assistant", "content": said, "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "ls", "content": "a b"},
    ]
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says
    body = json.dumps(asked | {"stream": False})
    whole = await world.http.post(f"{url}/api/chat", content=body, headers=form)
    assert whole.json()["message"] == {"role": "assistant", "content": "Two files."}
    assert len({turn.session_id for turn in world.turns()}) == 1
    assert world.next_states()[1] == NextState("tool", "[result 1 of 1, ls]\na b")

    page = form | {"origin": "http://evil.example"}
    refused = await world.http.post(f"{url}/api/chat", content=body, headers=page)
    assert (refused.status_code, "Origin" in refused.json()["error"]) == (403, True)
    told = await world.http.post(f"{url}/api/chat", json=asked | {"loudness": 11})
    assert told.json() == {"error": "loudness is not a field that this server knows."}
    for path in ("/chat/completions", "/messages"):
        assert (await world.http.post(path, content=body, headers=form)).status_code == 415


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("failing", ["begin", "deltas", "end", "whole"])
async def test_a_writer_that_fails_is_an_error_of_its_format_and_loses_no_turn(
    tmp_path: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
) -> None:
    ollama, words = import_module("claw_extras.ollama"), "my secret"

    def blot(lines: Any, *given: Any) -> Any:
        raise KeyError(words)

    monkeypatch.setattr(ollama.Lines, failing, blot)
    async with gateway(tmp_path, renderer, formats=(Chat(), ollama.Ollama())) as world:
        world.say("fine and dandy")
        asked = {"model": MODEL, "messages": [HELLO], "stream": failing != "whole"}
        answer = await world.http.post(f"{world.url.removesuffix('/v1')}/api/chat", json=asked)
        assert answer.status_code == (500 if failing == "whole" else 200)
        *_, last = answer.text.splitlines()
        assert json.loads(last) == {"error": "The server failed; its log says why."}
        logged = capsys.readouterr().out
        assert "test_plugins.py" in logged, "where it failed"
        assert words not in logged, "an error may quote a user's words"
        reasons = {"begin": [], "deltas": [Reason.BROKE_OFF]}
        assert world.column("reason") == reasons.get(failing, [None])
        assert (await world.ask("still here?")).status_code == 200


@pytest.mark.usefixtures("installed")
async def test_a_track_has_its_environment() -> None:
    with pytest.raises(TrackError, match=r"no environment 'chess'; .*, verifiers, doubles\.$"):
        environments.environment(Track(environment="chess"))
    async with environments.prepared(Track(environment="doubles")) as doubles:
        task = doubles.task(7)
        assert not isinstance(task, environments.Program)
        async with task.attempt() as attempt:
            assert await attempt.solved("It is 14.")


@pytest.mark.slow
def test_a_real_run_uses_method_format_and_sink(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--method", "nudge", "--report-to", "csv", "--batch-size", "4")
    with product(data, *flags, env=INSTALLED, python=sys.executable) as running:
        learn(running, 1, range(0, 40))
        asked = {"model": "demo", "messages": [HELLO], "stream": False}
        told = httpx.post(running.url.removesuffix("/v1") + "/api/chat", json=asked, timeout=240)
        assert told.json()["done"]
        until(lambda: (data / "sinks" / "steps.csv").exists())  # trackers are told beside the steps
        # Not the step's number: a batch of rejections alone is void.
        until(lambda: ("step/version", 1.0) in {(n, v) for (_, n), v in figures(data).items()})
        assert running.stop() == 0
