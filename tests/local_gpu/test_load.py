"""Trials of a model when it is loaded."""

from __future__ import annotations

import pytest
import torch

from local_gpu.model.load import same_but_for_rounding

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def logits(size: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Product of a head, and the same summed in another order and rounded on the way."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 64, generator=draw)
    head = torch.randn(5000, 64, generator=draw) * size / 8
    once = (rows.to(dtype) @ head.to(dtype).T).to(dtype)
    left, right = (
        a.to(dtype) @ b.to(dtype).T
        for a, b in zip(rows.split(32, dim=1), head.split(32, dim=1), strict=True)
    )
    return once, left + right


@BOTH
@pytest.mark.parametrize("size", [0.1, 1.0, 20.0])
def test_rounding_in_another_order_is_no_difference(size: float, dtype: torch.dtype) -> None:
    once, again = logits(size, dtype)
    assert not torch.equal(once, again)
    assert same_but_for_rounding(once, again)
    assert same_but_for_rounding(once, once)


@BOTH
@pytest.mark.parametrize("size", [3.0, 20.0])
def test_what_is_done_to_logits_on_purpose_is_one(size: float, dtype: torch.dtype) -> None:
    once, again = logits(size, dtype)
    capped = (30 * (once.double() / 30).tanh()).to(dtype)
    assert not same_but_for_rounding(capped, again), "as Gemma 2 does it"
    assert not same_but_for_rounding(once * 0.0625, again), "as Cohere does it"
    shifted = once.clone()
    shifted[1] += once.abs().mean()
    assert not same_but_for_rounding(shifted, again)
    assert not same_but_for_rounding(torch.full_like(once, torch.nan), again)
