"""Trackers whose packages are large, each read by its own library after kills and restarts.

Not in the default suite: `make trackers` installs them, `make test-trackers` runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random
from subprocess import PIPE
from typing import Any

import pytest

from tests.support.lives import ROOT
from tests.support.stories import SECRET, Told

pytestmark = pytest.mark.trackers

READ = {
    "wandb": """
import json, struct
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
found, ids, BLOCK = {}, set(), 32768

def records(file):
    # LevelDB's log format, behind a head of seven bytes: checksum, length and kind of each piece.
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""

for file in sorted(Path(DATA, "sinks", "wandb").glob("offline-run-*/*.wandb")):
    for record in records(file):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                point = (record.history.step.num, json.loads(item.value_json))
                found.setdefault(name, []).append(point)
assert len(ids) == 1, ids
""",
}


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Environment with the trackers' own variables."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TINKER")},
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),
        "WANDB_MODE": "offline",
    }


@pytest.mark.parametrize("name", READ)
def test_a_tracker_has_every_step_once_and_no_word(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, environment: dict[str, str]
) -> None:
    python, data = request.config.getoption("trackers") / "bin" / "python", tmp_path / "data"

    def python_says(*words: str) -> str:
        done = subprocess.run(
            [python, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    told, follow, rng = Told(data), ("-m", "tinker_claw.sinks.follow", name, str(data)), Random(0)
    for sample in "abc":
        told.step(told.sampled(sample, 1)[1])
        command = [python, *follow]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=PIPE) as killed:
            with suppress(subprocess.TimeoutExpired):
                killed.wait(rng.uniform(3, 12))  # wherever it may be then
            killed.kill()
    for _ in range(2):
        python_says(*follow)
    script = f"DATA = {str(data)!r}\n{READ[name]}\nprint(__import__('json').dumps(found))"
    found: dict[str, Any] = json.loads(python_says("-c", script).splitlines()[-1])
    # A kill before the note sends a step again.
    found = {figure: sorted({*map(tuple, points)}) for figure, points in found.items()}
    assert [tuple(point) for point in found["step/version"]] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [tuple(point) for point in found["step/losses/1"]] == [(n, -0.5) for n in (1, 2, 3)]
    told.ledger.close()
    written = [
        file.read_bytes()
        for file in tmp_path.rglob("*")
        if file.is_file() and not file.name.startswith("ledger.sqlite3")
    ]
    assert any(b"step" in text for text in written)
    assert not any(SECRET.encode() in text for text in written)
