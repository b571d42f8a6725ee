"""Training over the wire, through the unmodified SDK: tables, heads, mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file

from tests.local_gpu.learners import Gradient
from tests.local_gpu.tinker.test_wire_store import lora
from tests.support.backends import VOCABULARY
from tests.support.local_reference import sequence
from tests.support.tinker import NAME, TinkerServer

# peft 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

WARM = tinker.AdamParams(learning_rate=0.01, beta2=0.98, eps=1e-8)
WAIT_S = 180


def datum(tokens: Sequence[int], **arrays: Any) -> Any:
    model_input = tinker.ModelInput.from_ints(list(tokens))
    return tinker.Datum(model_input=model_input, loss_fn_inputs=arrays)


def entropy_arrays(length: int, first: int, width: int | None) -> dict[str, torch.Tensor]:
    shape = (length,) if width is None else (length, width)
    ids = torch.arange(torch.tensor(shape).prod()).reshape(shape) * 11 % VOCABULARY
    weights = 0.1 * (torch.arange(ids.numel()).reshape(shape) % 5 - 2.0)
    weights[:first] = 0
    return {"target_tokens": ids, "weights": weights}


def dense(arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: tinker.TensorData.from_torch(value) for key, value in arrays.items()}


def adapter_of(server: TinkerServer, training: Any, name: str) -> Gradient:
    path = training.save_weights_for_sampler(name).result(WAIT_S).path
    return load_file(server.store.folder(path) / "adapter_model.safetensors")


def test_a_table_of_targets_is_read_in_every_form(client: Any) -> None:
    """Its columns stand for themselves; what a target weighs is checked by the contract suites."""
    training, tokens = lora(client), sequence(40, 2)
    table = entropy_arrays(40, 36, 9)
    columns = [{name: array[:, at] for name, array in table.items()} for at in range(9)]
    data = [datum(tokens, **arrays) for arrays in (table, dense(table), *columns)]
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    told = [training.forward([one], "cross_entropy").result(WAIT_S) for one in data]
    outputs = [one.loss_fn_outputs[0]["logprobs"] for one in told]
    logprobs = [output.to_torch().reshape(output.shape)[36:] for output in outputs]
    expected = torch.stack(logprobs[2:], dim=1)
    losses = [one.metrics["loss:sum"] for one in told]
    for read, loss in zip(logprobs[:2], losses[:2], strict=True):
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=0)
        assert loss == pytest.approx(sum(losses[2:]), abs=1e-4)
        assert loss == pytest.approx(-float((read * table["weights"][36:]).sum()), abs=1e-4)


def test_a_head_that_was_trained_is_saved_and_sampled(server: TinkerServer, client: Any) -> None:
    """The SDK's own defaults are used."""
    training = client.create_lora_training_client(NAME, rank=4, seed=1).result(WAIT_S)
    tokens = list(sequence(20, 1))
    data = [datum(tokens[:-1], target_tokens=tokens[1:], weights=[1.0] * 19)]
    losses = []
    for _ in range(3):
        done = training.forward_backward(data, "cross_entropy").result(WAIT_S)
        losses.append(done.metrics["loss:sum"])
        training.optim_step(WARM).result(WAIT_S)
    assert losses == sorted(losses, reverse=True)
    trained = training.forward(data, "cross_entropy").result(WAIT_S).loss_fn_outputs[0]["logprobs"]
    adapter = adapter_of(server, training, "served")
    assert adapter["base_model.model.lm_head.lora_B.weight"].norm() > 0

    path = training.save_state("headed").result(WAIT_S).path
    with pytest.raises(tinker.RequestFailedError, match="train_unembed"):
        training.save_weights_external("export").result(WAIT_S)
    again = client.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
    sampler = again.save_weights_and_get_sampling_client().result(WAIT_S)
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result(WAIT_S)
    assert scored[1:] == pytest.approx(trained.data, abs=2e-4)
    begin, params = tinker.ModelInput.from_ints(tokens[:8]), tinker.SamplingParams(max_tokens=8)
    drawn = sampler.sample(begin, 1, params).result(WAIT_S).sequences[0]
    whole = [*tokens[:8], *drawn.tokens]
    shifted = datum(whole[:-1], target_tokens=whole[1:], weights=[1.0] * (len(whole) - 1))
    own = again.forward([shifted], "cross_entropy").result(WAIT_S).loss_fn_outputs[0]["logprobs"]
    assert drawn.logprobs == pytest.approx(own.data[7:], abs=2e-4)


def test_forward_leaves_no_gradient(client: Any) -> None:
    training = lora(client)
    data = [datum(sequence(20, 1), **entropy_arrays(20, 4, None))]
    told = training.forward(data, "cross_entropy").result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        training.optim_step(WARM).result(WAIT_S)
    again = training.forward_backward(data, "cross_entropy").result(WAIT_S)
    assert told.metrics == pytest.approx(again.metrics, rel=1e-5)


def test_a_forward_backward_that_failed_voids_the_step_and_nothing_else(
    server: TinkerServer, client: Any
) -> None:
    good = datum(sequence(20, 1), **entropy_arrays(20, 4, None))
    bad = datum([VOCABULARY] * 20, **entropy_arrays(20, 4, None))
    trained = []
    for spoil in (False, True):
        training = lora(client)
        if spoil:
            training.forward_backward([good], "cross_entropy").result(WAIT_S)
            with pytest.raises(tinker.RequestFailedError, match=r"datum 0.*outside 0\.\.63"):
                training.forward_backward([bad], "cross_entropy").result(WAIT_S)
            with pytest.raises(tinker.RequestFailedError, match="step is void"):
                training.optim_step(WARM).result(WAIT_S)
        training.forward_backward([good], "cross_entropy")
        training.optim_step(WARM).result(WAIT_S)
        trained.append(adapter_of(server, training, "trained"))
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def f32(rows: list[float]) -> Any:
    return tinker.TensorData(data=rows, dtype="float32", shape=[len(rows)])


ENTROPY = {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]}
RL = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
MISTAKES = {
    "unknown loss": ("cispo", RL, None, r"'cispo'.*cross_entropy"),
    "unknown setting": ("ppo", RL, {"clip_range": 0.2}, r"'clip_range'.*clip_high"),
    "text setting": ("ppo", RL, {"clip_low_threshold": "low"}, "clip_low_threshold is 'low'"),
    "missing array": ("ppo", {k: v for k, v in RL.items() if k != "advantages"}, None, "advant"),
    "extra array": ("ppo", RL | {"mask": f32([1.0] * 3)}, None, "not .*'mask'"),
    "short array": ("ppo", RL | {"advantages": [1.0, 1.0]}, None, r"advantages has shape \(2,\)"),
    "short targets": ("cross_entropy", ENTROPY | {"target_tokens": [1, 2]}, None, "3 input tokens"),
    "foreign id": (
        "cross_entropy",
        ENTROPY | {"target_tokens": [1, -1, 3]},
        None,
        r"target.*0\.\.63",
    ),
    "nan": ("ppo", RL | {"advantages": [1.0, float("nan"), 1.0]}, None, "loss is nan"),
    "2-D targets": (
        "ppo",
        {key: torch.ones(3, 2, dtype=torch.int64 if "tok" in key else None) for key in RL},
        None,
        r"shape \(3, 2\)",
    ),
    "a table beyond all memory": (
        "cross_entropy",
        {
            key: tinker.TensorData(
                data=[1],
                dtype="int64" if "tok" in key else "float32",
                shape=[3, 1 << 40],
                sparse_crow_indices=[0, 1, 1, 1],
                sparse_col_indices=[0],
            )
            for key in ENTROPY
        },
        None,
        "one request may have 4194304",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(client: Any, mistake: str) -> None:
    loss, arrays, config, sentence = MISTAKES[mistake]
    training = lora(client)
    failing = training.forward_backward([datum([5, 6, 7], **arrays)], loss, config)
    with pytest.raises(tinker.RequestFailedError, match=sentence) as failed:
        failing.result(WAIT_S)
    assert failed.value.category.value == "user"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": 0}, "rank of 1 or more"),
        ({"train_mlp": False}, "All layers are trained"),
        ({"base_model": "Qwen/Qwen3-8B"}, "serves tiny"),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_name(
    client: Any, settings: dict[str, Any], sentence: str
) -> None:
    wanted = {"base_model": NAME, "rank": 4, "train_unembed": False} | settings
    with pytest.raises(tinker.APIStatusError, match=sentence):
        client.create_lora_training_client(**wanted).result(WAIT_S)
