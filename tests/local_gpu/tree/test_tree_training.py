"""Training on a tree of shared prefixes: the gradients of separate sequences, in less work.

The reference is peft's own model with full logits, one sequence at a time (`local_reference`).
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from benchmarks.training_shapes import PRESETS
from benchmarks.training_work import Work, flops
from local_gpu.device import out_of_memory as no_room
from local_gpu.learn.losses import records_of
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.load import open_base
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter
from local_gpu.tree.body import Body
from local_gpu.tree.cuts import cut, even_keys
from local_gpu.tree.kernels import SdpaKernel
from local_gpu.tree.prefix_tree import grow
from tests.support.backends import VOCABULARY, start_local, tiny_model
from tests.support.local_reference import full_logprobs, reference, reference_loss
from tinker_claw.errors import OutageError, StepError
from tinker_claw.types import Adam, Datum, LossPass

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SHAPE = LoraShape(rank=4, alpha=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def base(model: Path) -> BaseModel:
    return open_base(str(model), device="cpu", dtype="float32", threads=1)


def adapter_of(base: BaseModel) -> dict[str, torch.Tensor]:
    """An adapter with values in both halves, so that both have gradients."""
    draw = torch.Generator().manual_seed(5)
    fresh = fresh_adapter(base, SHAPE, seed=0)
    return {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in fresh.items()}


def optimizer(base: BaseModel, *, share: bool = True, tokens: int | None = None) -> LoraOptimizer:
    body = Body(SdpaKernel(), base.device, share=share)
    return LoraOptimizer(
        base,
        SHAPE,
        adapter_of(base),
        passes=Passes(body, PassBudget(tokens)),
        context_tokens=base.context_tokens,
        checkpointing=False,
    )


def gradient(learner: LoraOptimizer, passes: Sequence[LossPass]) -> torch.Tensor:
    wanted = records_of(passes, vocabulary=VOCABULARY, context_tokens=10_000)
    for one in wanted:
        learner.forward_backward(one)
    return learner._masters.gradient.clone()


def family(rng: random.Random, count: int, most: int) -> list[tuple[int, ...]]:
    """Random sequences, many of which extend, repeat, or begin like others."""
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        stem: tuple[int, ...] = ()
        if made and rng.random() < 0.8:
            stem = rng.choice(made)
            stem = stem[: rng.randint(0, len(stem))] if rng.random() < 0.5 else stem
        own = rng.choice((0, 1, 3, rng.randint(1, most)))
        made.append((*stem, *(rng.randrange(VOCABULARY) for _ in range(own)))[: 4 * most])
        if len(made[-1]) < 2:
            made[-1] = (*made[-1], 1, 2)
    return made


def datum(rng: random.Random, tokens: tuple[int, ...], loss: str) -> Datum:
    start = rng.randint(1, len(tokens) - 1)
    rows = len(tokens) - start
    if loss == "cross_entropy":
        ids = tuple(tuple(rng.randrange(VOCABULARY) for _ in range(3)) for _ in range(rows))
        weights = tuple(tuple(rng.uniform(-0.2, 0.2) for _ in range(3)) for _ in range(rows))
        return Datum(tokens, start, targets=ids, weights=weights)
    q = tuple(rng.uniform(-6, -3) for _ in range(rows))
    return Datum(tokens, start, q, tuple(rng.uniform(-0.2, 0.2) for _ in range(rows)))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), loss=st.sampled_from(["ppo", "cross_entropy"]))
def test_gradients_over_a_tree_are_those_of_separate_sequences(
    base: BaseModel, seed: int, loss: Any
) -> None:
    rng = random.Random(seed)
    datums = tuple(datum(rng, tokens, loss) for tokens in family(rng, rng.randint(1, 7), 60))
    packed = gradient(optimizer(base), [LossPass(loss, datums)])
    alone = gradient(optimizer(base, tokens=1), [LossPass(loss, datums)])
    scale = alone.norm().clamp(min=1e-3)
    assert float((packed - alone).norm() / scale) < 1e-5


def test_gradients_over_a_tree_are_those_of_peft_with_full_logits(
    model: Path, base: BaseModel, tmp_path: Path
) -> None:
    rng = random.Random(3)
    stem = tuple(rng.randrange(VOCABULARY) for _ in range(90))
    own = [tuple(rng.randrange(VOCABULARY) for _ in range(n)) for n in (40, 7, 60)]
    sequences = [stem + own[0], stem + own[0] + own[1], stem + own[2], own[2], stem + own[0]]
    datums = tuple(datum(rng, tokens, "ppo") for tokens in sequences)
    learner = optimizer(base)
    got = gradient(learner, [LossPass("ppo", datums)])
    from local_gpu.model.files import write_adapter

    write_adapter(tmp_path, base, SHAPE, learner.adapter())
    peft_model = reference(model, tmp_path)
    for one in datums:
        rows = full_logprobs(peft_model, one.tokens)[one.start - 1 :]
        reference_loss("ppo", rows, one).backward()
    named = dict(peft_model.named_parameters())
    wanted = torch.cat(
        [
            named[f"base_model.model.{name.replace('.weight', '.default.weight')}"].grad.flatten()
            for name in learner.adapter()
        ]
    )
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


def test_a_batch_with_a_shared_prefix_computes_it_once(base: BaseModel) -> None:
    rng = random.Random(0)
    stem = tuple(rng.randrange(VOCABULARY) for _ in range(400))
    sequences = [(*stem, *(rng.randrange(VOCABULARY) for _ in range(50))) for _ in range(8)]
    computed: list[int] = []
    learner = optimizer(base)
    learner.module.model.layers[0].register_forward_pre_hook(
        lambda module, args: computed.append(args[0].shape[1])
    )
    datums = tuple(datum(rng, tokens, "ppo") for tokens in sequences)
    learner.step([LossPass("ppo", datums)], Adam(1e-3))
    assert sum(computed) == 400 + 8 * 49


def test_a_sample_with_two_losses_is_computed_once(base: BaseModel) -> None:
    rng = random.Random(0)
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(200))
    computed: list[int] = []
    learner = optimizer(base)
    learner.module.model.layers[0].register_forward_pre_hook(
        lambda module, args: computed.append(args[0].shape[1])
    )
    both = [LossPass(loss, (datum(rng, tokens, loss),)) for loss in ("ppo", "cross_entropy")]
    learner.step(both, Adam(1e-3))
    assert computed == [199]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 9), tokens=st.integers(1, 500))
def test_a_cut_gives_every_sequence_to_one_pass_of_one_rank(
    seed: int, ranks: int, tokens: int
) -> None:
    rng = random.Random(seed)
    sequences = [torch.tensor(s) for s in family(rng, rng.randint(1, 20), 90)]
    parts = cut(sequences, ranks=ranks, tokens=tokens, even=16_000)
    assert len(parts) == ranks
    assert sorted(i for part in parts for one in part for i in one) == list(range(len(sequences)))
    most = max(tokens, *map(len, sequences))
    for one in (one for part in parts for one in part):
        assert len(grow([sequences[i] for i in one], least=1).tokens) <= most
        assert tokens > 1 or len(one) == 1


def test_a_pass_that_is_large_enough_ends_where_little_is_shared() -> None:
    draw = torch.Generator().manual_seed(0)

    def passes(stem: int, enough: float) -> list[int]:
        begins = torch.randint(0, 99, (stem,), generator=draw)
        ends = [torch.randint(0, 99, (100,), generator=draw) for _ in range(10)]
        sequences = [torch.cat([begins, end]) for end in ends]
        (run,) = cut(sequences, ranks=1, tokens=10**9, even=16_000, enough=enough)
        return [len(one) for one in run]

    assert passes(0, 300) == [3, 3, 3, 1]
    assert passes(15, 300) == [3, 3, 3, 1], "computing a sixteenth twice costs little"
    assert passes(25, 300) == [4, 4, 2], "so a pass may be larger"
    assert passes(1000, 300) == [10]
    assert passes(0, math.inf) == [10]


def test_ranks_get_about_equal_work() -> None:
    draw = torch.Generator().manual_seed(0)
    stem = torch.randint(0, 99, (2000,), generator=draw)
    sequences = [torch.cat([stem, torch.randint(0, 99, (300,), generator=draw)]) for _ in range(16)]
    parts = cut(sequences, ranks=4, tokens=10**9, even=16_000)
    assert [[len(one) for one in part] for part in parts] == [[4]] * 4


@pytest.mark.parametrize("preset", ["tiny", "8b"])
def test_work_is_balanced_by_the_operations_that_are_counted(preset: str) -> None:
    """The cost of one more token and of one more key, without adapters and head."""
    shape = PRESETS[preset].shape
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )

    def counted(tokens: int, pairs: int) -> int:
        return flops(Work(tokens, pairs, 0, 3, checkpointing=True), shape, rank=0)

    assert even_keys(config) == pytest.approx(counted(10**6, 0) / counted(0, 10**6))


def test_attention_weighs_as_much_as_the_rest_at_the_keys_of_an_8b_model() -> None:
    """Worked out by hand: 193 million elements a layer, and queries of 4096."""
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    linear = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12_288)
    keys = even_keys(config)
    assert keys == pytest.approx(linear / (3 * 4096)) == pytest.approx(15_700, rel=1e-2)


def out_of_memory(limit: int, seen: list[int]) -> Any:
    """A module hook with memory for this many tokens only, as a GPU might have."""

    def look(module: Any, args: Any) -> None:
        seen.append(args[0].shape[1])
        if args[0].shape[1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory, say")

    return look


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pass_that_runs_out_of_memory_is_split_and_the_step_goes_on(
    base: BaseModel, phase: str
) -> None:
    rng = random.Random(1)
    datums = tuple(
        datum(rng, tuple(rng.randrange(VOCABULARY) for _ in range(100)), "ppo") for _ in range(8)
    )
    quiet, short = optimizer(base), optimizer(base)
    seen: list[int] = []
    layer = short.module.model.layers[1]
    look = out_of_memory(250, seen)
    if phase == "forward":
        layer.register_forward_pre_hook(look)
    else:
        # By then other layers have their gradients of this pass, which must not count.
        layer.register_full_backward_pre_hook(lambda module, grads: look(module, grads))
    reports = [one.step([LossPass("ppo", datums)], Adam(1e-3)) for one in (quiet, short)]
    assert seen[:3] == [792, 396, 198]
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    for a, b in zip(reports[0].logprobs[0], reports[1].logprobs[0], strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    for name, tensor in quiet.adapter().items():
        torch.testing.assert_close(tensor, short.adapter()[name], atol=1e-5, rtol=1e-4)
    before = len(seen)
    short.step([LossPass("ppo", datums)], Adam(1e-3))
    assert max(seen[before:]) <= 250, "the smaller budget is kept"


def test_libraries_that_find_no_memory_beside_pytorch_are_understood() -> None:
    for found in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ):
        assert no_room(found), found
    assert not no_room(RuntimeError("CUDA error: an illegal memory access"))


def test_a_sample_that_does_not_fit_alone_voids_the_step_in_words(base: BaseModel) -> None:
    rng = random.Random(1)
    learner = optimizer(base)
    learner.module.model.layers[0].register_forward_pre_hook(out_of_memory(50, []))
    before = learner.adapter()
    with pytest.raises(StepError, match="memory"):
        learner.step([LossPass("ppo", (datum(rng, tuple(range(60)), "ppo"),))], Adam(1e-3))
    assert all(torch.equal(before[n], t) for n, t in learner.adapter().items())


def test_a_step_that_finds_no_memory_beside_its_passes_is_an_outage(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are not to blame: it is tried again, and nothing was changed."""
    learner, before = optimizer(base), optimizer(base).adapter()

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, say")

    some = [LossPass("ppo", (datum(random.Random(1), tuple(range(60)), "ppo"),))]
    with monkeypatch.context() as patch:
        patch.setattr(learner._masters, "step", no_memory)
        with pytest.raises(OutageError, match="not enough memory"):
            learner.step(some, Adam(1e-3))
    assert all(torch.equal(before[n], t) for n, t in learner.adapter().items())
    learner.step(some, Adam(1e-3))
    assert learner.steps == 1


SMALL_MEMORY = """
import resource, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from tests.local_gpu.tree import test_tree_training as t
from local_gpu.learn import passes
from tinker_claw.types import Adam, LossPass
import asyncio
import random
base = t.open_base(sys.argv[1], device="cpu", dtype="float32", threads=1)
rng = random.Random(0)
stem = tuple(rng.randrange(t.VOCABULARY) for _ in range(30))
datums = tuple(
    t.datum(rng, (*stem, *(rng.randrange(t.VOCABULARY) for _ in range(1500))), "ppo")
    for _ in range(12)
)
passes._BUSY = 1_000_000  # as on a GPU: else a pass has one of the sequences
learner = t.optimizer(base)
learner.step([LossPass("ppo", (datums[0],))], Adam(1e-9))
pages = int(Path("/proc/self/statm").read_text().split()[0])
room = pages * resource.getpagesize() + 64 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, room))
before = learner.passes.budget.tokens
report = learner.step([LossPass("ppo", datums)], Adam(1e-3))
print(before > learner.passes.budget.tokens, len(report.logprobs[0]), report.grad_norm > 0)
"""


@pytest.mark.slow  # fast: an allocation that a test lets fail
def test_a_real_allocation_that_fails_is_survived(model: Path) -> None:
    """In a process with a limited address space, so that the system itself refuses."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SMALL_MEMORY, str(model), str(root)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.split() == ["True", "12", "True"], done.stderr[-2000:]


async def test_many_who_ask_at_once_are_scored_in_one_pass(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    sampler = await trainer.publish()
    rng = random.Random(0)
    stem = tuple(rng.randrange(VOCABULARY) for _ in range(300))
    sequences = [(*stem, *(rng.randrange(VOCABULARY) for _ in range(40))) for _ in range(9)]
    one_by_one = [await sampler.logprobs(s, start=300, top_k=2) for s in sequences]
    learning: Any = trainer._backend.learning
    computed: list[int] = []
    learning._policy.module.model.layers[0].register_forward_pre_hook(
        lambda module, args: computed.append(args[0].shape[1])
    )
    at_once = await asyncio.gather(*(sampler.logprobs(s, start=300, top_k=2) for s in sequences))
    assert sum(computed) < 3 * 340, "the first alone, then all others together"
    for a, b in zip(one_by_one, at_once, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert a.topk_ids == b.topk_ids
    await trainer.aclose()


async def test_who_is_called_off_leaves_the_others_their_scores(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    sampler = await trainer.base()
    sequences = [tuple((i + j) % VOCABULARY for j in range(200)) for i in range(6)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sampler.logprobs(s, start=5)) for s in sequences]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[3].cancel()
    for task, tokens in zip(tasks, sequences, strict=True):
        if not task.cancelled():
            alone = await sampler.logprobs(tokens, start=5)
            assert task.result().logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert sum(task.cancelled() for task in tasks) == 2
    await trainer.aclose()


def test_masters_keep_what_bfloat16_would_lose(model: Path) -> None:
    """Steps far below the format's resolution add up, and the copies follow when they can."""
    base = open_base(str(model), device="cpu", dtype="bfloat16", threads=1)
    rng = random.Random(2)
    batch = [LossPass("ppo", (datum(rng, tuple(rng.choices(range(64), k=60)), "ppo"),))]
    learner = optimizer(base)
    name, copy = next(iter(learner._masters._copies.items()))
    before, rounded = learner.adapter()[name], copy.detach().clone()
    assert copy.dtype == torch.bfloat16
    learner.step(batch, Adam(1e-5))
    after = learner.adapter()[name]
    moved = (after - before).abs()
    assert after.dtype == torch.float32
    assert 0.9e-5 < float(moved.median()) < 1.1e-5, "Adam's first step is the rate"
    assert float((copy == rounded).float().mean()) > 0.9, "too little for most copies"
    for _ in range(40):
        learner.step(batch, Adam(1e-4))
    assert float((copy == rounded).float().mean()) < 0.9, "and enough after many steps"
    assert torch.equal(copy.detach(), learner.adapter()[name].to(torch.bfloat16))
