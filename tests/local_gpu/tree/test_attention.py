"""Attention over a tree of shared prefixes is attention over its sequences, one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from local_gpu.tree.choice import Heads, Setting, choose, fastest
from local_gpu.tree.fused import FlexKernel, VarlenKernel, block_mask, compiled, layout_of, spelt
from local_gpu.tree.kernels import Attend, Kernel, MergedKernel, SdpaKernel, attend
from local_gpu.tree.prefix_tree import PrefixTree, grow
from tests.trees import SETTINGS, batches, tensors
from tinker_claw.errors import ConfigError

CPU = torch.device("cpu")
TINY = Heads(4, 2, 8)
FEW = settings(SETTINGS, max_examples=25)
heads_of = st.sampled_from([(4, 2), (3, 3), (4, 1)])


class SpeltOut:
    """A kernel that attends to one sequence after the other, with the arguments of the one for
    unequal lengths."""

    name = "spelt out"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        layout = layout_of(tree)

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            keys, values = (
                spelt(t[0].transpose(0, 1), layout.pieces).transpose(0, 1)[None]
                for t in (key, value)
            )
            cuts = zip(pairwise(layout.query_cuts), pairwise(layout.key_cuts), strict=True)
            parts = [
                attend(query[:, :, q0:q1], keys[:, :, k0:k1], values[:, :, k0:k1], scale)
                for (q0, q1), (k0, k1) in cuts
            ]
            return torch.cat(parts, dim=2)

        return over_tree


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


@pytest.mark.parametrize("kernel", [SdpaKernel(), MergedKernel(), SpeltOut()], ids=lambda k: k.name)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
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
    dtype: torch.dtype,
    near: float,
    sequences: list[list[int]],
    heads: tuple[int, int],
    least: int,
    stretch: int,
    scale: float | None,
) -> None:
    tree = grow(tensors(sequences, stretch), least=least)
    inputs = tuple(t.requires_grad_() for t in random_rows(tree, heads, dtype))
    query, key, value = inputs
    over_tree = kernel.prepare(tree, CPU)
    out = over_tree(query, key, value, scale)
    got = with_gradients([out[:, :, rows] for rows in tree.rows], inputs)
    by_formula = one_by_one(tree, query, key, value, 8**-0.5 if scale is None else scale)
    expected = with_gradients(by_formula, inputs)
    for a, b in zip(got, expected, strict=True):
        # Relative to what is there: the loss sums over as many sequences as there are.
        assert float((a - b).abs().max()) <= near * max(1.0, float(b.abs().max()))
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


def test_keys_that_would_fill_the_memory_are_not_spelt_out() -> None:
    """Tested on the CPU, where the kernel for unequal lengths would raise."""
    stem = torch.arange(9000)
    tree = grow([torch.cat([stem, torch.tensor([i])]) for i in range(120)], least=1)
    assert layout_of(tree).key_cuts[-1] > 1_000_000
    query, key, value = random_rows(tree, (1, 1), torch.float32)
    got = VarlenKernel().prepare(tree, CPU)(query, key, value, None)
    assert torch.equal(got, MergedKernel().prepare(tree, CPU)(query, key, value, None))


# FlexAttention's mask


@FEW
@given(batches(), st.sampled_from([1, 3, 11]), st.sampled_from([2, 8, 32]))
def test_the_block_mask_is_the_one_that_the_full_mask_gives(
    sequences: list[list[int]], stretch: int, block: int
) -> None:
    tree = grow(tensors(sequences, stretch), least=2)
    rows = len(tree.tokens)
    seen = torch.zeros(rows, rows, dtype=torch.bool)
    for segment in tree.segments:
        own = slice(segment.first, segment.last)
        for first, last in segment.ancestors:
            seen[own, first:last] = True
        length = segment.last - segment.first
        seen[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
    got = block_mask(tree, CPU, block)
    expected = create_block_mask(
        lambda batch, head, q, k: seen[q, k], None, None, rows, rows, "cpu", block
    )
    for a, b in zip(got.as_tuple()[:-1], expected.as_tuple()[:-1], strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
    every = torch.arange(rows)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(got.mask_mod(zero, zero, every[:, None], every[None]), seen)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_flex_attention_forward_is_the_reference(heads: tuple[int, int]) -> None:
    sequences = [[0, 1, 2], [0, 1, 1, 2], [0, 1, 1, 0, 0], [2]]
    tree = grow(tensors(sequences, 60))
    query, key, value = random_rows(tree, heads, torch.float32, width=16)
    got = FlexKernel(flex_attention).prepare(tree, CPU)(query, key, value, 0.3)
    expected = SdpaKernel().prepare(tree, CPU)(query, key, value, 0.3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_flex_attention_is_compiled_for_rows_of_any_number_and_else_raises() -> None:
    """Where it has compiled too often, PyTorch would compute all T x T scores."""
    made: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        made.append(graph)
        return graph.forward

    flex = compiled(count)

    def attend_over(rows: int, dtype: torch.dtype) -> None:
        tree = grow([torch.arange(rows), torch.arange(rows // 2)])
        query, key, value = random_rows(tree, (4, 2), dtype, width=16)
        flex(query, key, value, block_mask=block_mask(tree, CPU), scale=0.25, enable_gqa=True)

    for rows in (500, 129, 256, 300, 513, 640, 900, 1024):
        attend_over(rows, torch.float32)
    assert len(made) <= 3
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(FailOnRecompileLimitHit),
    ):
        attend_over(500, torch.bfloat16)


def test_past_the_last_variant_of_flex_attention_the_merged_kernel_goes_on() -> None:
    def used_up(*_: object, **__: object) -> Tensor:
        raise FailOnRecompileLimitHit("recompile_limit reached with fullgraph=True")

    tree = grow([torch.arange(300), torch.arange(150)])
    query, key, value = random_rows(tree, (4, 2), torch.float32, width=16)
    got = FlexKernel(used_up).prepare(tree, CPU)(query, key, value, 0.3)
    right = SdpaKernel().prepare(tree, CPU)(query, key, value, 0.3)
    torch.testing.assert_close(got, right, rtol=0, atol=1e-5)


# The choice of a kernel


class Altered:
    """The reference kernel with altered inputs and outputs."""

    def __init__(self, name: str = "altered") -> None:
        self.name = name

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        plain = SdpaKernel().prepare(tree, device)

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            return self.alter(plain, query, key, value)

        return over_tree

    def alter(self, plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return plain(query, key, value, None)


class Raising(Altered):
    def alter(self, plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available\nfor this device")


class WrongBackward(Altered):
    """A kernel whose output is exact, but whose keys' gradient is a quarter too small."""

    def alter(self, plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().alter(plain, query, key.detach() + (key - key.detach()) * 0.75, value)


class WrongInOneRow(Altered):
    def alter(self, plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = super().alter(plain, query, key, value)
        return torch.cat([out[:, :, :-1], out[:, :, -2:-1]], dim=2)


class NotANumber(Altered):
    def alter(self, plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().alter(plain, query, key, value) * float("nan")


class Slow(Altered):
    def alter(self, plain: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs = [super(Slow, self).alter(plain, query, key, value) for _ in range(8)]
        return torch.stack(outs).mean(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fastest_kernel_that_agrees_is_taken(dtype: torch.dtype) -> None:
    wrong = [Raising("a"), WrongBackward("b"), WrongInOneRow("c"), NotANumber("d")]
    right = [Slow("slow"), SdpaKernel()]
    said: list[str] = []
    taken = fastest([*wrong, *right], CPU, dtype, TINY, said.append)
    assert taken is right[1]
    assert said[0] == ("Attention by a is left out: RuntimeError: no kernel image is available.")
    assert said[1].startswith("Attention by b is left out: its gradient of the keys is off by")
    assert said[2].startswith("Attention by c is left out: its output is off by")
    assert said[3].startswith("Attention by d is left out: its output is off by nan")
    assert said[4].startswith("Attention is by sdpa;")
    assert "slow" in said[4]
    assert len(said) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [TINY, Heads(4, 4, 16)])
def test_merging_agrees_in_the_models_number_format(dtype: torch.dtype, heads: Heads) -> None:
    said: list[str] = []
    taken = choose("merged", device=CPU, dtype=dtype, heads=heads, say=said.append)
    assert isinstance(taken, MergedKernel)
    assert said == []


def test_the_cpu_needs_no_trial_and_the_reference_none_anywhere() -> None:
    nowhere = Heads(0, 0, 0)
    merged = choose("auto", device=CPU, dtype=torch.float32, heads=nowhere, say=print)
    assert isinstance(merged, MergedKernel)
    plain = choose("sdpa", device=CPU, dtype=torch.float32, heads=nowhere, say=print)
    assert isinstance(plain, SdpaKernel)


@pytest.mark.parametrize(("setting", "reason"), [("flex", "no backward"), ("varlen", "'CPU'")])
def test_a_kernel_that_was_asked_for_and_does_not_work_is_an_error(
    setting: Setting, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"attention = {setting} does not work here: .*{reason}"):
        choose(setting, device=CPU, dtype=torch.float32, heads=TINY, say=print)


def test_no_kernel_that_works_is_an_error_with_all_reasons() -> None:
    wrong = [Raising("a"), NotANumber("b")]
    with pytest.raises(ConfigError, match=r"No attention kernel works on cpu.* by a .* by b "):
        fastest(wrong, CPU, torch.float32, TINY, lambda _: None)


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(16, 16, 64)])
@pytest.mark.parametrize("kernel", [MergedKernel(), FlexKernel(), VarlenKernel()])
def test_kernels_of_a_gpu_agree_with_the_reference_in_bfloat16(
    kernel: Kernel, heads: Heads
) -> None:
    device = torch.device("cuda")
    taken = fastest([kernel], device, torch.bfloat16, heads, print)
    assert taken is kernel
    # Rows of other numbers, with forks on no round place, and less than one block of them.
    for stretch in (1, 37):
        tree = grow(tensors([[0, 1, 2], [0, 1, 1, 2], [0, 1, 1, 0, 0], [2]], stretch), least=2)
        rows = [t.to(device) for t in random_rows(tree, (4, 2), torch.bfloat16, width=64)]
        found: list[list[Tensor]] = []
        for each, dtype in ((kernel, torch.bfloat16), (SdpaKernel(), torch.float32)):
            query, key, value = inputs = tuple(t.to(dtype).requires_grad_() for t in rows)
            out = each.prepare(tree, device)(query, key, value, None)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
        for got, right in zip(*found, strict=True):
            assert float((got.float() - right).norm() / right.norm()) < 0.02
