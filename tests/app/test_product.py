"""The product as a process with a port and a data directory, and its messages when it cannot
start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.clients import HELLO, ask, converse, learn
from tests.support.ledger import read
from tests.support.lives import ROOT, Life, product, refused, until
from tinker_claw.shipped import MODEL_DIR

TRAINED = "SELECT id FROM turns WHERE state = 'trained'"


def run(*flags: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *flags],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def listens(running: Life) -> bool:
    try:
        running.health()
    except httpx.TransportError:
        return False
    return True


@pytest.mark.slow
def test_it_learns_stops_in_order_and_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--learning-rate", "3e-3", "--lora-rank", "16")
    with product(data, *flags) as running:
        before = running.health()
        assert (before["status"], before["policy_version"], before["learner"]) == (
            "ok",
            0,
            "waiting",
        )
        learn(running, 1, range(0, 40))
        metrics = httpx.get(running.url.removesuffix("/v1") + "/metrics").text
        assert 'tinker_claw_steps_total{status="committed"} 1.0' in metrics
        page, turn = running.url.removesuffix("/v1") + "/ui", min(read(data, TRAINED))[0]
        assert "v1, 1 step from the base" in httpx.get(page).text
        shown = httpx.get(f"{page}/turns/{turn}").text
        assert re.search(r'class="(up|down)-[123]" title="[-+]', shown), "by its advantages"
        assert running.stop() == 0
    assert read(data, "SELECT COUNT(*) FROM turns WHERE state = 'trained'") == [(16,)]
    assert read(data, "SELECT COUNT(*) FROM step_samples") == [(16,)]
    log = running.log.read_text().lower()
    assert "turn.captured" in log
    assert "how many" not in log, "every problem asks that: logs carry no user text"
    (step,) = [json.loads(line) for line in (data / "metrics.jsonl").read_text().splitlines()]
    assert step["samples"] == 16
    assert step["fresh_tokens"] > 0
    assert step["agreement_k3"] < 1e-8, "trainer and sampler agree on the sampled tokens"

    with product(data, *flags) as running:
        resumed = running.health()
        assert resumed["policy_version"] == 1
        learn(running, 2, range(100, 140))
        assert running.stop() == 0
    assert [event["event"] for event in running.events()].count("resumed") == 1
    assert read(data, "SELECT id, parent, step FROM versions") == [
        (0, None, 0),
        (1, 0, 1),
        (2, 1, 2),
    ]


@pytest.mark.slow
def test_dead_learner_leaves_the_gateway_answering_and_says_why(tmp_path: Path) -> None:
    data = tmp_path / "data"
    adapters, aside = data / "adapters", data / "aside"
    with product(data, "--batch-size", "4") as running:
        adapters.rename(aside)
        adapters.write_text("no folder: nothing can be published")
        seed = 0
        while (health := running.health())["learner"] != "failed":
            converse(running, seed)
            seed += 1
            assert seed < 60, health
        assert health["status"] == "degraded"
        assert "adapters" in health["last_error"]
        assert ask(running, "after", [HELLO])
        assert running.stop() == 0
    assert read(data, "SELECT COUNT(*) FROM turns WHERE state = 'trained'") == [(0,)]

    adapters.unlink()
    aside.rename(adapters)
    with product(data, "--batch-size", "4") as running:
        learn(running, 1, range(500, 540))
        assert running.stop() == 0


@pytest.mark.slow
def test_judge_that_is_away_is_shown_and_its_turns_are_judged_later(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data, "--judge-url", "http://127.0.0.1:9/v1") as running:
        converse(running, 0)
        deadline = time.monotonic() + 240
        while running.health()["judge"] != "failing":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        health = running.health()
        assert (health["status"], health["learner"]) == ("degraded", "waiting")
        assert "127.0.0.1:9" in health["last_error"]
        assert ask(running, "after", [HELLO])
        assert running.stop() == 0
    assert read(data, "SELECT COUNT(*) FROM verdicts") == [(0,)]
    with product(data) as running:
        deadline = time.monotonic() + 240
        while read(data, "SELECT COUNT(*) FROM verdicts") != [(2,)]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert running.stop() == 0


@pytest.mark.slow
def test_ctrl_c_while_the_model_loads_is_quiet(tmp_path: Path) -> None:
    command = [sys.executable, "run.py", "--model-name", "demo", "--backend", "local"]
    command += ["--port", "0", "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "data" / "ledger.sqlite3").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "Traceback" not in said


@pytest.mark.slow
def test_gateway_answers_while_a_step_runs(tmp_path: Path) -> None:
    with product(tmp_path / "data", "--batch-size", "4") as running:
        versions, states, deadline = set[int](), set[str](), time.monotonic() + 240
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(converse, running, i) for i in range(12)]
            while max(versions, default=0) < 1 or not all(future.done() for future in futures):
                assert time.monotonic() < deadline, "it has learned meanwhile"
                health = running.health()
                versions.add(health["policy_version"])
                states.add(health["learner"])
                time.sleep(0.05)
            for future in futures:
                future.result()
        assert "training" in states


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--backend", "tinker", "--model-name", "Qwen/Qwen3-8B"),
            "TINKER_API_KEY is not set: make one at https://tinker-console.thinkingmachines.ai",
        ),
        (("--config", "nowhere.toml"), "--config nowhere.toml cannot be read"),
        (("--port", "70000"), "--port '70000'"),
        (
            ("--model-name", "/nowhere/model"),
            "--model-name /nowhere/model: there is no such folder",
        ),
        (("--host", "0.0.0.0"), "set TINKER_CLAW_GATEWAY__API_KEY"),
        (
            ("--report-to", "wandb"),
            "--report-to wandb needs a package that is not installed: pip install",
        ),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence(
    flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    assert says in refused(tmp_path / "data", *flags)
    assert not (tmp_path / "data").exists(), "nothing was made"


@pytest.mark.slow  # test_stop has it over a step
def test_second_ctrl_c_ends_at_once_and_loses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data, constants={"tinker_claw.gateway.respond:KEEPALIVE_S": 0.2}) as running:
        ask(running, "a", [HELLO])
        slow = {"role": "user", "content": "a long letter " * 12_000}
        body = {"model": "demo", "messages": [slow], "stream": True}
        url = f"{running.url}/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=240) as answer:
            lines = answer.iter_lines()
            next(lines)  # it is in flight
            running.signal(signal.SIGINT)
            until(lambda: not listens(running))
            assert running.ended is None, "the reply in flight may go on"
            running.signal(signal.SIGINT)
            assert running.ends(120) == 130, "not because a reply was cut off"
            with pytest.raises(httpx.TransportError):
                list(lines)
    assert read(data, "SELECT COUNT(*) FROM turns") == [(1,)]
    assert read(data, "PRAGMA integrity_check") == [("ok",)]


def test_hub_model_without_a_network_is_one_sentence(tmp_path: Path) -> None:
    done = run(
        "--model-name",
        "Qwen/Qwen3-8B",
        "--backend",
        "local",
        "--port",
        "0",
        "--device",
        "cpu",
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "cache"),
    )
    assert done.returncode == 2
    tried, failed = done.stderr.split("--model-name Qwen/Qwen3-8B cannot be downloaded from the Hu")
    assert '"event": "model.download"' in tried, "it is named before"
    assert "gging Face" in failed
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path / "data", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in said


def test_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "cannot be written" in refused(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_damaged_model_folder_is_named(tmp_path: Path) -> None:
    model = tmp_path / "models" / "mine"
    shutil.copytree(MODEL_DIR, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = run(
        "--model-name",
        str(model),
        "--renderer",
        "qwen3",
        "--backend",
        "local",
        "--port",
        "0",
        "--data-dir",
        str(tmp_path / "data"),
    )
    assert done.returncode == 2
    assert str(model) in done.stderr
    assert "Traceback" not in done.stderr
