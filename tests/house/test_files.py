"""Files are readable by their owner only, whatever the umask and whatever was there before."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tinker_claw.files import close_to_others, open_to_others
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.telemetry import Telemetry


def modes(directory: Path) -> dict[str, int]:
    """Modes of a directory and everything in it."""
    return {
        str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode)
        for path in (directory, *directory.rglob("*"))
    }


def assert_closed(directory: Path) -> None:
    assert {name: oct(mode) for name, mode in modes(directory).items() if mode & 0o077} == {}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o077])
def test_ledger_its_log_and_its_index_are_closed_from_the_start(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        ledger = Ledger(tmp_path / "data")
        ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
        assert len(modes(tmp_path / "data")) == 5
        assert_closed(tmp_path / "data")
        ledger.close()


def test_programs_of_ours_create_nothing_that_others_may_read(tmp_path: Path) -> None:
    started = (
        ("tinker_claw.cli.main", "main(['log', '--no-such-flag'])"),
        ("local_gpu.tinker.__main__", "main(['log', '--no-such-flag'])"),
        ("examples", "exit_status(lambda: None)"),
    )
    for module, start in started:
        code = (
            f"import os, sys\nfrom {module} import {start.partition('(')[0]}\nos.umask(0)\n"
            f"try: {start}\n"
            "except SystemExit: pass\n"
            "sys.exit(0 if os.umask(0) == 0o077 else 1)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, (module, done.stderr)


def test_directory_of_before_is_closed_and_that_of_others_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with umask(0o022):
        (data / "adapters" / "v1").mkdir(parents=True)
        (data / "adapters" / "v1" / "adapter_model.safetensors").write_text("x")
        (data / "metrics.jsonl").write_text("x")
        (data / "ledger.sqlite3").write_text("x")
    assert len(open_to_others(data)) == 6
    assert len(close_to_others(data)) == 6
    assert_closed(data)
    assert close_to_others(data) == [] == open_to_others(data)
    shared = tmp_path / "home"
    with umask(0o022):
        shared.mkdir()
        (shared / "public.html").write_text("x")
        (shared / "metrics.jsonl").write_text("x")
        (shared / "logs").symlink_to(data)
    assert close_to_others(shared) == [shared / "metrics.jsonl"]
    assert open_to_others(shared) == [shared]
    assert modes(shared)["public.html"] == 0o644
    assert open_to_others(tmp_path / "none") == []


def test_metrics_are_closed_whoever_writes_them(tmp_path: Path) -> None:
    with umask(0):
        Telemetry(tmp_path / "metrics.jsonl").step(seconds=1.0, samples=1)
    assert modes(tmp_path)["metrics.jsonl"] == 0o600
