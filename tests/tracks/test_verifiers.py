"""verifiers' own harnesses, unmodified, train through the gateway.

Not in the default suite: `make verifiers` installs it, `make test-verifiers` runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.lives import ROOT, life, until
from tests.truths import one, read

pytestmark = pytest.mark.verifiers
FLAGS = (
    *("--method", "binary", "--prm-m", "1", "--batch-size", "4", "--lora-rank", "4"),
    *("--learning-rate", "1e-3"),
)
SIZE, GROUPS = 4, 2


def play(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    programs = environment.absolute() / "bin"
    paths = (str(ROOT), str(ROOT / "tests" / "tracks" / "tasksets"))
    return subprocess.run(
        [programs / "python", "-m", "examples.tracks.with_verifiers", *arguments],
        env=os.environ
        | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_harness_of_verifiers_trains_as_it_is(
    request: pytest.FixtureRequest, tmp_path: Path, harness: str
) -> None:
    environment = request.config.getoption("verifiers")
    data = tmp_path / "data"
    with life(data, *FLAGS) as gateway:
        assert gateway.serves()
        asked = {"taskset": "short_answers", "harness": harness, "url": gateway.url}
        asked |= {"group-size": str(SIZE), "groups": str(GROUPS), "concurrency": "4"}
        asked |= {"max-turns": "2", "max-tokens": "48"}
        done = play(environment, *(f"--{name}={value}" for name, value in asked.items()))
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: one(data, "SELECT COUNT(*) FROM groups WHERE over = 1") == GROUPS)
        until(lambda: one(data, "SELECT COUNT(*) FROM samples WHERE state = 'queued'") == 0)
        assert gateway.stop() == 0
    told = dict(re.findall(r"^(\w+): outcome ([+-][\d.]+)$", done.stdout, re.MULTILINE))
    assert len(told) == SIZE * GROUPS
    kept = read(
        data,
        "SELECT sessions.key, score FROM feedback JOIN sessions ON sessions.id = session_id "
        "WHERE final = 1 AND episode = 2",
    )
    assert {row["key"]: f"{row['score']:+.2f}" for row in kept} == told
    assert one(data, "SELECT COUNT(*) FROM steps WHERE status = 'committed'") >= 1


def test_a_real_model_gets_no_shell_without_a_container(request: pytest.FixtureRequest) -> None:
    environment = request.config.getoption("verifiers")
    done = play(environment, "--taskset=short_answers", "--harness=bash", "--model=Qwen/Qwen3-8B")
    assert done.returncode == 1
    assert "give --runtime docker" in done.stderr
