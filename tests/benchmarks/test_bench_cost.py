"""The cost benchmark, with small turns: its figures for both schemes are what they are billed."""

from __future__ import annotations

import pytest

from benchmarks.cost import MODEL, measure
from benchmarks.cost_run import Shape
from tinker_claw.billing import prices
from tinker_claw.judge.endpoints import ANSWER_TOKENS
from tinker_claw.types import Usage

pytestmark = pytest.mark.slow


async def test_ours_is_billed_less_for_the_same_step() -> None:
    shape = Shape(turns=10, prompt=200, reply=8)
    rows, serving = await measure(shape, 1, lambda line: None)
    price = prices.load()[MODEL]
    assert serving.total == Usage(prefill=2000, sampled=80)
    schemes = ("ours, at first", "ours, later", "naive")
    assert [(row.hinted, row.scheme) for row in rows] == [
        (share, scheme) for share in (0.1, 0.3, 0.6) for scheme in schemes
    ]
    for first, later, naive in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        hinted = round(later.hinted * 10)
        # One question of every turn, whose three votes share its prompt, or compute it each. The
        # random model ends no answer, so each has all the tokens that it may have.
        asked, each = later.bills["judge"], naive.bills["judge"]
        assert asked.cached == 2 * asked.prefill
        assert asked.sampled == each.sampled == 10 * 3 * ANSWER_TOKENS
        assert each.cached == 0
        assert each.prefill == pytest.approx(3 * asked.prefill, rel=0.02)
        # One pass per hinted turn; or three on every turn. Each samples a token.
        for bills in (first.bills, later.bills):
            assert bills["teacher"].sampled == hinted
        assert naive.bills["teacher"].sampled == 30
        # Ten datums of 208 tokens, or one more for each hint.
        taught = Usage(trained=10 * 207)
        assert first.bills["train"] == later.bills["train"] == taught
        assert naive.bills["train"] == Usage(trained=(10 + hinted) * 207)
        assert max(later.usd(price), first.usd(price)) < naive.usd(price)
