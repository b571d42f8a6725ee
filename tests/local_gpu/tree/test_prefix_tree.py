"""The tree of shared prefixes: every sequence is in it whole, in order, and sees only itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from local_gpu.tree.prefix_tree import PrefixTree, grow
from tests.support.local_reference import SETTINGS, batches, tensors

least_shared = st.sampled_from([1, 2, 4, 32])


def seen_by_row(tree: PrefixTree) -> list[set[int]]:
    """Rows that each row may attend to, by its segment's ancestors."""
    found: list[set[int]] = []
    for segment in tree.segments:
        above = {row for rows in segment.ancestors for row in range(*rows)}
        found += [
            above | set(range(segment.first, row + 1)) for row in range(segment.first, segment.last)
        ]
    return found


@SETTINGS
@given(batches(), least_shared, st.booleans())
def test_each_sequence_is_spelt_by_its_rows_and_sees_its_own_prefix_only(
    sequences: list[list[int]], least: int, share: bool
) -> None:
    tree = grow(tensors(sequences), share=share, least=least)
    seen = seen_by_row(tree)
    assert len(tree.rows) == len(sequences)
    for sequence, rows in zip(sequences, tree.rows, strict=True):
        assert tree.tokens[rows].tolist() == sequence
        assert tree.positions[rows].tolist() == list(range(len(sequence)))
        places = rows.tolist()
        for i, row in enumerate(places):
            assert seen[row] == set(places[: i + 1])


@SETTINGS
@given(batches())
def test_every_shared_prefix_is_computed_once_and_none_where_sharing_is_off(
    sequences: list[list[int]],
) -> None:
    prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    total = sum(map(len, sequences))
    assert len(grow(tensors(sequences), least=1).tokens) == len(prefixes)
    assert len(grow(tensors(sequences), share=False).tokens) == total
    distinct = sum(len(s) for s in {tuple(s) for s in sequences})
    for least in (3, 32):
        assert len(prefixes) <= len(grow(tensors(sequences), least=least).tokens) <= distinct


@pytest.mark.parametrize("length", [1, 20, 40])
def test_equal_sequences_are_computed_once_however_short(length: int) -> None:
    tree = grow([torch.arange(length)] * 3)
    assert tree.tokens.tolist() == list(range(length))
    assert [rows.tolist() for rows in tree.rows] == [list(range(length))] * 3


def test_a_session_of_a_thousand_turns_is_one_segment() -> None:
    whole = torch.arange(1000)
    tree = grow([whole[: i + 1] for i in range(1000)])
    assert torch.equal(tree.tokens, whole)
    assert [(s.first, s.last, s.subtree) for s in tree.segments] == [(0, 1000, 1000)]
