"""Checkpoints of the stand-in over restarts: states, sampler weights and exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from safetensors.torch import load_file

from local_gpu.tinker.checkpoints import locked
from tests.support.backends import tiny_model
from tests.support.tinker import KEY, NAME, TinkerServer, wire_server

WAIT_S = 180
ADAM = tinker.AdamParams(learning_rate=0.01, beta2=0.98, eps=1e-8)
TOKENS = [(i * 7 + 3) % 64 for i in range(30)]


@contextmanager
def connected(server: TinkerServer) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield service
    service.close("success").result(WAIT_S)


@pytest.fixture(scope="module")
def rest(server: TinkerServer) -> Any:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def lora(client: Any, **settings: Any) -> Any:
    wanted = {"rank": 4, "seed": 1, "train_unembed": False} | settings
    return client.create_lora_training_client(NAME, **wanted).result(WAIT_S)


def step(training: Any, weight: float = 1.0) -> None:
    targets = {"target_tokens": TOKENS[1:], "weights": [weight] * 29}
    training.forward_backward(
        [tinker.Datum(tinker.ModelInput.from_ints(TOKENS[:-1]), targets)], "cross_entropy"
    )
    training.optim_step(ADAM).result(WAIT_S)


def weights_of(server: TinkerServer, training: Any, name: str) -> dict[str, torch.Tensor]:
    path = training.save_weights_for_sampler(name).result(WAIT_S).path
    return load_file(server.store.folder(path) / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_a_state_continues_as_if_nothing_had_happened_also_after_a_restart(tmp_path: Path) -> None:
    prompt = tinker.ModelInput.from_ints(TOKENS)
    with wire_server(tmp_path) as first, connected(first) as client:
        training = lora(client)
        step(training)
        state = training.save_state("one", user_metadata={"k": "v"}).result(WAIT_S).path
        served = training.save_weights_for_sampler("one").result(WAIT_S).path
        sampler = client.create_sampling_client(model_path=served).result(WAIT_S)
        scored = sampler.compute_logprobs(prompt).result(WAIT_S)
        step(training, 0.5)
        expected = weights_of(first, training, "two")
    with wire_server(tmp_path) as second, connected(second) as client:
        again = client.create_training_client_from_state_with_optimizer(state).result(WAIT_S)
        assert again.get_info().lora_rank == 4
        step(again, 0.5)
        assert same(weights_of(second, again, "two"), expected)
        without = client.create_training_client_from_state(state).result(WAIT_S)
        step(without, 0.5)
        assert not same(weights_of(second, without, "two"), expected)
        sampler = client.create_sampling_client(model_path=served).result(WAIT_S)
        assert sampler.compute_logprobs(prompt).result(WAIT_S) == scored


def test_a_path_is_given_once_even_after_its_checkpoint_was_deleted(client: Any, rest: Any) -> None:
    training = lora(client)
    path = training.save_state("twice").result(WAIT_S).path
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="exists already, or did"):
            training.save_state("twice").result(WAIT_S)
        rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="overwrite is True"):
        training.save_state("another", overwrite=True).result(WAIT_S)
    step(training)


def test_checkpoints_are_listed_and_deleted(client: Any, rest: Any) -> None:
    training = lora(client)
    saved = [
        training.save_state("a", ttl_seconds=1).result(WAIT_S).path,
        training.save_weights_for_sampler("b").result(WAIT_S).path,
        training.save_weights_external("c").result(WAIT_S).path,
    ]
    listed = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints
    assert {c.tinker_path: c.checkpoint_type for c in listed} == {
        saved[0]: "training",
        saved[1]: "sampler",
        saved[2]: "external",
    }
    assert {c.expires_at for c in listed} == {None}, "nothing expires, whatever lifetime was asked"
    for path in saved[:2]:
        rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            client.create_sampling_client(model_path=path).result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        client.create_training_client_from_state(saved[0]).result(WAIT_S)
    assert len(rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints) == 1


def test_an_export_is_downloaded_in_pefts_format(
    server: TinkerServer, client: Any, rest: Any, tmp_path: Path
) -> None:
    training = lora(client)
    step(training)
    expected = weights_of(server, training, "served")
    path = training.save_weights_external("export").result(WAIT_S).path
    urls = rest.get_external_weights_urls(path).result(WAIT_S).urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    for name, url in urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    assert same(load_file(tmp_path / "adapter_model.safetensors"), expected)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    url = urls["adapter_config.json"]
    for wrong in (f"{url}x", url.replace("/export/", "/other/")):
        assert httpx.get(wrong).status_code == 404


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


def test_a_checkpoint_of_another_base_model_is_refused(tmp_path: Path) -> None:
    with wire_server(tmp_path) as first, connected(first) as client:
        state = lora(client).save_state("s").result(WAIT_S).path
    other = str(tiny_model(tmp_path / "other", seed=1))
    with (
        wire_server(tmp_path, model=other) as second,
        connected(second) as client,
        pytest.raises(tinker.RequestFailedError, match="another base model"),
    ):
        client.create_training_client_from_state(state).result(WAIT_S)
