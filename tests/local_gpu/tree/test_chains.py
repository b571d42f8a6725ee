"""Turns that extend one another: one segment, each token computed once, the same gradients.

The reference computes every sample alone, without a tree, in float64 by the formula; through the
whole trainer in float32 beside passes of one sample each.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.load import load_base
from local_gpu.model.lora import adapter_parameters, with_lora
from local_gpu.tree.body import Body
from local_gpu.tree.cuts import cut
from local_gpu.tree.kernels import Kernel, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import grow
from tests.local_gpu.learners import SHAPE, learner, warm
from tests.support.backends import VOCABULARY, tiny_model
from tinker_claw.types import Adam, Datum, LossPass

Tokens = tuple[int, ...]
Turn = tuple[Tokens, int]
"""Prompt and reply, and where the reply starts."""
CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize("kernel", [SdpaKernel(), MergedKernel()], ids=lambda k: k.name)


def words(rng: random.Random, count: int) -> Tokens:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def session(
    rng: random.Random, turns: int, *, volatile: int = 0, before: Tokens = ()
) -> list[Turn]:
    """An agent's turns: prompt, reply and what tools return become the next prompt; `volatile`
    tokens at the end of a prompt are dropped from the next one, as OpenClaw's are."""
    known, found = before + words(rng, 60), list[Turn]()
    for _ in range(turns):
        prompt, reply = known + words(rng, volatile), words(rng, rng.randint(2, 9))
        found.append((prompt + reply, len(prompt)))
        known += reply + words(rng, rng.randint(1, 50))
    return found


def batch(case: str) -> list[Turn]:
    rng = random.Random(case)
    if case == "forks":
        return session(rng, 5, volatile=12)
    chain = session(rng, 7)
    if case == "chain":
        return chain
    if case == "duplicates":
        return chain[:3] + chain[1:5]
    if case == "prefixes":  # the same tokens, learnt from other places; one of one token
        (tokens, start), last = chain[2], chain[-1]
        return [(tokens, start), (tokens[:-3], start - 4), (last[0][:2], 1), (last[0][:9], 3)]
    stem = words(rng, 40)
    shared = [turn for _ in range(2) for turn in session(rng, 4, before=stem)]
    mixed = chain + chain[:2] + shared + session(rng, 3, volatile=5, before=stem)
    rng.shuffle(mixed)
    return mixed


CASES = pytest.mark.parametrize("case", ["chain", "forks", "duplicates", "prefixes", "mixed"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("chains"))


def exact_gradient(model: Path, body: Body, turns: list[Turn], passes: list[list[int]]) -> Tensor:
    """Gradient in float64 of signed weights on the logprobs of all replies."""
    base = load_base(str(model), device=CPU, dtype=torch.float64)
    for name, norm in list(base.module.named_modules()):
        if type(norm).__name__ == "Qwen3RMSNorm":  # computed in float32, whatever it is given
            exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
            exact.weight = norm.weight
            base.module.set_submodule(name, exact)
    module = with_lora(base, SHAPE, warm(base))
    copies = list(adapter_parameters(module).values())
    for copy in copies:
        copy.requires_grad_(True)
    for indices in passes:
        sequences = [torch.tensor(turns[i][0][:-1]) for i in indices]
        firsts = [turns[i][1] - 1 for i in indices]
        loss = torch.zeros((), dtype=torch.float64)
        for i, rows in zip(indices, body.hidden(module, sequences, firsts), strict=True):
            tokens, start = turns[i]
            logprobs = module.get_output_embeddings()(rows).log_softmax(-1)
            draw = torch.Generator().manual_seed(i)
            weights = torch.randn(len(rows), generator=draw, dtype=torch.float64)
            chosen = logprobs.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
            loss = loss - (weights * chosen).sum()
        loss.backward()
    return torch.cat([copy.grad.flatten() for copy in copies])


@CASES
@KERNELS
def test_in_float64_the_gradient_is_that_of_samples_without_a_tree(
    model: Path, kernel: Kernel, case: str
) -> None:
    turns = batch(case)
    sequences = [torch.tensor(tokens[:-1]) for tokens, _ in turns]
    for tokens in (10**9, 150):
        (passes,) = cut(sequences, ranks=1, tokens=tokens, even=16_000)
        got = exact_gradient(model, Body(kernel, CPU), turns, passes)
        apart = [[i] for i in range(len(turns))]
        alone = exact_gradient(model, Body(kernel, CPU, packs=False), turns, apart)
        assert float((got - alone).norm() / alone.norm()) < 1e-10


def datums(turns: list[Turn], loss: str) -> tuple[Datum, ...]:
    rng = random.Random(1)
    made: list[Datum] = []
    for tokens, start in turns:
        rows = range(len(tokens) - start)
        if loss == "ppo":
            old = tuple(rng.uniform(-6, -3) for _ in rows)
            made.append(Datum(tokens, start, old, tuple(rng.uniform(-1, 1) for _ in rows)))
        else:
            ids = tuple(words(rng, 3) for _ in rows)
            weights = tuple(tuple(rng.uniform(-1, 1) for _ in range(3)) for _ in rows)
            made.append(Datum(tokens, start, targets=ids, weights=weights))
    return tuple(made)


def learning(model: Path, kernel: Kernel, tokens: int | None) -> LoraOptimizer:
    base = load_base(str(model), device=CPU, dtype=torch.float32)
    return learner(base, kernel=kernel, tokens=tokens)


def computed(model: Path, turns: list[Turn], tokens: int | None) -> list[int]:
    """Tokens that each pass of a step computes."""
    one, seen = learning(model, MergedKernel(), tokens), list[int]()
    one.module.model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    one.step([LossPass("ppo", datums(turns, "ppo"))], Adam(1e-3))
    return seen


def test_a_chain_is_one_pass_over_one_segment_however_little_a_pass_may_hold(model: Path) -> None:
    turns = batch("chain")
    last = len(turns[-1][0]) - 1
    tree = grow([torch.tensor(tokens[:-1]) for tokens, _ in turns])
    assert [(s.first, s.last) for s in tree.segments] == [(0, last)]
    for tokens in (None, last // 2, 2):
        assert computed(model, turns, tokens) == [last]
    assert len(computed(model, turns, 1)) == len(turns), "a pass for each sample, where asked"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_do_not_share_a_chain(ranks: int) -> None:
    """The rank with the last turn computes all of the chain in any case."""
    rng = random.Random(0)
    turns = [turn for _ in range(ranks) for turn in session(rng, 6)]
    sequences = [torch.tensor(tokens[:-1]) for tokens, _ in turns]
    parts = cut(sequences, ranks=ranks, tokens=10**9, even=16_000)
    assert sorted(sorted(i // 6 for i in one) for part in parts for one in part) == [
        [at] * 6 for at in range(ranks)
    ]
