"""The cost benchmark, with small turns: what it says of the two schemes is what they are billed."""

from __future__ import annotations

import pytest

from benchmarks.cost import MODEL, measure
from benchmarks.cost_run import Shape
from tinker_claw.billing import prices
from tinker_claw.types import Usage

pytestmark = pytest.mark.slow


async def test_ours_is_billed_less_for_the_same_step() -> None:
    shape = Shape(turns=10, prompt=200, reply=8, vote=16)
    rows, serving = await measure(shape, 1, lambda line: None)
    price = prices.load().of(MODEL)
    assert serving.total == Usage(prefill=2000, sampled=80)
    assert [(row.hinted, row.scheme) for row in rows] == [
        (share, scheme) for share in (0.1, 0.3, 0.6) for scheme in ("ours", "naive")
    ]
    for ours, naive in zip(rows[::2], rows[1::2], strict=True):
        hinted = round(ours.hinted * 10)
        # Six votes are two requests with the prompt computed once, or six that compute it each.
        assert naive.bills["judge"].prefill == pytest.approx(
            3 * ours.bills["judge"].prefill, rel=0.01
        )
        assert ours.bills["judge"].cached == 2 * ours.bills["judge"].prefill
        assert naive.bills["judge"].cached == 0
        assert ours.bills["judge"].sampled == naive.bills["judge"].sampled == 10 * 6 * 16
        # One pass per hinted turn, or three on every turn; each samples a token.
        assert ours.bills["teacher"].sampled == hinted
        assert naive.bills["teacher"].sampled == 30
        # Ten datums for the rewards and one for each hint, of 208 tokens.
        assert ours.bills["train"] == naive.bills["train"] == Usage(trained=(10 + hinted) * 207)
        assert ours.usd(price) < naive.usd(price)
