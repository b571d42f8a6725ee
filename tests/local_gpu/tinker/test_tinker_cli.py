"""Runs and checkpoints of our server as the SDK reads them, and its command line as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from safetensors.torch import load_file

from tests.support.tinker import KEY, NAME, Raw, TinkerServer, wire_server

WAIT_S = 180


@dataclass(frozen=True)
class There:
    """A server with two runs."""

    server: TinkerServer
    old: str
    """Run of a session that has ended; its checkpoints are there."""
    run: str
    """Run that is being trained."""
    paths: list[str]
    """Paths of a state, a sampler and an export of `old`."""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    with wire_server(tmp_path_factory.mktemp("wire")) as server:
        first = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        made = lora(first, user_metadata={"task": "riddles"})
        paths = [
            made.save_state("one", user_metadata={"k": "v"}).result(WAIT_S).path,
            made.save_weights_for_sampler("one").result(WAIT_S).path,
            made.save_weights_external("one").result(WAIT_S).path,
        ]
        made.save_weights_and_get_sampling_client().result(WAIT_S)
        first.close("success").result(WAIT_S)
        second = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        going = lora(second)
        yield There(server, made.model_id, going.model_id, paths)
        second.close("success").result(WAIT_S)


def lora(client: Any, **settings: Any) -> Any:
    wanted = {"rank": 4, "seed": 1, "train_unembed": False} | settings
    return client.create_lora_training_client(NAME, **wanted).result(WAIT_S)


def tell(there: There, *arguments: str, status: int = 0, key: str = KEY) -> str:
    """Output of the command."""
    home = str(there.server.store.root)
    place = {"TINKER_BASE_URL": there.server.url, "TINKER_API_KEY": key, "HOME": home}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tinker.cli", *arguments],
        env=os.environ | place | {"TINKER_TELEMETRY": "0", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    # On an error it may abort: its threads go on while the interpreter exits.
    assert done.returncode in (status, -6 * status), done.stdout + done.stderr
    return done.stdout if not status else done.stderr


@pytest.mark.slow
def test_the_command_line_lists_shows_and_downloads(there: There, tmp_path: Path) -> None:
    state, sampler, export = there.paths
    as_json = ("--format", "json")
    commands = {
        "runs": (*as_json, "run", "list"),
        "table": ("run", "list", "--limit", "1", "--columns", "id,owner,lora,status,checkpoint"),
        "old": (*as_json, "run", "info", there.old),
        "all": (*as_json, "checkpoint", "list"),
        "of": (*as_json, "checkpoint", "list", "--run-id", there.old),
        "info": (*as_json, "checkpoint", "info", state),
        "state": ("checkpoint", "download", state, "--output", str(tmp_path)),
        "export": ("checkpoint", "download", export, "--output", str(tmp_path)),
    }
    with ThreadPoolExecutor(2) as pool:
        each = pool.map(lambda command: tell(there, *command), commands.values())
        told = dict(zip(commands, each, strict=True))
    runs = [run["training_run_id"] for run in json.loads(told["runs"])["runs"]]
    assert {there.run, there.old} <= set(runs)
    assert "Rank 4" in told["table"]
    assert "more not shown" in told["table"]
    old = json.loads(told["old"])
    assert old["user_metadata"] == {"task": "riddles"}
    assert old["last_checkpoint"]["tinker_path"] == state
    assert old["last_sampler_checkpoint"]["tinker_path"] == sampler
    for name in ("all", "of"):
        listed = {one["tinker_path"] for one in json.loads(told[name])["checkpoints"]}
        assert listed >= set(there.paths)
    info = json.loads(told["info"])
    assert (info["lora_rank"], info["public"], info["user_metadata"]) == (4, False, {"k": "v"})
    found = sorted(tmp_path.glob("*/adapter_model.safetensors"))
    one, other = map(load_file, found)
    assert all(one[name].equal(other[name]) for name in one)
    assert len(listing(there)) == 3, "the export that a download makes is gone"
    assert "Checkpoint not found" in tell(there, "checkpoint", "info", f"{state}x", status=1)


def listing(there: There) -> list[dict[str, Any]]:
    raw = Raw(there.server.url)
    found = raw.http.get("checkpoints").json()["checkpoints"]
    raw.http.close()
    return found


def test_runs_are_listed_the_last_used_first(there: There) -> None:
    rest = tinker.RestClient(base_url=there.server.url, api_key=KEY)
    everything = rest.list_training_runs().result(WAIT_S)
    ids = [run.training_run_id for run in everything.training_runs]
    assert ids[-1] == there.old
    assert there.run in ids
    assert everything.cursor.total_count == len(ids)
    second = rest.list_training_runs(limit=1, offset=1).result(WAIT_S)
    assert [run.training_run_id for run in second.training_runs] == ids[1:2]
    run = rest.get_training_run(there.old).result(WAIT_S)
    assert (run.base_model, run.lora_rank, run.model_owner) == (NAME, 4, "local")
    assert run.user_metadata == {"task": "riddles"}
    assert rest.get_training_run(there.run).result(WAIT_S).last_checkpoint is None
    with pytest.raises(tinker.NotFoundError, match="no training run"):
        rest.get_training_run("nobody").result(WAIT_S)
    listed = rest.list_user_checkpoints(limit=2).result(WAIT_S)
    assert (len(listed.checkpoints), listed.cursor.total_count) == (2, 3)


@pytest.mark.parametrize("query", ["limit=-1", "limit=1001", "offset=-1", f"offset={'7' * 5000}"])
def test_a_page_that_cannot_be_is_refused(there: There, query: str) -> None:
    raw = Raw(there.server.url)
    for path in ("training_runs", "checkpoints"):
        assert raw.http.get(f"{path}?{query}").status_code == 422
    raw.http.close()


def test_runs_need_the_key(tmp_path: Path) -> None:
    with wire_server(tmp_path, api_key="tml-secret-012345") as server:
        for path in ("training_runs", "training_runs/x", "checkpoints"):
            for key, status in (
                (KEY, 401),
                ("tml-secret-012345", 404 if path[-1] == "x" else 200),
            ):
                raw = Raw(server.url, key)
                assert raw.http.get(path).status_code == status
                raw.http.close()
