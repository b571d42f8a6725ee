"""Checkpoints of the stand-in over restarts: states, sampler weights and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from local_gpu.tinker.checkpoints import locked
from tests.support.tinker import NAME, TinkerServer

WAIT_S = 180


def lora(client: Any, **settings: Any) -> Any:
    wanted = {"rank": 4, "seed": 1, "train_unembed": False} | settings
    return client.create_lora_training_client(NAME, **wanted).result(WAIT_S)


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".", "..", ".hidden", "a\0b", "x" * 201])
def test_no_name_leads_out_of_the_root(client: Any, name: str) -> None:
    training = lora(client)
    with pytest.raises(tinker.RequestFailedError, match="cannot name a checkpoint"):
        training.save_state(name).result(WAIT_S)


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/x",
        "tinker://a/../x",
        "tinker://a/weights/..",
        "tinker:///etc/passwd",
        "tinker://a/weights/b/c",
        "/etc/passwd",
    ],
)
def test_no_path_leads_out_of_the_root(client: Any, path: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match="cannot name a checkpoint"):
        client.create_training_client_from_state(path).result(WAIT_S)
    with pytest.raises((tinker.APIStatusError, ValueError), match=r"cannot name|must start with"):
        client.create_sampling_client(model_path=path).result(WAIT_S)


@pytest.mark.parametrize("run", ["%2e%2e", "a", "a:train:x", "*:train:0"])
def test_no_run_leads_out_of_the_root(server: TinkerServer, run: str) -> None:
    (server.store.root.parent / "weights" / "elsewhere").mkdir(parents=True, exist_ok=True)
    answer = httpx.get(f"{server.url}/api/v1/training_runs/{run}/checkpoints")
    assert answer.status_code == 400
    assert "cannot name a checkpoint" in answer.json()["error"]


def test_a_start_removes_what_a_killed_server_left_half_written(tmp_path: Path) -> None:
    run = tmp_path / "a:train:0"
    kept = [run / "weights" / "one", run / "sampler_weights" / "two"]
    left = [run / "weights" / ".draft-1", run / "sampler_weights" / "_nameless-1"]
    for folder in (*kept, *left):
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").touch()
    with locked(tmp_path):
        assert [folder.is_dir() for folder in kept] == [True, True]
        assert [folder.is_dir() for folder in left] == [False, False]
