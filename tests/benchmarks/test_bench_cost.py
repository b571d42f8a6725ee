"""The cost benchmark, with small turns: its figures for both schemes are what they are billed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cost import MODEL, measure
from benchmarks.cost_run import Shape, bench_on, ours, serve_turns
from benchmarks.tiny_server import server
from tinker_claw.billing import prices
from tinker_claw.judge.endpoints import ANSWER_TOKENS
from tinker_claw.types import Usage

pytestmark = pytest.mark.slow


async def test_ours_is_billed_less_for_the_same_step() -> None:
    shape = Shape(turns=10, prompt=200, reply=8)
    rows, serving = await measure(shape, 1, lambda line: None)
    price = prices.load()[MODEL]
    assert serving.total == Usage(prefill=2000, sampled=80)
    assert [(row.hinted, row.scheme) for row in rows] == [
        (share, scheme) for share in (0.1, 0.3, 0.6) for scheme in ("ours", "naive")
    ]
    for mine, naive in zip(rows[::2], rows[1::2], strict=True):
        hinted = round(mine.hinted * 10)
        # One question of every turn, whose three votes share its prompt, or compute it each. The
        # random model ends no answer, so each has all the tokens that it may have.
        asked, each = mine.bills["judge"], naive.bills["judge"]
        assert asked.cached == 2 * asked.prefill
        assert asked.sampled == each.sampled == 10 * 3 * ANSWER_TOKENS
        assert each.cached == 0
        assert each.prefill == pytest.approx(3 * asked.prefill, rel=0.02)
        # One pass per hinted turn; or three on every turn. Each samples a token.
        assert mine.bills["teacher"].sampled == hinted
        assert naive.bills["teacher"].sampled == 30
        # Ten datums of 208 tokens, or one more for each hint.
        assert mine.bills["train"] == Usage(trained=10 * 207)
        assert naive.bills["train"] == Usage(trained=(10 + hinted) * 207)
        assert mine.usd(price) < naive.usd(price)


@pytest.mark.parametrize(
    ("context", "batch", "because"),
    [(600, 2, "context"), (2600, 3, "all turns are judged, and 2 of the 3 samples")],
    ids=["the judge fails", "no batch"],
)
async def test_a_step_that_would_not_come_ends_it(
    context: int, batch: int, because: str, tmp_path: Path
) -> None:
    shape = Shape(turns=2, prompt=200, reply=8)
    with server(tmp_path, context, 1) as url:
        bench = bench_on(url, tmp_path, shape)
        bench = replace(bench, cfg=bench.cfg.model_copy(update={"batch_size": batch}))
        turns, _ = await serve_turns(bench)
        with pytest.raises(ExceptionGroup) as raised:
            await ours(bench, turns, 0)
    (error,) = raised.value.exceptions
    assert str(error).startswith("There is no step: ")
    assert because in str(error)
