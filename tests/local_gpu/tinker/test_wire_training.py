"""Training over the wire, through the unmodified SDK: numbers against full logits and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file

from tests.local_gpu.learners import Gradient, apart
from tests.support.backends import VOCABULARY
from tests.support.local_reference import reference, sequence
from tests.support.tinker import NAME, TinkerServer

# peft 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

SCALE = 1e6
PLAIN = tinker.AdamParams(learning_rate=SCALE, eps=SCALE, beta2=0.95)
"""Adam whose first step moves each weight by -g / (1 + |g| / SCALE): as good as by -g."""
WARM = tinker.AdamParams(learning_rate=0.01, beta2=0.98, eps=1e-8)
WAIT_S = 180


def lora(client: Any, **settings: Any) -> Any:
    wanted = {"rank": 4, "seed": 1, "train_unembed": False} | settings
    return client.create_lora_training_client(NAME, **wanted).result(WAIT_S)


def datum(tokens: Sequence[int], **arrays: Any) -> Any:
    model_input = tinker.ModelInput.from_ints(list(tokens))
    return tinker.Datum(model_input=model_input, loss_fn_inputs=arrays)


def rl_arrays(length: int, first: int, salt: int) -> dict[str, torch.Tensor]:
    """Arrays of an RL datum: targets are not the shifted input; rows before `first` are empty."""
    rows = torch.arange(length)
    learns = rows >= first
    return {
        "target_tokens": (rows * 7 + salt) % VOCABULARY,
        "logprobs": torch.where(learns, -4.0 - 0.3 * ((rows + salt) % 5), 0.0),
        "advantages": torch.where(learns, 0.1 * ((rows * salt) % 7 - 3), 0.0),
    }


def entropy_arrays(length: int, first: int, width: int | None) -> dict[str, torch.Tensor]:
    shape = (length,) if width is None else (length, width)
    ids = torch.arange(torch.tensor(shape).prod()).reshape(shape) * 11 % VOCABULARY
    weights = 0.1 * (torch.arange(ids.numel()).reshape(shape) % 5 - 2.0)
    weights[:first] = 0
    return {"target_tokens": ids, "weights": weights}


def dense(arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: tinker.TensorData.from_torch(value) for key, value in arrays.items()}


def adapter_of(server: TinkerServer, training: Any, name: str) -> tuple[Path, Gradient]:
    path = training.save_weights_for_sampler(name).result(WAIT_S).path
    folder = server.store.folder(path)
    return folder, load_file(folder / "adapter_model.safetensors")


def warm_checkpoint(client: Any, **settings: Any) -> str:
    """A checkpoint whose B is not zero, so that A has gradients."""
    training = lora(client, **settings)
    arrays = entropy_arrays(20, 4, None)
    training.forward_backward([datum(sequence(20, 1), **arrays)], "cross_entropy")
    training.optim_step(WARM)
    return training.save_state("warm").result(WAIT_S).path


def gradient_of(
    server: TinkerServer, client: Any, path: str, data: list[Any], loss: str
) -> Gradient:
    """Gradient computed from the step that it makes, at the weights of a checkpoint."""
    training = client.create_training_client_from_state(path).result(WAIT_S)
    before = adapter_of(server, training, "before")[1]
    training.forward_backward(data, loss)
    training.optim_step(PLAIN).result(WAIT_S)
    after = adapter_of(server, training, "after")[1]
    moved = {name: (after[name] - before[name]).double() for name in before}
    return {name: -step / (1 - step.abs() / SCALE) for name, step in moved.items()}


def reference_loss(name: str, rows: torch.Tensor, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
    """The formulas of TINKER.md A2, over all rows of the full logits."""
    ids = arrays["target_tokens"]
    z = rows.gather(1, ids.reshape(len(ids), -1)).reshape(ids.shape)
    if name == "cross_entropy":
        return -(z * arrays["weights"]).sum()
    q, gain = arrays["logprobs"], arrays["advantages"]
    ratio = torch.exp(z - q)
    if name == "importance_sampling":
        return -(ratio * gain).sum()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum()


CASES = {
    "ppo": ("ppo", lambda n, f, s: rl_arrays(n, f, s)),
    "importance_sampling": ("importance_sampling", lambda n, f, s: rl_arrays(n, f, s)),
    "cross_entropy": ("cross_entropy", lambda n, f, s: entropy_arrays(n, f, None)),
    "cross_entropy dense [N, K]": ("cross_entropy", lambda n, f, s: entropy_arrays(n, f, 3)),
    "cross_entropy CSR [N, K]": ("cross_entropy", lambda n, f, s: entropy_arrays(n, n - 4, 9)),
}


@pytest.mark.parametrize(
    ("case", "head"),
    [*((case, False) for case in CASES), ("ppo", True)],
    ids=[*CASES, "with the head, as the SDK has it"],
)
def test_value_logprobs_and_gradient_equal_autograd_through_full_logits(
    server: TinkerServer, client: Any, case: str, head: bool
) -> None:
    loss, make = CASES[case]
    sizes = [(40, 25, 2), (30, 0, 3), (21, 20, 4)]
    arrays = [make(*size) for size in sizes]
    encode = dense if "dense" in case else dict
    data = [
        datum(sequence(n, salt), **encode(a)) for (n, _, salt), a in zip(sizes, arrays, strict=True)
    ]
    if "CSR" in case:
        assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    path = warm_checkpoint(client, train_unembed=head)
    warm = client.create_training_client_from_state(path).result(WAIT_S)
    model = reference(Path(server.base.source), adapter_of(server, warm, "warm")[0])
    rows = [model(torch.tensor([sequence(n, s)])).logits[0].log_softmax(-1) for n, _, s in sizes]
    losses = [reference_loss(loss, r, a) for r, a in zip(rows, arrays, strict=True)]
    sum(losses, torch.zeros(())).backward()

    told = warm.forward(data, loss).result(WAIT_S)
    assert told.metrics["loss:sum"] == pytest.approx(sum(x.item() for x in losses), rel=1e-4)
    for output, row, a in zip(told.loss_fn_outputs, rows, arrays, strict=True):
        ids = a["target_tokens"]
        wanted = row.gather(1, ids.reshape(len(ids), -1)).reshape(ids.shape)
        got = output["logprobs"].to_torch().reshape(output["logprobs"].shape)
        torch.testing.assert_close(got, wanted.detach(), atol=2e-4, rtol=1e-4)

    expected = {
        name.replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert apart(gradient_of(server, client, path, data, loss), expected) < 2e-4


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
    adapter = adapter_of(server, training, "served")[1]
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
        trained.append(adapter_of(server, training, "trained")[1])
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
