"""Sampling over the wire, through the unmodified SDK."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.support.backends import CONTEXT, VOCABULARY
from tests.support.tinker import NAME, TinkerServer

WAIT_S = 180
PROMPT = [(i * i * 5 + 3 * i + 1) % VOCABULARY for i in range(70)]


@pytest.fixture(scope="module")
def base(client: Any) -> Any:
    return client.create_sampling_client(base_model=NAME).result(WAIT_S)


@pytest.fixture(scope="module")
def training(client: Any) -> Any:
    wanted = {"rank": 4, "seed": 1, "train_unembed": False}
    return client.create_lora_training_client(NAME, **wanted).result(WAIT_S)


def step(training: Any, salt: int = 0) -> None:
    targets = {"target_tokens": PROMPT[1:31], "weights": [1.0 + salt] * 30}
    datum = tinker.Datum(tinker.ModelInput.from_ints(PROMPT[:30]), targets)
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(WAIT_S)


def sample(sampler: Any, prompt: list[int] = PROMPT, n: int = 1, **settings: Any) -> Any:
    asked = {
        key: settings.pop(key)
        for key in list(settings)
        if "logprobs" in key or key == "prompt_alt_tokens_k"
    }
    params = tinker.SamplingParams(**({"max_tokens": 12, "seed": 5} | settings))
    model_input = tinker.ModelInput.from_ints(prompt)
    return sampler.sample(model_input, n, params, **asked).result(WAIT_S)


def test_a_sampler_goes_on_in_another_process(base: Any) -> None:
    there = pickle.loads(pickle.dumps(base))
    assert sample(there).sequences[0].tokens == sample(base).sequences[0].tokens


def test_more_samplers_than_stay_open_answer_each_with_its_own_weights(
    client: Any, training: Any
) -> None:
    samplers = []
    for number in range(6):
        step(training, number)
        path = training.save_weights_for_sampler(f"open-{number}").result(WAIT_S).path
        samplers.append(client.create_sampling_client(model_path=path).result(WAIT_S))
    alone = [sample(s, max_tokens=50).sequences[0].tokens for s in samplers]
    params = tinker.SamplingParams(max_tokens=50, seed=5)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    futures = [s.sample(prompt, 1, params) for s in samplers for _ in range(2)]
    got = [f.result(WAIT_S).sequences[0].tokens for f in futures]
    assert got == [tokens for tokens in alone for _ in range(2)]


def test_a_sampler_without_a_name_is_kept_as_long_as_it_is_open(
    server: TinkerServer, training: Any
) -> None:
    samplers = []
    for number in range(6):
        step(training, number)
        samplers.append(training.save_weights_and_get_sampling_client().result(WAIT_S))
        sample(samplers[-1])
    assert len(list(server.store.root.glob("*/sampler_weights/_nameless*"))) <= 4
    assert sample(samplers[-1]).sequences[0].tokens
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        sample(samplers[0])


REFUSED = {
    "full context": ({"prompt": PROMPT * 29, "max_tokens": 19}, rf"context.*{CONTEXT}.*2030.*19"),
    "empty prompt": ({"prompt": []}, "empty"),
    "foreign token": ({"prompt": [VOCABULARY]}, r"0\.\.63"),
    "stop string": ({"stop": "END"}, "token ids"),
    "alternatives": ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    "cold": ({"temperature": -1.0}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "top_k": ({"top_k": 0}, "top_k"),
    "long suffix": (
        {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 70},
        "70 of 69 rows",
    ),
    "more candidates than ids": ({"topk_prompt_logprobs": VOCABULARY + 1}, "with 65 candidates"),
    "the whole vocabulary over a long prompt": (
        {"prompt": PROMPT * 20, "topk_prompt_logprobs": 3000},
        "this server gives 4194304 at once",
    ),
    "many candidates of many replies": (
        {"max_tokens": 1000, "n": 100, "topk_sample_logprobs": 60},
        "this server gives 4194304 at once",
    ),
    "targets before the suffix": (
        {
            "include_prompt_logprobs": True,
            "prompt_logprobs_last_n": 5,
            "target_prompt_logprobs": tinker.TensorData.from_numpy(np.ones((69, 1), np.int64)),
        },
        "ids in the last 5 rows",
    ),
    "short targets": (
        {"target_prompt_logprobs": tinker.TensorData.from_numpy(np.zeros((3, 2), np.int64))},
        r"\[69, K\]",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_not_served_is_refused_by_name(base: Any, mistake: str) -> None:
    asked, sentence = REFUSED[mistake]
    with pytest.raises(tinker.RequestFailedError, match=sentence) as refused:
        sample(base, **asked)
    assert refused.value.category.value == "user"


def test_an_unknown_path_is_refused(client: Any, tmp_path: Path) -> None:
    for path in ("tinker://a:train:0/weights/x", "tinker://../weights/x", "tinker://a/b"):
        with pytest.raises(tinker.APIStatusError, match=r"path|checkpoint"):
            client.create_sampling_client(model_path=path).result(WAIT_S)
