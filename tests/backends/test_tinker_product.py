"""The product on a laptop, its weights on another machine: real processes, real SDK, real HTTP."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients import HELLO, ask, learn
from tests.support.ledger import read
from tests.support.lives import ROOT, product, until
from tests.support.tinker import WireProcess, served, wire_process
from tests.support.tinker_dialects import Delisted

pytestmark = pytest.mark.slow
ENV = {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
FLAGS = ("--learning-rate", "3e-3", "--lora-rank", "16")
PRICES = """
as_of = 2026-11-01
[models.demo]
prefill = 1.0
cached = 0.2
sample = 2.0
train = 3.0
"""


def remote(box: WireProcess) -> tuple[str, ...]:
    return ("--backend", "tinker", "--base-url", box.url, *FLAGS)


def port_of(box: WireProcess) -> int:
    return int(box.url.rsplit(":", 1)[1])


def test_laptop_learns_on_the_box_pays_and_survives_both_ends(tmp_path: Path) -> None:
    data, boxes = tmp_path / "data", tmp_path / "box"
    (tmp_path / "prices.toml").write_text(PRICES)
    priced = ("--prices", str(tmp_path / "prices.toml"))
    with wire_process(boxes) as box:
        with product(data, *priced, env=ENV, backend=remote(box)) as running:
            assert running.health()["status"] == "ok"
            learn(running, 1, range(0, 40))
            health = running.health()
            assert health["spent_usd"] > 0
            assert running.stop() == 0
        assert read(data, "SELECT COUNT(*) FROM turns WHERE state = 'trained'") == [(16,)]
        spent = dict(read(data, "SELECT purpose, SUM(usd) FROM spend GROUP BY purpose"))
        assert spent.keys() >= {"serve", "teacher", "train"}
        assert sum(spent.values()) == pytest.approx(health["spent_usd"], rel=0.2)

        quick = {"tinker_claw.gateway.respond:KEEPALIVE_S": 0.5}
        with (
            product(data, *priced, constants=quick, env=ENV, backend=remote(box)) as running,
            ThreadPoolExecutor(1) as pool,
        ):
            assert running.health()["policy_version"] == 1
            assert running.health()["spent_usd"] >= sum(spent.values()) * 0.999
            box.process.send_signal(signal.SIGKILL)
            box.process.wait()
            waiting = pool.submit(deltas, running.url)
            time.sleep(3)
            assert not waiting.done()
            with wire_process(boxes, port=port_of(box)) as second:
                assert second.url == box.url
                told = waiting.result(timeout=240)
                assert told.count({}) >= 4, "it was kept alive"
                assert "".join(delta.get("content", "") for delta in told), "and then answered"
                assert ask(running, "after", [HELLO]), "the same version, in a new session"
                learn(running, 2, range(100, 160))
                assert running.health()["status"] == "ok"
                assert running.stop() == 0
    assert read(data, "SELECT id, parent, step FROM versions") == [
        (0, None, 0),
        (1, 0, 1),
        (2, 1, 2),
    ]
    assert "Traceback" not in running.log.read_text()


def deltas(url: str) -> list[dict[str, Any]]:
    """Deltas of a streamed reply, keep-alives included."""
    body = {"model": "demo", "messages": [HELLO], "max_tokens": 20, "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=240) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["delta"] for event in events]


def without_torch(folder: Path) -> str:
    """An environment with everything that is installed here except torch and what depends on it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    left_out = ("torch", "functorch", "peft", "accelerate")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(left_out):
            (site / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def test_gateway_runs_on_a_laptop_without_torch(tmp_path: Path) -> None:
    python = without_torch(tmp_path / "laptop")
    absent = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in absent.stderr
    with (
        wire_process(tmp_path / "box") as box,
        product(tmp_path / "data", env=ENV, backend=remote(box), python=python) as running,
    ):
        learn(running, 1, range(0, 40))
        assert running.stop() == 0
    assert read(tmp_path / "data", "SELECT step FROM versions") == [(0,), (1,)]


def test_the_local_backend_without_torch_says_how_to_get_it(tmp_path: Path) -> None:
    python = without_torch(tmp_path / "laptop")
    local = ("run.py", "--backend", "local", "--model-name", "demo")
    demo = ("run.py", "demo", "--fast")
    for command, extras in (
        ((*local, "--port", "0"), "local"),
        (("-m", "local_gpu.tinker", "--port", "0"), "local"),
        (demo, "local,demo"),
    ):
        done = subprocess.run(
            [python, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2
        assert f"needs torch, peft: pip install -c constraints.txt -e '.[{extras}]'" in done.stderr
        assert "Traceback" not in done.stderr


def command(*words: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TINKER_API_KEY"} | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with wire_process(tmp_path / "box") as box:
        words = ("doctor", "--port", "0", "--data-dir", str(data), "--model-name", "demo")
        words += ("--backend", "tinker", "--base-url", box.url)
        code, said = command(*words, **ENV)
        assert code == 0, said
        assert "FAIL" not in said
        assert "takes the key and has the model" in said
        assert "can do all of combine" in said
        assert not list((tmp_path / "box").glob("*/*/*"))
        code, said = command(*words)
        assert code == 1
        assert "FAIL backend    TINKER_API_KEY is not set" in said
        assert "-    method     skipped: needs backend" in said
    assert not data.exists(), "it leaves nothing behind"


def test_start_without_the_model_in_the_line_up_serves_what_it_can_and_offers_the_export(
    tmp_path: Path,
) -> None:
    data, line_up = tmp_path / "data", Delisted()
    there = served(
        tmp_path,
        speaking=line_up,
        model="demo",
        name="demo",
        root=tmp_path / "box",
    )
    flags = ("--backend", "tinker", "--base-url", there.url, *FLAGS)

    with product(data, env=ENV, backend=flags) as running:
        assert running.stop() == 0
    line_up.gone, line_up.refuses = True, {"base"}
    there.restart()
    with product(data, env=ENV, backend=flags) as running:
        health = running.health()
        assert ask(running, "after", [HELLO])
        assert running.health()["serving"] == "ok", "by the newest version"
        said = health["learner_error"]
        assert f"{there.url} does not train demo any more: learning has ended" in said
        told = [event for event in running.events() if event["event"] == "part.failed"]
        assert [(event["part"], "exception" in event) for event in told] == [("learning", False)]
        code, shown = command("status", "--data-dir", str(data))
        assert code == 1, "it is degraded"
        assert "does not train demo any more" in shown
        assert running.stop() == 0
    export = said.partition("`")[2].partition("`")[0].removeprefix("tinker-claw ")
    folder = tmp_path / "adapter"
    code, shown = command(*shlex.split(export.replace("FOLDER", str(folder))), **ENV)
    assert code == 0, shown
    assert f"The adapter of v0 is in {folder}." in shown
    assert (folder / "adapter_model.safetensors").stat().st_size > 0
    line_up.refuses = {"training", "weights"}
    there.restart()
    code, shown = command("doctor", "--model-name", "demo", "--data-dir", str(data), *flags, **ENV)
    assert code == 0, shown
    assert "takes the key, and does not train the model any more" in shown
    with product(data, env=ENV, backend=flags) as running:
        assert ask(running, "base", [HELLO])
        health = running.health()
        assert (health["serving"], health["answered_by"]) == ("replaced", "the base model")
        assert "published anew" not in health["meaning"]
        assert running.stop() == 0


def asked(port: int) -> bool:
    """Whether a connection to this port is open: the system accepts it, whoever listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(there.endswith(f":{port:04X}") and state == "01" for _, _, there, state, *_ in lines)


def test_ctrl_c_while_the_service_hangs_ends_at_once(tmp_path: Path) -> None:
    with wire_process(tmp_path / "box") as box:
        command = [sys.executable, "run.py", "--model-name", "demo", *remote(box), "--port", "0"]
        box.process.send_signal(signal.SIGSTOP)
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path / "data")],
            cwd=ROOT,
            env=os.environ | ENV,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: asked(port_of(box)), "it does not ask the service")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)
        box.process.send_signal(signal.SIGCONT)
    assert process.returncode in (0, 2, 130)
    assert "nothing came back" not in said, "it was not waited for"
    assert "cannot be reached" not in said
    assert "Traceback" not in said
