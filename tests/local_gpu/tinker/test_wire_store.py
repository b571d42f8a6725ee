"""Checkpoints of the wire server over restarts: states, sampler weights and exports."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from safetensors.torch import load_file

from local_gpu.tinker.store import Place
from tests.support.backends import tiny_model
from tests.support.tinker import KEY, NAME, TinkerServer, wire_server
from tinker_claw.errors import ConfigError

WAIT_S = 180
ADAM = tinker.AdamParams(learning_rate=0.01, beta2=0.98, eps=1e-8)
TOKENS = [(i * 7 + 3) % 64 for i in range(30)]


@contextmanager
def connected(server: TinkerServer) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield service
    service.close("success").result(WAIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with wire_server(tmp_path_factory.mktemp("wire")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TinkerServer) -> Iterator[Any]:
    with connected(server) as service:
        yield service


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
    path = training.save_weights_external(name).result(WAIT_S).path
    return load_file(server.store.folder(Place.at(path)) / "adapter_model.safetensors")


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
        training.save_weights_and_get_sampling_client().result(WAIT_S)
        step(training, 0.5)
        expected = weights_of(first, training, "two")
        assert len(list((tmp_path / "wire").glob("*/sampler_weights/_ephemeral*"))) == 1
        # As a killed server would leave it.
        draft = tmp_path / "wire" / "some-run" / "weights" / ".draft-x"
        draft.mkdir(parents=True)
        replaced = first.store.folder(Place.at(state))
        replaced.rename(replaced.with_name(".replaced-one"))
    with wire_server(tmp_path) as second, connected(second) as client:
        assert not draft.exists()
        assert not list((tmp_path / "wire").glob("*/sampler_weights/_ephemeral*"))
        again = client.create_training_client_from_state_with_optimizer(state).result(WAIT_S)
        assert again.get_info().lora_rank == 4
        step(again, 0.5)
        assert same(weights_of(second, again, "two"), expected)
        without = client.create_training_client_from_state(state).result(WAIT_S)
        step(without, 0.5)
        assert not same(weights_of(second, without, "two"), expected)
        sampler = client.create_sampling_client(model_path=served).result(WAIT_S)
        assert sampler.compute_logprobs(prompt).result(WAIT_S) == scored


def test_a_state_is_loaded_onto_a_model_that_is_there(server: TinkerServer, client: Any) -> None:
    training = lora(client)
    step(training)
    state = training.save_state("here").result(WAIT_S).path
    step(training, 0.5)
    expected = weights_of(server, training, "expected")
    legacy = training._load_state_impl(state, optimizer=True, weights_access_token=None)
    assert legacy.result(WAIT_S).path == state
    step(training, 0.5)
    assert same(weights_of(server, training, "got"), expected)
    other = lora(client, rank=2)
    with pytest.raises(tinker.RequestFailedError, match="another rank"):
        other._load_state_impl(state, optimizer=True, weights_access_token=None).result(WAIT_S)


def test_a_name_is_taken_once_unless_it_may_be_overwritten(client: Any, rest: Any) -> None:
    training = lora(client)
    path = training.save_state("twice", user_metadata={"a": "1"}).result(WAIT_S).path
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        training.save_state("twice").result(WAIT_S)
    step(training)
    assert training.save_state("twice", overwrite=True).result(WAIT_S).path == path
    (listed,) = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints
    assert listed.user_metadata is None
    assert listed.size_bytes > 1000


def test_a_name_that_is_overwritten_gives_its_new_weights_to_who_samples_next(client: Any) -> None:
    training = lora(client)
    prompt = tinker.ModelInput.from_ints(TOKENS)
    path = training.save_state("anew").result(WAIT_S).path
    sampler = client.create_sampling_client(model_path=path).result(WAIT_S)
    before = sampler.compute_logprobs(prompt).result(WAIT_S)
    step(training)
    training.save_state("anew", overwrite=True).result(WAIT_S)
    after = sampler.compute_logprobs(prompt).result(WAIT_S)
    assert after != before
    fresh = training.save_weights_and_get_sampling_client().result(WAIT_S)
    assert after == fresh.compute_logprobs(prompt).result(WAIT_S)


def test_weights_that_are_overwritten_while_they_are_opened_answer_no_later_request(
    server: TinkerServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = lora(client)
    prompt = tinker.ModelInput.from_ints(TOKENS)
    path = training.save_state("opening").result(WAIT_S).path
    sampler = client.create_sampling_client(model_path=path).result(WAIT_S)
    serving: Any = server.service.shared.backend.serving
    opening, opened, go_on = serving.open, threading.Event(), threading.Event()

    async def slowly(*arguments: Any) -> Any:
        found = await opening(*arguments)
        opened.set()
        await asyncio.to_thread(go_on.wait, WAIT_S)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(serving, "open", slowly)
        first = sampler.compute_logprobs(prompt)
        assert opened.wait(WAIT_S)
        step(training)
        training.save_state("opening", overwrite=True).result(WAIT_S)
        go_on.set()
        before = first.result(WAIT_S)
    after = sampler.compute_logprobs(prompt).result(WAIT_S)
    assert after != before
    fresh = training.save_weights_and_get_sampling_client().result(WAIT_S)
    assert after == fresh.compute_logprobs(prompt).result(WAIT_S)
    assert server.service.samplers.open_count == len(serving.live()) - 1


def test_a_root_belongs_to_one_server(tmp_path: Path) -> None:
    prompt = tinker.ModelInput.from_ints(TOKENS)
    with wire_server(tmp_path) as first, connected(first) as client:
        sampler = lora(client).save_weights_and_get_sampling_client().result(WAIT_S)
        scored = sampler.compute_logprobs(prompt).result(WAIT_S)
        with pytest.raises(ConfigError, match="in use by another server"), wire_server(tmp_path):
            pass
        assert sampler.compute_logprobs(prompt).result(WAIT_S) == scored
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"not writable \(Not a directory"),
        wire_server(tmp_path, root=tmp_path / "file" / "wire"),
    ):
        pass


def test_checkpoints_are_listed_described_and_deleted(client: Any, rest: Any) -> None:
    training = lora(client)
    saved = [
        training.save_state("a", ttl_seconds=1).result(WAIT_S).path,
        training.save_weights_for_sampler("b").result(WAIT_S).path,
        training.save_weights_external("c").result(WAIT_S).path,
    ]
    training.save_weights_and_get_sampling_client().result(WAIT_S)
    listed = rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints
    assert {c.tinker_path: c.checkpoint_type for c in listed} == {
        saved[0]: "training",
        saved[1]: "sampler",
        saved[2]: "external",
    }
    assert {c.expires_at for c in listed} == {None}, "nothing expires, whatever lifetime was asked"
    info = rest.get_weights_info_by_tinker_path(saved[0]).result(WAIT_S)
    assert (info.base_model, info.lora_rank, info.train_unembed) == (NAME, 4, False)
    sampler = client.create_sampling_client(model_path=saved[1]).result(WAIT_S)
    for path in saved[:2]:
        rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
        with pytest.raises(tinker.NotFoundError):
            rest.get_weights_info_by_tinker_path(path).result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        client.create_training_client_from_state(saved[0]).result(WAIT_S)
    assert len(rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints) == 1


def test_an_export_is_downloaded_in_pefts_format(
    server: TinkerServer, client: Any, rest: Any, tmp_path: Path
) -> None:
    training = lora(client)
    step(training)
    expected = weights_of(server, training, "export")
    path = f"tinker://{training.model_id}/external_weights/export"
    urls = rest.get_external_weights_urls(path).result(WAIT_S).urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    assert "checkpoint.json" not in urls
    for name, url in urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    assert same(load_file(tmp_path / "adapter_model.safetensors"), expected)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    url = urls["adapter_config.json"]
    token = url.split("/")[-2]
    for wrong in (url.replace(token, "x" * len(token)), url.replace("_config", "_unknown")):
        assert httpx.get(wrong).status_code == 404
    assert httpx.get(url.replace("adapter_config.json", "checkpoint.json")).status_code == 404


def test_a_corrupt_record_is_no_checkpoint(server: TinkerServer, client: Any, rest: Any) -> None:
    training = lora(client)
    path = training.save_state("corrupt").result(WAIT_S).path
    record = server.store.folder(Place.at(path)) / "checkpoint.json"
    for text in ("", "{}", record.read_text().replace('"time": "', '"time": "soon ')):
        record.write_text(text)
        assert rest.list_checkpoints(training.model_id).result(WAIT_S).checkpoints == []
        with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
            client.create_training_client_from_state(path).result(WAIT_S)


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
def test_no_path_leads_out_of_the_root(server: TinkerServer, client: Any, path: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"checkpoint|form"):
        client.create_training_client_from_state(path).result(WAIT_S)
    body, headers = {"tinker_path": path}, {"X-API-Key": KEY}
    url = f"{server.url}/api/v1/weights_info"
    assert httpx.post(url, json=body, headers=headers).status_code == 400


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
