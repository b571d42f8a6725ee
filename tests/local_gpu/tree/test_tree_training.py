"""Training on a tree of shared prefixes: the gradients of separate sequences, in less work.

What one sequence alone gives is compared with peft's own model in `test_families`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_gpu.learn.masters import Masters
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.load import open_base
from local_gpu.model.lora import BaseModel, adapter_parameters
from local_gpu.tree.body import Body
from local_gpu.tree.cuts import cut
from local_gpu.tree.prefix_tree import grow
from tests.local_gpu.learners import apart, learner, warm
from tests.support.backends import VOCABULARY, start_local, tiny_model
from tests.support.local_reference import batches, tensors
from tinker_claw.errors import OutageError, StepError
from tinker_claw.types import Adam, Datum, LossPass

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def base(model: Path) -> BaseModel:
    return open_base(str(model), device="cpu", dtype="float32", threads=1)


def datum(tokens: tuple[int, ...], loss: str = "ppo") -> Datum:
    rng = random.Random(sum(tokens))
    start = rng.randint(1, len(tokens) - 1)
    rows = len(tokens) - start
    if loss == "cross_entropy":
        ids = tuple(tuple(rng.randrange(VOCABULARY) for _ in range(3)) for _ in range(rows))
        weights = tuple(tuple(rng.uniform(-0.2, 0.2) for _ in range(3)) for _ in range(rows))
        return Datum(tokens, start, targets=ids, weights=weights)
    q = tuple(rng.uniform(-6, -3) for _ in range(rows))
    return Datum(tokens, start, q, tuple(rng.uniform(-0.2, 0.2) for _ in range(rows)))


def words(count: int) -> tuple[int, ...]:
    rng = random.Random(count)
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def computed(learning: LoraOptimizer) -> list[int]:
    """Tokens of each pass, from now on."""
    counts: list[int] = []
    learning.module.model.layers[0].register_forward_pre_hook(
        lambda module, args: counts.append(args[0].shape[1])
    )
    return counts


def test_a_sample_with_two_losses_is_computed_once(base: BaseModel) -> None:
    learning = learner(base)
    counts = computed(learning)
    both = [LossPass(loss, (datum(words(200), loss),)) for loss in ("ppo", "cross_entropy")]
    learning.step(both, Adam(1e-3))
    assert counts == [199]


@settings(max_examples=60, deadline=None)
@given(drawn=batches(most=20), ranks=st.integers(1, 9), tokens=st.integers(1, 500))
def test_a_cut_gives_every_sequence_to_one_pass_of_one_rank(
    drawn: list[list[int]], ranks: int, tokens: int
) -> None:
    sequences = tensors(drawn, 9)
    parts = cut(sequences, ranks=ranks, tokens=tokens, even=16_000)
    assert len(parts) == ranks
    assert sorted(i for part in parts for one in part for i in one) == list(range(len(sequences)))
    most = max(tokens, *map(len, sequences))
    for one in (one for part in parts for one in part):
        assert len(grow([sequences[i] for i in one], least=1).tokens) <= most
        assert tokens > 1 or len(one) == 1


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
    datums = tuple(datum((i, *words(99))) for i in range(8))
    quiet, short = learner(base), learner(base)
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
    for name, tensor in quiet.masters.adapter().items():
        torch.testing.assert_close(tensor, short.masters.adapter()[name], atol=1e-5, rtol=1e-4)
    before = len(seen)
    short.step([LossPass("ppo", datums)], Adam(1e-3))
    assert max(seen[before:]) <= 250, "the smaller budget is kept"


def test_a_sample_that_does_not_fit_alone_voids_the_step_in_words(base: BaseModel) -> None:
    learning = learner(base)
    learning.module.model.layers[0].register_forward_pre_hook(out_of_memory(50, []))
    before = learning.masters.adapter()
    with pytest.raises(StepError, match="memory"):
        learning.step([LossPass("ppo", (datum(words(60)),))], Adam(1e-3))
    assert apart(learning.masters.adapter(), before) == 0


def test_a_step_that_finds_no_memory_beside_its_passes_is_an_outage(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are not to blame: it is tried again, and nothing was changed."""
    learning, before = learner(base), warm(base)

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, say")

    some = [LossPass("ppo", (datum(words(60)),))]
    with monkeypatch.context() as patch:
        patch.setattr(Masters, "step", no_memory)
        with pytest.raises(OutageError, match="not enough memory"):
            learning.step(some, Adam(1e-3))
    assert apart(learning.masters.adapter(), before) == 0
    learning.step(some, Adam(1e-3))
    assert learning.masters.steps == 1


async def test_many_who_ask_at_once_are_scored_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await start_local(tmp_path)
    sampler = await trainer.publish()
    sequences = [(*words(300), i, *words(39)) for i in range(9)]
    one_by_one = [await sampler.logprobs(s, start=300, top_k=2) for s in sequences]
    passes: list[int] = []
    hidden = Body.hidden

    def counted(self: Body, module: Any, together: Sequence[Any], *more: Any) -> Any:
        passes.append(len(together))
        return hidden(self, module, together, *more)

    monkeypatch.setattr(Body, "hidden", counted)
    at_once = await asyncio.gather(*(sampler.logprobs(s, start=300, top_k=2) for s in sequences))
    assert sum(passes) == 9
    assert len(passes) <= 2, "perhaps the first alone, then all others together"
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
    batch = [LossPass("ppo", (datum(words(60)),))]
    learning = learner(base)
    name, copy = next(iter(adapter_parameters(learning.module).items()))
    before, rounded = learning.masters.adapter()[name], copy.detach().clone()
    assert copy.dtype == torch.bfloat16
    learning.step(batch, Adam(1e-5))
    after = learning.masters.adapter()[name]
    moved = (after - before).abs()
    assert after.dtype == torch.float32
    assert 0.9e-5 < float(moved.median()) < 1.1e-5, "Adam's first step is the rate"
    assert float((copy == rounded).float().mean()) > 0.9, "too little for most copies"
    for _ in range(40):
        learning.step(batch, Adam(1e-4))
    assert float((copy == rounded).float().mean()) < 0.9, "and enough after many steps"
    assert torch.equal(copy.detach(), learning.masters.adapter()[name].to(torch.bfloat16))
