"""Undoing while the product runs: real processes, both backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import ask, learn
from tests.support.ledger import everything, read
from tests.support.lives import LOCAL, ROOT, Life, product, until
from tests.support.tinker import wire_process

pytestmark = pytest.mark.slow
FLAGS = ("--learning-rate", "1e-3", "--lora-rank", "4", "--batch-size", "2")
TINKER = {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}


@contextmanager
def backend(name: str, folder: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Start a backend; yield the product's flags and environment."""
    if name == "local":
        yield LOCAL, {}
    else:
        with wire_process(folder / "box") as box:
            yield ("--backend", "tinker", "--base-url", box.url), TINKER


def command(
    *flags: str, data: Path, env: dict[str, str], status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "run.py", *flags, "--data-dir", str(data)],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def versions(data: Path) -> dict[int, dict[str, Any]]:
    shown = command("versions", "--json", data=data, env={}).stdout.splitlines()
    return {record["id"]: record for record in map(json.loads, shown)}


def serves(running: Life) -> int:
    return running.health()["policy_version"]


@pytest.mark.parametrize("name", ["local", "tinker"])
def test_gateway_that_runs_is_pinned_rolled_back_and_made_to_forget(
    tmp_path: Path, name: str
) -> None:
    data, mark = tmp_path / "data", "Xyzzyplugh"
    with backend(name, tmp_path) as (flags, env):
        flags = (*flags, *FLAGS)
        with product(data, backend=flags, env=env) as running:
            learn(running, 2, range(0, 40))
            command("pin", "v0", data=data, env=env)
            assert (serves(running), running.health()["pinned"]) == (0, True)
            command("unpin", data=data, env=env)
            newest = max(versions(data))
            assert serves(running) >= newest
            told = command("rollback", "v1", data=data, env=env).stdout
            made = int(told.split(",")[0].removeprefix("v"))
            assert made > newest
            assert versions(data)[made]["parent"] == 1
            assert versions(data)[made]["step"] == 1
            assert serves(running) >= made
            learn(running, made + 1, range(100, 160))
            assert versions(data)[made + 1]["parent"] == made
            told = command("accept", data=data, env=env).stdout
            accepted = int(told.split()[4].removeprefix("v"))
            assert made < accepted <= max(versions(data))
            (kept,) = read(data, "SELECT value FROM meta WHERE key = 'accepted'")
            assert kept == (str(accepted),)

            words = [{"role": "user", "content": f"My name is {mark}."}]
            reply = ask(running, "secret", words)
            words += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Ok"}]
            ask(running, "secret", words)
            assert mark.encode() in everything(data)
            command("forget", "session", "secret", "--yes", data=data, env=env)
            assert mark.encode() not in everything(data)
            assert ask(running, "secret", [{"role": "user", "content": "Hello"}])
            assert read(data, "SELECT COUNT(*) FROM sessions WHERE key = 'secret'") == [(1,)]

            adapter = tmp_path / "adapter"
            asked = ("--model-name", "demo", *flags)
            command("export", "--adapter", str(adapter), *asked, data=data, env=env)
            assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
            refused = command("rollback", "v999", data=data, env=env, status=2)
            assert "there is no v999; possible: v" in refused.stderr
            assert running.stop() == 0
        command("pin", "v0", data=data, env=env)
        newest = max(versions(data))
        told = command("accept", data=data, env=env).stdout
        assert told == f"Canaries are compared with v{newest} from now on.\n"
        with product(data, backend=flags, env=env) as again:
            assert serves(again) == 0
            command("unpin", data=data, env=env)
            until(lambda: serves(again) == max(versions(data)))
            assert again.stop() == 0
    assert "Traceback" not in running.log.read_text()
    assert not (data / "control.json").exists()
