"""The cost benchmark, with small turns: its figures for both schemes are what they are billed."""

from __future__ import annotations

import pytest

from benchmarks.cost import MODEL, measure
from benchmarks.cost_run import Shape
from tinker_claw.billing import prices
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
    prefilled = dict[int, tuple[int, int]]()
    for first, later, naive in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        hinted = round(later.hinted * 10)
        # A question of every turn and one more of the hinted, each with the prompt computed once;
        # or two of every turn, whose votes compute it each.
        asked = later.bills["judge"]
        assert asked.cached == 2 * asked.prefill
        assert asked.sampled == (10 + hinted) * 3 * 16
        assert naive.bills["judge"].cached == 0
        assert naive.bills["judge"].sampled == 10 * 6 * 16
        prefilled[hinted] = asked.prefill, naive.bills["judge"].prefill
        # One pass per hinted turn; or three on every turn. Each samples a token. What measures
        # hints is up to three more, until it is claimed whether they help.
        for bills in (first.bills, later.bills):
            assert hinted <= bills["teacher"].sampled <= 4 * hinted
        assert naive.bills["teacher"].sampled == 30
        # Ten datums of 208 tokens, or one more for each hint.
        taught = Usage(trained=10 * 207)
        assert first.bills["train"] == later.bills["train"] == taught
        assert naive.bills["train"] == Usage(trained=(10 + hinted) * 207)
        assert max(later.usd(price), first.usd(price)) < naive.usd(price)
    # Ten verdicts and a hint's question for each hinted turn, against thirty of each.
    one_more = (prefilled[6][0] - prefilled[1][0]) / 5
    verdicts = prefilled[1][0] - one_more
    for ours, theirs in prefilled.values():
        assert theirs == pytest.approx(3 * verdicts + 30 * one_more, rel=0.02)
        assert ours < theirs / 3
