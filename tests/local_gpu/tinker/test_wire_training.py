"""Training over the wire, through the unmodified SDK: numbers against full logits and autograd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from local_gpu.tinker.store import Place
from tests.support.backends import VOCABULARY
from tests.support.models import FAMILIES, tiny_of
from tests.support.tinker import KEY, NAME, TinkerServer, wire_server

# peft 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

Adapter = dict[str, torch.Tensor]
SCALE = 1e6
PLAIN = tinker.AdamParams(learning_rate=SCALE, eps=SCALE, beta2=0.95)
"""Adam whose first step moves each weight by -g / (1 + |g| / SCALE): as good as by -g."""
WARM = tinker.AdamParams(learning_rate=0.01, beta2=0.98, eps=1e-8)
WAIT_S = 180


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with wire_server(tmp_path_factory.mktemp("wire"), chunk_datums=2) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TinkerServer) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield service
    service.close("success").result(WAIT_S)


def lora(client: Any, **settings: Any) -> Any:
    wanted = {"rank": 4, "seed": 1, "train_unembed": False} | settings
    return client.create_lora_training_client(NAME, **wanted).result(WAIT_S)


def sequence(length: int, salt: int) -> list[int]:
    return [(salt * 17 + i * i * 5 + i * salt) % VOCABULARY for i in range(length)]


def datum(tokens: list[int], **arrays: Any) -> Any:
    model_input = tinker.ModelInput.from_ints(tokens)
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


def gspo_arrays(length: int, first: int, salt: int) -> dict[str, torch.Tensor]:
    """Arrays of a GSPO datum, whose ratio begins before the first advantage and leaves tokens
    out."""
    rows = torch.arange(length)
    mask = (rows >= max(0, first - 3)) & (rows % 4 != 1)
    return rl_arrays(length, first, salt) | {"sequence_ratio_mask": mask.float()}


def entropy_arrays(length: int, first: int, width: int | None) -> dict[str, torch.Tensor]:
    shape = (length,) if width is None else (length, width)
    ids = torch.arange(torch.tensor(shape).prod()).reshape(shape) * 11 % VOCABULARY
    weights = 0.1 * (torch.arange(ids.numel()).reshape(shape) % 5 - 2.0)
    weights[:first] = 0
    return {"target_tokens": ids, "weights": weights}


def dense(arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: tinker.TensorData.from_torch(value) for key, value in arrays.items()}


def adapter_of(server: TinkerServer, training: Any, name: str) -> tuple[Path, Adapter]:
    path = training.save_weights_external(name).result(WAIT_S).path
    folder = server.store.folder(Place.at(path))
    return folder, load_file(folder / "adapter_model.safetensors")


def warm_checkpoint(client: Any, **settings: Any) -> str:
    """A checkpoint whose B is not zero, so that A has gradients."""
    training = lora(client, **settings)
    arrays = entropy_arrays(20, 4, None)
    training.forward_backward([datum(sequence(20, 1), **arrays)], "cross_entropy")
    training.optim_step(WARM)
    return training.save_state("warm").result(WAIT_S).path


def gradient_of(server: TinkerServer, client: Any, path: str, passes: list[Any]) -> Adapter:
    """Gradient computed from the step that it makes, at the weights of a checkpoint."""
    training = client.create_training_client_from_state(path).result(WAIT_S)
    before = adapter_of(server, training, "before")[1]
    for data, loss, config in passes:
        training.forward_backward(data, loss, config)
    training.optim_step(PLAIN).result(WAIT_S)
    after = adapter_of(server, training, "after")[1]
    moved = {name: (after[name] - before[name]).double() for name in before}
    return {name: -step / (1 - step.abs() / SCALE) for name, step in moved.items()}


@pytest.mark.parametrize(
    "layers", [{}, {"train_attn": False, "train_mlp": False}], ids=["all", "head"]
)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3, tied"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_an_exported_head_is_right_in_stock_peft(
    family: str, layers: dict[str, bool], tmp_path: Path
) -> None:
    """Loaded, merged, and saved merged; the SDK trains the head unless told otherwise."""
    model = tiny_of(FAMILIES[family], tmp_path / "model")
    tokens = sequence(20, 1)
    with wire_server(tmp_path, model=str(model)) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = service.create_lora_training_client(NAME, rank=4, seed=1, **layers).result(
            WAIT_S
        )
        data = [datum(tokens[:-1], target_tokens=tokens[1:], weights=[1.0] * 19)]
        for _ in range(3):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(WARM).result(WAIT_S)
        done = training.forward(data, "cross_entropy").result(WAIT_S)
        wanted = done.loss_fn_outputs[0]["logprobs"].to_torch()
        folder, _ = adapter_of(server, training, "external")
        loaded = reference(server, folder)
        service.close("success").result(WAIT_S)

    def right(model: Any) -> None:
        with torch.no_grad():
            rows = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        got = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)

    right(loaded)
    merged = loaded.merge_and_unload()
    right(merged)
    merged.save_pretrained(tmp_path / "merged")
    right(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))


def reference(server: TinkerServer, folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(
        server.base.source, dtype=torch.float32, attn_implementation="eager"
    )
    return PeftModel.from_pretrained(base, folder, is_trainable=True).eval()


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
    if name == "cispo":
        return -(ratio.clamp(0.8, 1.2).detach() * gain * z).sum()
    if name == "gspo":
        whole = (z - q)[arrays["sequence_ratio_mask"] != 0].mean().exp().detach()
        ratio = whole * torch.exp(z - z.detach())
        return -torch.min(ratio * gain, ratio.clamp(0.5, 1.5) * gain).sum()
    if name == "dro":
        return -(z * gain - 0.5 * 0.1 * (z - q) ** 2).sum()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum()


CASES = {
    "ppo": ("ppo", lambda n, f, s: rl_arrays(n, f, s), None),
    "importance_sampling": ("importance_sampling", lambda n, f, s: rl_arrays(n, f, s), None),
    "cispo": ("cispo", lambda n, f, s: rl_arrays(n, f, s), None),
    "dro": ("dro", lambda n, f, s: rl_arrays(n, f, s), {"beta": 0.1}),
    "gspo": (
        "gspo",
        lambda n, f, s: gspo_arrays(n, f, s),
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    ),
    "cross_entropy": ("cross_entropy", lambda n, f, s: entropy_arrays(n, f, None), None),
    "cross_entropy dense [N, K]": ("cross_entropy", lambda n, f, s: entropy_arrays(n, f, 3), None),
    "cross_entropy CSR [N, K]": (
        "cross_entropy",
        lambda n, f, s: entropy_arrays(n, n - 4, 9),
        None,
    ),
}


FLAGS = {
    "as the SDK has them": {"train_unembed": True},
    "head alone": {"train_unembed": True, "train_mlp": False, "train_attn": False},
    "no MLP": {"train_mlp": False},
    "no attention": {"train_attn": False},
}


@pytest.mark.parametrize(
    ("case", "flags"),
    [*((case, {}) for case in CASES), *(("ppo", flags) for flags in FLAGS.values())],
    ids=[*CASES, *FLAGS],
)
def test_value_logprobs_and_gradient_equal_autograd_through_full_logits(
    server: TinkerServer, client: Any, case: str, flags: dict[str, bool]
) -> None:
    loss, make, config = CASES[case]
    sizes = [(40, 25, 2), (30, 0, 3), (21, 20, 4)]  # three datums are two chunks
    arrays = [make(*size) for size in sizes]
    encode = dense if "dense" in case else dict
    data = [
        datum(sequence(n, salt), **encode(a)) for (n, _, salt), a in zip(sizes, arrays, strict=True)
    ]
    if "CSR" in case:
        assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    path = warm_checkpoint(client, **flags)
    warm = client.create_training_client_from_state(path).result(WAIT_S)
    model = reference(server, adapter_of(server, warm, "warm-external")[0])
    rows = [model(torch.tensor([sequence(n, s)])).logits[0].log_softmax(-1) for n, _, s in sizes]
    losses = [reference_loss(loss, r, a) for r, a in zip(rows, arrays, strict=True)]
    sum(losses, torch.zeros(())).backward()

    told = warm.forward(data, loss, config).result(WAIT_S)
    assert told.metrics["loss:sum"] == pytest.approx(sum(x.item() for x in losses), rel=1e-4)
    for output, row, a in zip(told.loss_fn_outputs, rows, arrays, strict=True):
        ids = a["target_tokens"]
        wanted = row.gather(1, ids.reshape(len(ids), -1)).reshape(ids.shape)
        got = output["logprobs"].to_torch().reshape(output["logprobs"].shape)
        torch.testing.assert_close(got, wanted.detach(), atol=2e-4, rtol=1e-4)

    got = gradient_of(server, client, path, [(data, loss, config)])
    expected = {
        name.replace(".default", ""): p.grad.double()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert set(got) == set(expected)
    flat = torch.cat([expected[name].flatten() for name in sorted(expected)])
    error = torch.cat([got[n].flatten() for n in sorted(got)]) - flat
    assert flat.norm() > 0.1
    assert error.norm() < 2e-4 * flat.norm()


def test_models_of_one_shape_learn_in_one_module_and_do_not_see_one_another(
    server: TinkerServer, client: Any
) -> None:
    def learn(training: Any, salt: int, number: int) -> Any:
        arrays = entropy_arrays(20, 4, None)
        data = [datum(sequence(20, salt + number), **arrays)]
        return training.forward_backward(data, "cross_entropy").result(WAIT_S)

    alone: list[Adapter] = []
    for salt in (1, 2):
        training = lora(client, seed=salt)
        for number in range(3):
            learn(training, salt, number)
            training.optim_step(WARM).result(WAIT_S)
        alone.append(adapter_of(server, training, "alone")[1])
    both = [lora(client, seed=salt) for salt in (1, 2)]
    learning: Any = server.service.shared.backend.learning
    assert len({id(learning._models[training.model_id].module) for training in both}) == 1
    for number in range(3):
        for salt, training in enumerate(both, 1):  # gradients of both wait at once
            learn(training, salt, number)
        for training in both:
            training.optim_step(WARM).result(WAIT_S)
    for training, right in zip(both, alone, strict=True):
        got = adapter_of(server, training, "both")[1]
        assert all(torch.equal(got[name], right[name]) for name in right)


def test_a_head_that_was_trained_is_saved_and_sampled(server: TinkerServer, client: Any) -> None:
    """The SDK's own defaults are used."""
    training = client.create_lora_training_client(NAME, rank=4, seed=1).result(WAIT_S)
    tokens = sequence(20, 1)
    data = [datum(tokens[:-1], target_tokens=tokens[1:], weights=[1.0] * 19)]
    losses = []
    for _ in range(3):
        done = training.forward_backward(data, "cross_entropy").result(WAIT_S)
        losses.append(done.metrics["loss:sum"])
        training.optim_step(WARM).result(WAIT_S)
    assert losses == sorted(losses, reverse=True)
    trained = training.forward(data, "cross_entropy").result(WAIT_S).loss_fn_outputs[0]["logprobs"]
    adapter = adapter_of(server, training, "external")[1]
    assert adapter["base_model.model.lm_head.lora_B.weight"].norm() > 0

    path = training.save_state("headed").result(WAIT_S).path
    info = tinker.RestClient(base_url=server.url, api_key=KEY).get_weights_info_by_tinker_path(path)
    told = info.result(WAIT_S)
    assert (told.train_unembed, told.train_mlp, told.train_attn) == (True, True, True)
    again = client.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
    for one in (training, again):
        sampler = one.save_weights_and_get_sampling_client().result(WAIT_S)
        scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result(WAIT_S)
        assert scored[1:] == pytest.approx(trained.data, abs=2e-4)
        prompt, params = (
            tinker.ModelInput.from_ints(tokens[:8]),
            tinker.SamplingParams(max_tokens=8),
        )
        drawn = sampler.sample(prompt, 1, params).result(WAIT_S).sequences[0]
        whole = [*tokens[:8], *drawn.tokens]
        shifted = datum(whole[:-1], target_tokens=whole[1:], weights=[1.0] * (len(whole) - 1))
        own = one.forward([shifted], "cross_entropy").result(WAIT_S).loss_fn_outputs[0]["logprobs"]
        assert drawn.logprobs == pytest.approx(own.data[7:], abs=2e-4)


def test_forward_leaves_no_gradient(server: TinkerServer, client: Any) -> None:
    training = lora(client)
    data = [datum(sequence(20, 1), **entropy_arrays(20, 4, None))]
    told = training.forward(data, "cross_entropy").result(WAIT_S)
    again = training.forward_backward(data, "cross_entropy").result(WAIT_S)
    assert told.metrics == pytest.approx(again.metrics, rel=1e-5)
    other = lora(client)
    other.forward(data, "cross_entropy").result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        other.optim_step(WARM).result(WAIT_S)


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
            with pytest.raises(tinker.RequestFailedError, match=r"void.*outside 0\.\.63"):
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
    "unknown loss": ("dpo", ENTROPY, None, r"'dpo'.*cross_entropy"),
    "a loss that is not public": ("stable_reinforce", RL, None, "not published"),
    "no ratio": (
        "gspo",
        RL | {"sequence_ratio_mask": [0.0] * 3},
        None,
        "sequence_ratio_mask marks no token",
    ),
    "no mask": ("gspo", RL, None, "needs sequence_ratio_mask"),
    "unknown setting": ("ppo", RL, {"clip_range": 0.2}, r"'clip_range'.*clip_high"),
    "text setting": ("ppo", RL, {"clip_low_threshold": "low"}, r"clip_low_threshold.*number"),
    "crossed bounds": (
        "ppo",
        RL,
        {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0},
        "absolute ratios",
    ),
    "missing array": (
        "ppo",
        {k: v for k, v in RL.items() if k != "advantages"},
        None,
        "advantages",
    ),
    "missing weights": ("cross_entropy", {"target_tokens": [1, 2, 3]}, None, "needs weights"),
    "extra array": ("ppo", RL | {"mask": f32([1.0] * 3)}, None, "no mask"),
    "short array": ("ppo", RL | {"advantages": [1.0, 1.0]}, None, r"advantages has shape \(2,\)"),
    "short targets": ("cross_entropy", ENTROPY | {"target_tokens": [1, 2]}, None, "2 rows for 3"),
    "foreign id": (
        "cross_entropy",
        ENTROPY | {"target_tokens": [1, -1, 3]},
        None,
        r"target.*0\.\.63",
    ),
    "nan": ("ppo", RL | {"advantages": [1.0, float("nan"), 1.0]}, None, "advantages.*not finite"),
    "infinite ratio": ("importance_sampling", RL | {"logprobs": [-500.0] * 3}, None, "loss is"),
    "2-D targets": (
        "ppo",
        {key: torch.ones(3, 2, dtype=torch.int64 if "tok" in key else None) for key in RL},
        None,
        "one target per token",
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


def test_a_custom_loss_of_the_sdk_works(client: Any) -> None:
    training = lora(client)
    data = [datum(sequence(20, 1), target_tokens=sequence(20, 2), weights=[1.0] * 20)]

    def squared(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((row**2).sum() for row in logprobs), {}

    losses = []
    for _ in range(3):
        losses.append(training.forward_backward_custom(data, squared).result(WAIT_S))
        training.optim_step(WARM).result(WAIT_S)
    assert (
        losses[-1].loss_fn_outputs[0]["logprobs"].data
        != losses[0].loss_fn_outputs[0]["logprobs"].data
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": 0}, r"1\.\.256"),
        ({"rank": 257}, r"1\.\.256"),
        ({"optimizer": tinker.DimuonOptimizerConfig()}, "dimuon.*adamw"),
        ({"base_model": "Qwen/Qwen3-8B"}, "serves tiny"),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_name(
    client: Any, settings: dict[str, Any], sentence: str
) -> None:
    wanted = {"base_model": NAME, "rank": 4, "train_unembed": False} | settings
    with pytest.raises(tinker.APIStatusError, match=sentence):
        client.create_lora_training_client(**wanted).result(WAIT_S)
