"""A wheel, installed by itself: what is shipped beside the code is found in it, and works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.lives import events_in, until
from tests.processes import ROOT, Running
from tests.talk import learn
from tinker_claw import shipped

_TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]


def test_whatever_is_shipped_is_put_where_it_is_looked_for() -> None:
    packed = _TABLE["wheel"]["force-include"]
    for path, target in packed.items():
        assert target == f"tinker_claw/shipped/{path}"
        assert shipped.shipped(path) == ROOT / path
    files = (shipped.PRICES, shipped.DEMO_JUDGE, shipped.MODEL_DIR)
    assert {str(file.relative_to(ROOT)) for file in files} == set(packed)


@pytest.mark.slow
def test_the_demo_learns_from_a_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    """Its dependencies come from this environment; of the checkout there is nothing."""
    python = _installed(tmp_path)
    inside = _said(python, "-c", "from tinker_claw import shipped; print(shipped.MODEL_DIR)")
    assert Path(inside.strip()).is_relative_to(tmp_path)
    _said(python, "-c", "from tinker_claw.billing.prices import load; load()")
    data, log = tmp_path / "data", tmp_path / "log"
    flags = ["--model-name", "demo", "--backend", "local", "--port", "0"]
    flags += ["--data-dir", str(data), "--batch-size", "4"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python.with_name("tinker-claw"), *flags],
            cwd=tmp_path,
            env=_without_the_checkout(),
            stdout=out,
            stderr=out,
        )
    try:
        until(lambda: process.poll() is not None or _event(log, "serving"))
        assert process.poll() is None, log.read_text()[-3000:]
        assert _event(log, "judge.rules")
        running = Running(process, _event(log, "serving")[0]["url"], log)
        learn(running, 1, range(20))
        page = httpx.get(running.url.removesuffix("/v1") + "/ui")
        assert page.status_code == 200
        assert re.search(r"v\d, \d steps from the base", page.text)
        assert running.stop() == 0
    finally:
        process.kill()
        process.wait()


def _installed(folder: Path) -> Path:
    """The Python of a new environment that has our wheel, and this environment's packages."""
    _said(
        Path(sys.executable),
        *("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(folder), str(ROOT)),
    )
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    venv.create(folder / "venv", symlinks=True)
    _said(
        Path(sys.executable),
        *("-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"),
        *("--no-index", str(wheel)),
    )
    packages = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
    (packages / "those-beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _said(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, *arguments],
        cwd="/",
        env=_without_the_checkout(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _without_the_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _event(log: Path, name: str) -> Sequence[dict[str, str]]:
    return [event for event in events_in(log.read_text()) if event["event"] == name]
