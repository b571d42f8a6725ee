"""Attention over a tree of shared prefixes is attention over its sequences, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from local_gpu.tree.choice import Heads, Trial, checked, choose
from local_gpu.tree.kernels import Attend, Kernel, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree, grow
from tests.support.local_reference import SETTINGS, batches, tensors

CPU = torch.device("cpu")
TINY = Heads(4, 2, 8)
FEW = settings(SETTINGS, max_examples=25)
heads_of = st.sampled_from([(4, 2), (3, 3), (4, 1)])


def random_rows(
    tree: PrefixTree, heads: tuple[int, int], dtype: torch.dtype, width: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value, laid out as a model's projections leave them."""
    draw = torch.Generator().manual_seed(len(tree.tokens))
    rows = len(tree.tokens)
    query, key, value = (
        torch.randn(1, rows, count, width, generator=draw).to(dtype).transpose(1, 2)
        for count in (heads[0], heads[1], heads[1])
    )
    return query, key, value


def one_by_one(
    tree: PrefixTree, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> list[Tensor]:
    """Attention by the formula, per sequence: [1, H, n_i, D]."""
    found: list[Tensor] = []
    for rows in tree.rows:
        q, k, v = (t[:, :, rows] for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * scale
        hidden = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    return found


def with_gradients(outputs: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs, and the inputs' gradients of a loss summed over all sequences."""
    draw = torch.Generator().manual_seed(7)
    losses = [(o * torch.randn(o.shape, generator=draw).to(o.dtype)).sum() for o in outputs]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), inputs)
    return [*(o.detach() for o in outputs), *gradients]


@pytest.mark.parametrize("kernel", [SdpaKernel(), MergedKernel()], ids=lambda k: k.name)
@FEW
@given(
    batches(),
    heads_of,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 23]),
    st.sampled_from([None, 0.2]),
)
def test_a_tree_gives_each_sequences_own_output_and_the_summed_gradients(
    kernel: Kernel,
    sequences: list[list[int]],
    heads: tuple[int, int],
    least: int,
    stretch: int,
    scale: float | None,
) -> None:
    tree = grow(tensors(sequences, stretch), least=least)
    inputs = tuple(t.requires_grad_() for t in random_rows(tree, heads, torch.float64))
    query, key, value = inputs
    over_tree = kernel.prepare(tree, CPU)
    out = over_tree(query, key, value, scale)
    got = with_gradients([out[:, :, rows] for rows in tree.rows], inputs)
    by_formula = one_by_one(tree, query, key, value, 8**-0.5 if scale is None else scale)
    expected = with_gradients(by_formula, inputs)
    for a, b in zip(got, expected, strict=True):
        # Relative to what is there: the loss sums over as many sequences as there are.
        assert float((a - b).abs().max()) <= 1e-10 * max(1.0, float(b.abs().max()))
    with torch.no_grad():
        assert torch.equal(over_tree(query, key, value, scale), out)


def test_merging_stores_no_gathered_keys_and_no_mask() -> None:
    stem = torch.arange(300)
    tree = grow([torch.cat([stem, torch.full((40,), 300 + i)]) for i in range(6)])
    query, key, value = (t.requires_grad_() for t in random_rows(tree, (4, 2), torch.float32))
    stored: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = MergedKernel().prepare(tree, CPU)(query, key, value, None)
    rows_and_heads = 4 * len(tree.tokens) * 4
    given_or_returned = sum(t.untyped_storage().nbytes() for t in (query, key, value, out))
    assert sum(stored.values()) == given_or_returned + rows_and_heads


# The choice of a kernel


@dataclass
class Altered:
    """The reference kernel with altered inputs and outputs."""

    alter: Callable[[Attend, Tensor, Tensor, Tensor], Tensor]
    name: str = "altered"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        plain = SdpaKernel().prepare(tree, device)
        return lambda query, key, value, scale: self.alter(plain, query, key, value)


def unaltered(plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain(query, key, value, None)


def fails(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


def shrinks_a_gradient(plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Give the right output, with three quarters of the keys' gradient."""
    return plain(query, key.detach() + (key - key.detach()) * 0.75, value, None)


def repeats_a_row(plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = plain(query, key, value, None)
    return torch.cat([out[:, :, :-1], out[:, :, -2:-1]], dim=2)


def not_a_number(plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain(query, key, value, None) * float("nan")


@pytest.mark.parametrize(
    ("alter", "problem"),
    [
        (fails, "no kernel image"),
        (shrinks_a_gradient, "gradient of the keys"),
        (repeats_a_row, "output"),
        (not_a_number, "nan"),
    ],
)
def test_a_kernel_that_is_wrong_does_not_pass(alter: Any, problem: str) -> None:
    assert problem in str(checked(Altered(alter), CPU, torch.bfloat16, TINY))
    assert checked(Altered(unaltered), CPU, torch.bfloat16, TINY) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_taken_unless_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    sentences: list[str] = []
    settings: dict[str, Any] = {"device": CPU, "dtype": dtype, "say": sentences.append}
    for heads in (TINY, Heads(4, 4, 16)):
        assert isinstance(choose(heads=heads, **settings), MergedKernel)
    assert sentences == []
    monkeypatch.setattr(
        "local_gpu.tree.choice.MergedKernel", lambda: Altered(shrinks_a_gradient, "merged")
    )
    assert isinstance(choose(heads=TINY, **settings), SdpaKernel)
    assert "merged" in sentences[0]


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(16, 16, 64)])
@pytest.mark.parametrize("kernel", [MergedKernel()])
def test_kernels_of_a_gpu_agree_with_the_reference_in_bfloat16(
    kernel: Kernel, heads: Heads
) -> None:
    device = torch.device("cuda")
    assert checked(kernel, device, torch.bfloat16, heads) is None
    # Rows of other numbers, with forks on no round place, and less than one block of them.
    for sizes in ((1, 2, 3), (37, 74, 5)):
        found = Trial.of(*sizes, heads, device).run(kernel, torch.bfloat16)
        expected = Trial.of(*sizes, heads, CPU).run(SdpaKernel(), torch.float32)
        for got, right in zip(found, expected, strict=True):
            assert float((got.cpu().float() - right).norm() / right.norm()) < 0.02
