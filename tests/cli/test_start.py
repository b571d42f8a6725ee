"""`tinker-claw` without arguments on a real terminal: its questions, files and starts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.lives import ROOT
from tests.support.ports import free_port
from tests.support.terminals import Terminal, on_a_terminal
from tests.support.tinker import wire_process
from tests.support.tinker_dialects import answering
from tinker_claw.shipped import MODEL_DIR

KEY = "tml-a-key-that-nobody-shall-read"
MODEL = "Qwen/Qwen3-8B"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "crab-\N{CRAB}"
    (home / "bin").mkdir(parents=True)
    return home


def environment(home: Path, **more: str) -> dict[str, str]:
    """A newcomer's environment, whose hub is a folder in their home."""
    left_out = ("TINKER_", "OPENCLAW_", "XDG_", "HF_", "PYTHONPATH", "CI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    kept["TINKER_CLAW_GATEWAY__API_KEY"] = "none"
    own = {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    own["PATH"] = f"{home / 'bin'}:/usr/bin:/bin"
    return {**kept, **own, "TINKER_TELEMETRY": "0", **more}


@contextmanager
def started(home: Path, **more: str) -> Iterator[Terminal]:
    command = [sys.executable, ROOT / "run.py"]
    with on_a_terminal(command, home, environment(home, **more)) as terminal:
        yield terminal


def service() -> AbstractContextManager[str]:
    """A service that accepts every key that begins with tml-a, and lists no model."""
    return answering(
        lambda key: (200, {"supported_models": []}) if key[:5] == "tml-a" else (401, {})
    )


def files(home: Path) -> Mapping[str, str]:
    """Files by path, without those that the hub and the shell's programs keep there."""
    found = (path for path in home.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {str(path.relative_to(home)): path.read_text(errors="replace") for path in found}


@pytest.mark.parametrize(
    "answered",
    [(), ("1",), ("2", "1", "1")],
    ids=["where", "model", "a key, after GPUs that are not there"],
)
def test_ctrl_c_at_any_question_leaves_nothing(home: Path, answered: tuple[str, ...]) -> None:
    before = files(home)
    with service() as url, started(home, TINKER_BASE_URL=url) as seen:
        seen.until("1 to 3: ")
        for number, answer in enumerate(answered):
            seen.types(f"{answer}\r")
            asks = ("1 to 2: ", "not shown as you type: ")
            seen.until("1 to 3: " if answer == "2" else asks[number - ("2" in answered)])
        assert seen.interrupted() == 130
    assert files(home) == before
    assert KEY not in seen.shown
    assert "Traceback" not in seen.shown
    if "2" in answered:
        assert "nvidia-smi shows no GPU here: fix the driver, choose Tinker, or" in seen.shown


def test_a_wrong_key_is_a_sentence_and_asked_for_again(home: Path) -> None:
    before = files(home)
    with service() as url, started(home, TINKER_BASE_URL=url) as seen:
        for wrong, says in (("hello", "those begin with 'tml-'"), ("tml-wrong", "HTTP 401")):
            seen.until("1 to 3: ")
            seen.types("1\r1\r")
            seen.until("as you type: ")
            seen.types(f"{wrong}\r")
            seen.until(says)
        seen.until("1 to 3: ")
        seen.types("\x04")
        assert seen.ended() == 130
    assert files(home) == before


@pytest.mark.slow
def test_a_key_that_is_there_is_used_and_kept_nowhere_else(home: Path) -> None:
    port = {"TINKER_CLAW_GATEWAY__PORT": str(free_port())}
    with service() as url, started(home, TINKER_BASE_URL=url, TINKER_API_KEY=KEY, **port) as seen:
        seen.until("1 to 3: ")
        seen.types("1\r1\r")
        seen.until("Your key is in TINKER_API_KEY, which is used; it is stored nowhere else")
        seen.until("keep it in mind")
        seen.types("2\r")
        seen.until(r"--model-name Qwen/Qwen3-8B cannot be downloaded from the Hugging Face")
        assert seen.ended() == 2
    assert ".tinker/credentials.json" not in files(home)
    told = tomllib.loads(files(home)[".config/tinker-claw/settings.toml"])
    assert told["run"]["data_dir"] == str(home / "runs" / "Qwen3-8B-combine")


@pytest.mark.slow
def test_where_the_price_is_known_it_sets_a_budget(home: Path) -> None:
    with service() as url:
        provider = {"TINKER_BASE_URL": "http://tinker.thinkingmachines.dev", "http_proxy": url}
        provider["TINKER_CLAW_GATEWAY__PORT"] = str(free_port())
        with started(home, **provider, TINKER_API_KEY=KEY) as seen:
            seen.until("1 to 3: ")
            seen.types("1\r1\r1\r")
            seen.until(r"pause once \$5 are spent, serving included")
            seen.until(r"--model-name Qwen/Qwen3-8B cannot be downloaded from the Hugging Face")
            assert seen.ended() == 2
    told = tomllib.loads(files(home)[".config/tinker-claw/settings.toml"])
    assert told["spend"] == {"budget_usd": 5, "budget_serving": "goes-on"}


@pytest.mark.parametrize("around", [{"CI": "true"}, {}], ids=["in CI", "its streams closed"])
def test_where_nobody_can_answer_nothing_is_asked(home: Path, around: dict[str, str]) -> None:
    closed = [] if "CI" in around else ["sh", "-c", 'exec "$@" <&-', "sh"]
    around |= {"TINKER_CLAW_TRAINING__BATCH_SIZE": "0"}
    command = [*closed, sys.executable, str(ROOT / "run.py")]
    with on_a_terminal(command, home, environment(home, **around)) as seen:
        seen.until("training.batch_size")
        assert seen.ended() == 2
    assert "1 to 3" not in seen.shown


@pytest.mark.slow
def test_from_two_answers_to_a_gateway_and_again_without_any(home: Path) -> None:
    on_the_hub(home)
    port = free_port()
    page = f"http://127.0.0.1:{port}/ui"
    with wire_process(home / "box", "--name", MODEL) as box:
        there = {"TINKER_BASE_URL": box.url, "TINKER_CLAW_GATEWAY__PORT": str(port)}
        with started(home, **there) as seen:
            seen.until("1 to 3: ")
            seen.types("1\r")
            seen.until("1 to 2: ")
            seen.types("1\r")
            seen.until("as you type: ")
            seen.types(f"{KEY}\r")
            seen.until("keep it in mind")
            seen.types("1\r")
            seen.until(r"Stored the key in .*credentials.json, which only you can read")
            seen.until(r"Stored your answers in (\S+settings.toml)")
            kept = Path(seen.match[1])
            seen.until(rf"tinker-claw --config {kept}")
            seen.until("tinker-claw openclaw-config --write --primary")
            seen.until(f"Its page: {page}")
            seen.until("tinker-claw is ready")
            assert httpx.get(page).status_code == 200
            seen.types("\x03")
            assert seen.ended() == 0
        assert KEY not in seen.shown

        assert kept == home / ".config" / "tinker-claw" / "settings.toml"
        run = tomllib.loads(kept.read_text())["run"]
        assert (run["backend"], run["model_name"]) == ("tinker", MODEL)
        assert tomllib.loads(kept.read_text())["training"] == {"lessons": "on"}
        assert run["data_dir"] == str(home / "runs" / "Qwen3-8B-combine")
        assert KEY not in kept.read_text()
        secret = home / ".tinker" / "credentials.json"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (secret, kept)] == [0o600, 0o600]

        with started(home, **there) as seen:
            seen.until(f"the settings are those of {kept}")
            seen.until("tinker-claw is ready")
            seen.types("\x03")
            assert seen.ended() == 0
        assert "1 to 3" not in seen.shown

        # Nobody has to be there again, and the other commands mean the same gateway.
        away = {"env": environment(home, **there), "cwd": home, "text": True, "timeout": 300}
        run_py = [sys.executable, str(ROOT / "run.py")]
        looked = subprocess.run([*run_py, "versions"], stdout=subprocess.PIPE, **away)
        assert (looked.returncode, "v0" in looked.stdout) == (0, True), looked.stdout


@pytest.mark.parametrize(
    ("flags", "answered"),
    [
        (("--budget-usd", "9"), True),
        (("--data-dir", "x"), False),
    ],
)
def test_what_is_typed_beside_the_answers_does_not_begin_another_run(
    home: Path, flags: tuple[str, ...], answered: bool
) -> None:
    """As with more budget than the first start's."""
    kept = home / ".config" / "tinker-claw" / "settings.toml"
    kept.parent.mkdir(parents=True)
    kept.write_text("[run]\nmodel_name = 'demo'\n")
    done = subprocess.run(
        [sys.executable, ROOT / "run.py", *flags],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        env=environment(home, TINKER_CLAW_TRAINING__BATCH_SIZE="0"),
    )
    assert (f"the settings are those of {kept}" in done.stderr) == answered
    assert "batch_size" in done.stderr


@pytest.mark.slow
def test_gpus_of_this_machine_are_an_answer(home: Path) -> None:
    asked = home / "bin" / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho '0, Some GPU, 81920, 4, GPU-a'\n")
    asked.chmod(0o755)
    vllm = home / "bin" / "vllm"
    with started(home) as seen:
        seen.until(r"on GPUs of this machine \(80 GiB\)")
        seen.types("2\r")
        seen.until("There is no vLLM here, which samples on GPUs")
        vllm.write_text("#!/bin/sh\n")
        vllm.chmod(0o755)
        seen.until("1 to 3: ")
        seen.types("2\r1\r2\r")
        seen.until(r"--model-name Qwen/Qwen3-8B cannot be downloaded from the Hugging Face")
        assert seen.ended() == 2
    told = tomllib.loads(files(home)[".config/tinker-claw/settings.toml"])
    assert told["run"]["backend"] == "local"
    assert "spend" not in told


@pytest.mark.slow
def test_the_demo_is_an_answer_and_is_not_kept(home: Path) -> None:
    with started(home) as seen:
        seen.until("1 to 3: ")
        seen.types("3\r")
        seen.until("Watch it learn, in a browser: http://127.0.0.1:")
        seen.types("\x03")
        assert seen.ended() == 130
    assert ".config/tinker-claw/settings.toml" not in files(home)


def on_the_hub(home: Path) -> None:
    """Put the real model's tokenizer into the hub's cache, as the hub's client keeps it."""
    kept = home / ".cache" / "huggingface" / "hub" / f"models--{MODEL.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots").mkdir()
    (kept / "snapshots" / "abc").symlink_to(MODEL_DIR)
    assert json.loads((kept / "snapshots" / "abc" / "config.json").read_text())
