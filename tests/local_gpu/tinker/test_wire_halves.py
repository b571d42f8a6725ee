"""Tinker's API over trainers and samplers in other processes: the same numbers.

The reference is a server that learns and samples in this process. What is compared is what the SDK
gets: losses, logprobs, norms, adapters after steps, samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file

from local_gpu.model.load import open_base
from local_gpu.tinker.store import Place
from tests.support.backends import VOCABULARY, tiny_model
from tests.support.inference_servers import InferenceServer, inference_servers
from tests.support.ranks import kill, rank_pids
from tests.support.tinker import KEY, NAME, TinkerServer, wire_server

WAIT_S = 300
PROMPT = [(i * i * 5 + 3 * i + 1) % VOCABULARY for i in range(70)]
ADAM = tinker.AdamParams(learning_rate=0.01, beta2=0.98, eps=0.01, grad_clip_norm=1.0)
"""Adam with an eps against rounding: with a tiny one, a gradient of nothing but rounding would make
a whole step."""
HALVES: dict[str, dict[str, Any]] = {
    "a learner in a process of its own": {"in_process": False},
    "two ranks": {"ranks": 2, "micro_batch_tokens": 40},
    "two ranks and a base that is split": {"ranks": 2, "rank": 4, "shard": "on"},
}


def lora(client: Any, seed: int, rank: int = 4) -> Any:
    made = client.create_lora_training_client(NAME, rank=rank, seed=seed, train_unembed=False)
    return made.result(WAIT_S)


def entropy(salt: int) -> list[Any]:
    return [
        tinker.Datum(
            tinker.ModelInput.from_ints([(t + salt * i) % VOCABULARY for t in PROMPT[:n]]),
            {"target_tokens": PROMPT[1 : n + 1], "weights": [0.5] * n},
        )
        for i, n in enumerate((20, 27, 34, 41))
    ]


def policy(salt: int) -> list[Any]:
    data = entropy(salt)
    for datum in data:
        count = len(datum.loss_fn_inputs.pop("weights").data)
        rows = torch.arange(count)
        datum.loss_fn_inputs["logprobs"] = tinker.TensorData.from_torch(-4.0 - 0.1 * (rows % 5))
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_torch(0.2 * (rows % 7 - 3.0))
    return data


def rows(output: Any) -> list[float]:
    told = [x for one in output.loss_fn_outputs for x in one["logprobs"].data]
    return [output.metrics["loss:sum"], *told]


def drawn(sampler: Any) -> list[Any]:
    """Sampled tokens, and numbers as the wire gives them."""
    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = tinker.SamplingParams(max_tokens=8, seed=5)
    told = sampler.sample(prompt, 2, params, topk_sample_logprobs=3).result(WAIT_S)
    scored = sampler.compute_logprobs(prompt).result(WAIT_S)
    tops = [pair for one in told.sequences for row in one.topk_logprobs for pair in row]
    return [
        [one.tokens for one in told.sequences],
        [x for one in told.sequences for x in one.logprobs],
        [id for id, _ in tops],
        [x for _, x in tops],
        scored[1:],
    ]


def weights(server: TinkerServer, training: Any, name: str) -> list[float]:
    path = training.save_weights_external(name).result(WAIT_S).path
    tensors = load_file(server.store.folder(Place.at(path)) / "adapter_model.safetensors")
    return torch.cat([tensors[key].flatten() for key in sorted(tensors)]).tolist()


def life(server: TinkerServer, rank: int) -> list[Any]:
    """Train two models in turns, each with its own gradients, and sample from both."""
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    one, other = lora(service, 1), lora(service, 2, rank)
    told: list[Any] = []
    for number in range(2):
        futures = [
            one.forward_backward(entropy(number), "cross_entropy"),
            other.forward_backward(policy(number), "ppo"),
            one.forward_backward(policy(number + 3), "importance_sampling"),
            other.forward(entropy(number), "cross_entropy"),
        ]
        told += [rows(future.result(WAIT_S)) for future in futures]
        steps = [training.optim_step(ADAM) for training in (one, other)]
        told += [list(step.result(WAIT_S).metrics.values()) for step in steps]
    state = one.save_state("state").result(WAIT_S).path
    told += drawn(service.create_sampling_client(base_model=NAME).result(WAIT_S))
    for training in (one, other):
        told += drawn(training.save_weights_and_get_sampling_client().result(WAIT_S))
    again = service.create_training_client_from_state_with_optimizer(state).result(WAIT_S)
    for training in (one, again):  # go on alike
        training.forward_backward(entropy(9), "cross_entropy")
        told.append([*training.optim_step(ADAM).result(WAIT_S).metrics.values()])
    assert told[-1] == pytest.approx(told[-2], rel=1e-5)
    for name, training in (("one", one), ("other", other), ("again", again)):
        told.append(weights(server, training, name))
    service.close("success").result(WAIT_S)
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halves")
    tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def samplers(folder: Path) -> Iterator[list[InferenceServer]]:
    base = open_base(str(folder / "model"), device="cpu", dtype="float32", threads=1)
    with inference_servers(base, 2) as servers:
        yield servers


@pytest.fixture(scope="module", params=HALVES)
def server(
    request: pytest.FixtureRequest, folder: Path, samplers: list[InferenceServer]
) -> Iterator[TinkerServer]:
    settings: dict[str, Any] = HALVES[request.param] | {
        "root": folder / request.param.replace(" ", "-"),
        "sampler_urls": tuple(there.url for there in samplers),
        "student_topk": 3,
    }
    with wire_server(folder, device="cpu", **settings) as running:
        yield running


def rank_of_other(server: TinkerServer) -> int:
    return 4 if split(server) else 2


def split(server: TinkerServer) -> bool:
    learning: Any = server.service.shared.backend.learning
    return learning._config.shard == "on"


@pytest.mark.slow
def test_a_learner_on_ranks_and_samplers_over_http_give_the_same_numbers(
    server: TinkerServer, folder: Path, samplers: list[InferenceServer]
) -> None:
    local, rank = server.service.shared.config.local, rank_of_other(server)
    assert split(server) == (local.shard == "on")
    with wire_server(folder, root=folder / f"alone-{rank}-{server.url[-5:]}") as alone:
        expected = life(alone, rank)
    got = life(server, rank)
    assert len(got) == len(expected)
    for mine, right in zip(got, expected, strict=True):
        if isinstance(right[0], list | int):
            assert mine == right
        else:
            assert mine == pytest.approx(right, abs=2e-4, rel=1e-3)
    assert all(there.log.prompts for there in samplers), "both servers have sampled"


@pytest.mark.slow
def test_a_learner_that_dies_takes_its_models_and_not_the_server(server: TinkerServer) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    training = lora(service, 1)
    training.forward_backward(entropy(1), "cross_entropy")
    training.optim_step(ADAM).result(WAIT_S)
    state = training.save_state("before").result(WAIT_S).path
    right = rows(training.forward(entropy(2), "cross_entropy").result(WAIT_S))
    for pid in rank_pids(server.service.shared.config.local.root):
        kill(pid)
    for sentence in ("was killed by SIGKILL", "load a state first"):
        with pytest.raises(tinker.RequestFailedError, match=sentence) as failed:
            training.forward(entropy(2), "cross_entropy").result(WAIT_S)
        assert failed.value.category.value == "server"
    again = service.create_training_client_from_state(state).result(WAIT_S)
    told = rows(again.forward(entropy(2), "cross_entropy").result(WAIT_S))
    assert told == pytest.approx(right, abs=1e-5)
    service.close("success").result(WAIT_S)


@pytest.mark.slow
def test_samplers_over_http_serve_what_this_process_learns(
    folder: Path, samplers: list[InferenceServer]
) -> None:
    """A path that is overwritten while it is sampled gets another name there."""
    urls = tuple(there.url for there in samplers)
    with ExitStack() as stack:
        alone = stack.enter_context(wire_server(folder, root=folder / "embedded"))
        pool = stack.enter_context(
            wire_server(folder, root=folder / "pool", sampler_urls=urls, student_topk=3)
        )
        seen: list[list[Any]] = []
        for server in (alone, pool):
            service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
            training = lora(service, 1)
            told: list[Any] = []
            for salt in range(2):
                training.forward_backward(entropy(salt), "cross_entropy")
                training.optim_step(ADAM).result(WAIT_S)
                path = training.save_state("same", overwrite=True).result(WAIT_S).path
                told += drawn(service.create_sampling_client(model_path=path).result(WAIT_S))
            seen.append(told)
            service.close("success").result(WAIT_S)
            assert server.service.samplers.open_count == 0
            assert not list(server.store.serving("x").parent.iterdir())
    for mine, right in zip(*seen, strict=True):
        exact = isinstance(right[0], list | int)
        assert mine == (right if exact else pytest.approx(right, abs=1e-4))
    assert seen[0][1] != seen[0][6], "the second version is another one"
