"""docs/agents.md, followed word for word with bash and curl against the gateway that it starts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.ledger import one, read
from tests.support.lives import ROOT, life, until

PAGE = (ROOT / "docs" / "agents.md").read_text()
ADDRESS = "http://127.0.0.1:30000"


def flags() -> list[str]:
    """Flags with which the page starts the gateway; a life names its model and backend itself."""
    (command,) = re.findall(r"^ {4}python run\.py (--model-name demo .*)$", PAGE, re.MULTILINE)
    words = shlex.split(command)
    assert words[:4] == ["--model-name", "demo", "--backend", "local"]
    return words[4:]


def script(url: str) -> str:
    """The page's blocks as one script, in order; only the gateway's port is changed."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    text = "".join(blocks)
    assert text.count(ADDRESS) == 1
    return "set -euo pipefail\n" + text.replace(ADDRESS, url.removesuffix("/v1"))


def nothing_else(folder: Path) -> dict[str, str]:
    """An environment in which a shell finds only these programs."""
    folder.mkdir()
    for name in ("curl", "sed", "grep", "date", "sleep"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return {"PATH": str(folder)}


@pytest.mark.slow
def test_page_is_followed_with_nothing_but_curl_and_two_groups_train(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with life(data, *flags()) as gateway:
        assert gateway.serves()
        done = subprocess.run(
            ["/bin/bash", "-c", script(gateway.url)],
            env=nothing_else(tmp_path / "programs"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        until(lambda: one(data, "SELECT COUNT(*) FROM sessions WHERE episode = 2") == 8)
        until(lambda: one(data, "SELECT COUNT(*) FROM turns WHERE state = 'queued'") == 0)
        assert gateway.stop() == 0
    assert done.stdout.count('"counts":true') == 8
    exams = re.findall(r'"model":"(demo@v\d)","system_fingerprint":"(v\d)"', done.stdout)
    assert exams == [("demo@v0", "v0"), ("demo@v1", "v1")]
    groups = read(
        data,
        "SELECT groups.name, COUNT(DISTINCT session_id) AS tries, COUNT(*) AS samples, "
        "COUNT(DISTINCT samples.step_id) AS steps FROM samples "
        "JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id "
        "JOIN groups ON groups.id = group_id WHERE state = 'trained' GROUP BY groups.id",
    )
    assert len(groups) == 2
    for group in groups:
        assert (group["tries"], group["samples"], group["steps"]) == (4, 8, 1), tuple(group)
    assert one(data, "SELECT COUNT(*) FROM sessions JOIN turns ON turns.session_id = sessions.id "
               "WHERE kind = 'side' AND state = 'refused'") == 2  # fmt: skip
