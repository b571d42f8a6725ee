"""The local trainer against an independent reference: peft's own model, full logits, autograd."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import AsyncIterator, Callable
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from local_gpu.config import LocalConfig
from local_gpu.learn import learning, memory
from local_gpu.learn.memory import passes_in_memory
from local_gpu.model.load import load_base
from local_gpu.model.lora import clone
from local_gpu.plan.memory import DEFAULT_TOKENS, ModelSize
from local_gpu.trainer import LocalTrainer
from local_gpu.tree import kernels
from tests.support.backends import start_local, tiny_model
from tests.support.local_reference import (
    WARM,
    adapter_of,
    full_logprobs,
    reference,
    reference_loss,
    rl_datum,
    warmed,
)
from tinker_claw.errors import BackendError, ClawError, ConfigError, ModelFileError
from tinker_claw.types import Adam, LossPass

# peft 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[LocalTrainer]:
    trainer = await start_local(tmp_path)
    yield trainer
    await trainer.aclose()


async def test_the_step_is_adam_with_the_gradient_clipped_by_its_global_norm(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    before = await adapter_of(trainer, tmp_path / "before")
    model = reference(tmp_path / "model", tmp_path / "before")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=0.02, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.1
    )
    adam = Adam(0.02, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)
    for salt in (1, 2):
        datum = rl_datum(30, 10, salt)
        optimizer.zero_grad()
        reference_loss("ppo", full_logprobs(model, datum.tokens)[9:], datum).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        report = await trainer.train_step([LossPass("ppo", (datum,))], adam)
        assert report.grad_norm is not None
        assert report.grad_norm > 0.5
    after = await adapter_of(trainer, tmp_path / "after")
    own = dict(model.named_parameters())
    for name, tensor in after.items():
        wanted = own[name.replace(".weight", ".default.weight")].detach()
        torch.testing.assert_close(tensor, wanted, atol=2e-4, rtol=1e-3)
    assert any(not torch.equal(after[n], before[n]) for n in after)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc returns memory when asked"
)
async def test_memory_that_is_free_goes_back_to_the_system_with_a_step(
    trainer: LocalTrainer,
) -> None:
    """glibc keeps what lies between blocks in use: a small model held 18 GB, and used 3."""
    blocks = [bytearray(b"x") * 100_000 for _ in range(3000)]
    in_use = blocks[::100]
    del blocks
    before = resident()
    await trainer.train_step([LossPass("ppo", (rl_datum(30, 10, 1),))], Adam(1e-2))
    assert resident() < before - 200_000_000
    assert len(in_use) == 30


PLENTY, TIGHT = 1 << 40, 1 << 24
"""Free bytes with which activations are kept, or computed again."""


async def test_checkpointed_activations_are_computed_again_and_give_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    counts: list[int] = []
    attend = kernels.attend

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return attend(*arguments)

    monkeypatch.setattr(kernels, "attend", counted)
    adapters: list[dict[str, Any]] = []
    for free in (PLENTY, TIGHT):
        monkeypatch.setattr(learning, "free_bytes", lambda free=free: free)
        folder = tmp_path / str(free)
        trainer = await start_local(folder)
        before = len(calls)
        for salt in (1, 2):
            await trainer.train_step([LossPass("ppo", (rl_datum(60, 20, salt),))], WARM)
        counts.append(len(calls) - before)
        adapters.append(await adapter_of(trainer, folder / "export"))
        await trainer.aclose()
    plain, checkpointed = adapters
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert counts[1] == 2 * counts[0]


async def test_old_states_are_pruned_but_never_the_one_that_was_loaded(tmp_path: Path) -> None:
    draft = tmp_path / "run" / "adapters" / ".draft-x1"
    draft.mkdir(parents=True)
    (draft / "adapter_model.safetensors").write_bytes(b"half")
    trainer = await start_local(tmp_path, keep_states=2)
    assert not draft.exists(), "what a killed process left half written"
    loaded = await trainer.save_state("origin")
    await trainer.load_state(loaded)
    refs = [await trainer.save_state(f"step {i}") for i in range(4)]
    kept = {p.name for p in (tmp_path / "run" / "states").iterdir()}
    assert kept == {loaded, *refs[-2:]}
    with pytest.raises(BackendError, match="older"):
        await trainer.load_state(refs[0])
    await trainer.aclose()


def test_a_clone_shares_every_tensor_and_no_module(tmp_path: Path) -> None:
    base = load_base(
        str(tiny_model(tmp_path)), device=torch.device("cpu"), dtype=torch.float32
    ).module
    copy = clone(base)
    tensors = zip(
        chain(base.parameters(), base.buffers()),
        chain(copy.parameters(), copy.buffers()),
        strict=True,
    )
    assert all(a is b for a, b in tensors)
    assert not {id(m) for m in base.modules()} & {id(m) for m in copy.modules()}


async def test_an_adapter_of_another_base_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    ref = (await trainer.publish()).ref
    state = await trainer.save_state("s")
    await trainer.aclose()
    other = LocalConfig(
        model=str(tiny_model(tmp_path / "other", seed=1)), root=tmp_path / "run", rank=4, alpha=8
    )
    stranger = await LocalTrainer.start(other)
    with pytest.raises(BackendError, match="another base model"):
        await stranger.open(ref)
    with pytest.raises(BackendError, match="another base model"):
        await stranger.load_state(state)
    await stranger.aclose()
    narrow = await start_local(tmp_path, rank=2)
    await narrow.open(ref)
    with pytest.raises(BackendError, match="another rank"):
        await narrow.load_state(state)
    louder = await start_local(tmp_path, alpha=16)
    with pytest.raises(BackendError, match="alpha"):
        await louder.load_state(state)
    await louder.aclose()
    weights = tmp_path / "run" / "adapters" / ref / "adapter_model.safetensors"
    settings = weights.with_name("adapter_config.json")
    for file, damaged in ((settings, b"null"), (weights, weights.read_bytes()[:100])):
        file.write_bytes(damaged)
        with pytest.raises(BackendError, match="corrupt"):
            await narrow.open(ref)
    await narrow.aclose()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors"])
async def test_a_state_that_is_not_finite_is_refused(tmp_path: Path, file: str) -> None:
    """What was loaded before goes on."""
    trainer = await warmed(await start_local(tmp_path))
    state = await trainer.save_state("s")
    published = await trainer.publish()
    for path in (tmp_path / "run").rglob(file):
        tensors = load_file(path)
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata()
        name = max(name for name in tensors if tensors[name].dim() > 1)
        tensors[name][0, 0] = float("nan")
        save_file(tensors, path, metadata)
    with pytest.raises(BackendError, match="not finite"):
        await trainer.load_state(state)
    if file.startswith("adapter"):
        with pytest.raises(BackendError, match="not finite"):
            await trainer.open(published.ref)
    await trainer.publish()
    await trainer.aclose()


def changed(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


MODELS: dict[str, tuple[Callable[[Path], object], type[ClawError], str]] = {
    "no files": (rmtree, ModelFileError, "model"),
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 1000),
        ModelFileError,
        "model",
    ),
    "a layer is missing": (
        lambda folder: changed(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        ModelFileError,
        r"layers\.2",
    ),
    "settings that contradict one another": (
        lambda folder: changed(folder, num_hidden_layers=3),
        ModelFileError,
        "model",
    ),
    "an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        ModelFileError,
        "is an adapter, no model",
    ),
    "a window that this sampler does not know": (
        lambda folder: changed(
            folder,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention"],
        ),
        ConfigError,
        "sliding",
    ),
}


@pytest.mark.parametrize("fault", MODELS)
async def test_a_model_that_cannot_be_used_is_refused(tmp_path: Path, fault: str) -> None:
    spoil, error, word = MODELS[fault]
    spoil(tiny_model(tmp_path / "model"))
    with pytest.raises(error, match=word):
        await LocalTrainer.start(LocalConfig(model=str(tmp_path / "model"), root=tmp_path))


async def test_a_device_that_is_not_there_or_cannot_hold_it_is_refused(tmp_path: Path) -> None:
    for device, error in (
        ("cuda:7", ConfigError),
        ("toaster", ConfigError),
        ("meta", BackendError),
    ):
        with pytest.raises(error, match=device):
            await start_local(tmp_path, device=device)


async def test_over_a_bfloat16_base_versions_are_in_its_format_and_states_are_not(
    tmp_path: Path,
) -> None:
    """A version that a later process reads scores to the last bit as the weights in hand did."""
    trainer = await start_local(tmp_path, dtype="bfloat16")
    tokens, run = tuple(range(24)), tmp_path / "run"
    try:
        await trainer.train_step([LossPass("ppo", (rl_datum(30, 10, 1),))], Adam(1e-2))
        sampler = await trainer.publish()
        state = await trainer.save_state("after")
        await trainer.export_adapter(tmp_path / "export")
        in_hand = await sampler.logprobs(tokens, start=1)
    finally:
        await trainer.aclose()
    files = {
        "version": run / "adapters" / sampler.ref,
        "state": run / "states" / state,
        "export": tmp_path / "export",
    }
    read = {n: load_file(folder / "adapter_model.safetensors") for n, folder in files.items()}
    formats = {name: {t.dtype for t in tensors.values()} for name, tensors in read.items()}
    assert formats == {
        "version": {torch.bfloat16},
        "state": {torch.float32},
        "export": {torch.float32},
    }
    for name, tensor in read["version"].items():
        assert torch.equal(tensor, read["state"][name].bfloat16()), name
    later = await start_local(tmp_path, dtype="bfloat16")
    try:
        again = await (await later.open(sampler.ref)).logprobs(tokens, start=1)
    finally:
        await later.aclose()
    assert again.logprobs == in_hand.logprobs


def test_files_that_a_container_has_read_take_nothing_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("90000\n")
    assert memory.free_bytes() == 10_000
    stat = "anon 20000\ninactive_file 60000\nactive_file 5000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert memory.free_bytes() == 75_000


def test_memory_of_a_cpu_bounds_a_pass_before_it_is_tried() -> None:
    """A full CPU memory raises no error: the process would be killed."""
    model = ModelSize(  # SmolLM2-135M
        parameters=134_515_008,
        linear=106_168_320,
        lora=305_280,
        largest_layer=3_540_096,
        layers=30,
        caching_layers=30,
        hidden=576,
        feed_forward=1536,
        queries=576,
        keys=192,
        vocabulary=49_152,
        context_tokens=8192,
        targets=("q_proj",),
    )

    def fits(gigabytes: int, context: int) -> tuple[bool, int]:
        return passes_in_memory(model, free=gigabytes << 30, width=4, context_tokens=context)

    plenty, checkpoints = fits(1000, 8192), fits(8, 8192)
    assert plenty == (False, DEFAULT_TOKENS)
    assert checkpoints[0]
    assert checkpoints[1] > 8192, "the longest sample fits, with one activation per layer"
    saves, tokens = fits(8, 2048)
    assert not saves
    assert 2048 < tokens < 4096
    assert fits(0, 8192) == (True, 1), "sample by sample"
