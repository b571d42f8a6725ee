"""The benchmark of chains, tiny: what its sides compute, and that they learn the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given

from benchmarks import chains
from benchmarks.chains import NONE, SPLIT, TREE, Sizes, agent, openclaw, split
from benchmarks.training_shapes import Shape
from benchmarks.training_sides import attended
from local_gpu.tree.kernels import MergedKernel
from local_gpu.tree.prefix_tree import grow
from tests.local_gpu.tree.test_attention import random_rows
from tests.local_gpu.tree.test_prefix_tree import seen_by_row
from tests.trees import SETTINGS, batches, tensors
from tinker_claw.shipped import MODEL_DIR

SHAPE = Shape(2, 32, 64, 4, 2, 8, 512)
SIZES = Sizes(turns=4, first=90, reply=10, result=40)
LENGTHS = [100, 150, 200, 250]


def test_each_side_computes_what_it_says_and_has_the_same_gradients() -> None:
    said: list[str] = []
    rows = chains.measure({"agent": agent(SIZES, 512)}, SHAPE, said.append, repeat=1)
    assert [row.side for row in rows] == [TREE, SPLIT, NONE]
    assert [(row.tokens, row.segments, row.calls, row.keys) for row in rows] == [
        (249, 1, 1, 249),
        (249, 4, 7, sum(LENGTHS) - 4),
        (sum(LENGTHS) - 4, 4, 4, sum(LENGTHS) - 4),
    ]
    assert len({row.pairs for row in rows[:2]}) == 1 < rows[2].pairs / rows[0].pairs
    assert all(row.gradient_error < 1e-5 for row in rows)


@SETTINGS
@given(batches())
def test_a_tree_that_is_split_where_samples_end_is_the_same_attention(
    sequences: list[list[int]],
) -> None:
    tree = grow(tensors(sequences), least=1)
    parts = split(tree)
    assert seen_by_row(parts) == seen_by_row(tree)
    assert attended(parts) == attended(tree) == sum(map(len, seen_by_row(tree)))
    ends = {int(rows[-1]) + 1 for rows in tree.rows}
    assert ends <= {segment.last for segment in parts.segments}
    rows = random_rows(tree, (4, 2), torch.float64)
    got, right = (MergedKernel().prepare(one, torch.device("cpu")) for one in (parts, tree))
    torch.testing.assert_close(got(*rows, None), right(*rows, None))


def test_captured_requests_fork_where_the_real_ones_do() -> None:
    datums = openclaw(replace(SIZES, turns=3), 4096, MODEL_DIR)
    prompts = [torch.tensor(datum.tokens[: datum.start]) for datum in datums]
    tree = grow(prompts)
    assert len(tree.segments) > len(prompts), "no prompt is the beginning of the next one"
    assert len(tree.tokens) < 1.2 * max(map(len, prompts)), "all else is shared"
