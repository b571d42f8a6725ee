"""Bills are charged to the turn or step that caused them; estimates count the same way."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import FakeTrainer
from tests.support.learning import world
from tests.support.ledger import billed, by_purpose, judgeable, of_step, of_turn, sql, step_counts
from tinker_claw.billing import estimate
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.estimate import announce, forecast
from tinker_claw.billing.prices import Price
from tinker_claw.config.load import load
from tinker_claw.config.settings import Budget, Run, Settings, Training
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Spent
from tinker_claw.telemetry import Telemetry, configure
from tinker_claw.types import Usage

PRICE = Price(prefill=1.0, cached=0.25, sample=2.0, train=0.5)
QUESTION = Usage(prefill=100, cached=200, sampled=30)
BATCH = ("YES", "NO", "YES", "NO, HOW it should be")
SETTINGS = Settings(run=Run(method="combine"), training=Training(batch_size=4, gate="off"))


def priced(price: Price) -> Callable[[Ledger, Telemetry], Spending]:
    return lambda ledger, telemetry: Spending(price, ledger.spend, telemetry)


@dataclass(frozen=True)
class Found:
    """Bills and figures of a scripted run."""

    purposes: Mapping[str, Spent]
    turns: list[Usage]
    step: Spent
    figures: str
    health: dict[str, Any]
    metrics: dict[str, Any]


async def scripted(path: Path, price: Price = PRICE) -> Found:
    """Judge, teach and train one batch on a backend that bills like a service."""
    async with world(path, trainer=FakeTrainer(bills=True), spending=priced(price)) as w:
        w.says.billed = QUESTION
        for said in BATCH:
            w.turn(said)
        await w.version(1)
        await w.until(w.metrics.exists)
        return Found(
            purposes=by_purpose(w.ledger),
            turns=[of_turn(w.ledger, n) for n in (1, 2, 3, 4)],
            step=billed(w.ledger, "step_id = 1"),
            figures=w.telemetry.exposition().decode(),
            health=w.spending.sums(),
            metrics=json.loads(w.metrics.read_text()),
        )


async def test_every_turn_and_step_has_its_own_bill_and_sums_are_shown(tmp_path: Path) -> None:
    found = await scripted(tmp_path)
    judged = Usage(prefill=100, cached=200, sampled=30)  # one question for verdict and hint
    taught = Usage(prefill=6, sampled=2)  # prompt 4, hint 2, and the reply that it writes
    assert found.turns == [judged, judged, judged, judged + taught]
    trained = Usage(trained=4 * 5)  # four replies of 2 tokens behind 4; the teacher wrote one
    assert found.step == Spent(trained, 20 * 0.5 / 1e6)
    assert found.metrics["usd"] == pytest.approx(20 * 0.5e-6)
    assert found.metrics["billed"]["trained"] == 20
    assert 'tinker_claw_spent_usd_total{purpose="train"} 1e-05' in found.figures
    tokens = {"prefill": 406, "cached": 800, "sampled": 122, "trained": 20}
    assert found.health["spent_tokens"] == tokens
    assert found.health["spent_usd"] == pytest.approx((406 + 200 + 244 + 10) * 1e-6)


async def test_unknown_price_counts_tokens_and_no_dollars(tmp_path: Path) -> None:
    found = await scripted(tmp_path, Price(prefill=1.0))
    assert found.health["spent_usd"] is None
    assert found.step == Spent(Usage(trained=20), 0.0, Usage(trained=20))
    assert "tinker_claw_spent_usd_total{" not in found.figures
    assert found.metrics["usd"] is None
    ledger = Ledger(tmp_path)
    known = Spending(PRICE, ledger.spend, Telemetry(None))
    assert known.spent_usd == pytest.approx((406 + 200 + 244 + 10) * 1e-6), "priced afterwards"
    ledger.close()


async def test_backend_that_bills_nothing_leaves_no_rows(tmp_path: Path) -> None:
    async with world(tmp_path, spending=priced(PRICE)) as w:
        for said in BATCH:
            w.turn(said)
        await w.version(1)
        assert sql(w.ledger).rows("SELECT * FROM spend") == []
        assert w.spending.spent_usd == 0.0
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert "usd" not in line


async def test_void_step_and_failed_judge_have_cost_their_money(tmp_path: Path) -> None:
    trainer = FakeTrainer(bills=True)
    async with world(tmp_path, trainer=trainer, spending=priced(PRICE)) as w:
        trainer.fail["publish"] = 1
        w.says.billed = QUESTION
        w.turn("UNJUDGEABLE")
        for said in BATCH:
            w.turn(said)
        await w.version(1)
        assert step_counts(w.ledger) == {"intent": 0, "committed": 1, "void": 1}
        assert [of_step(w.ledger, n).trained for n in (1, 2)] == [20, 20]
        assert of_turn(w.ledger, 1).prefill >= 100, "asked in vain, and billed"


async def test_estimate_is_what_the_newest_steps_were_billed(tmp_path: Path) -> None:
    found = await scripted(tmp_path)
    ledger = Ledger(tmp_path)
    told = forecast(SETTINGS, PRICE, ledger)
    learning = [found.purposes[one].usage for one in ("judge", "teacher", "train")]
    assert told.step == sum(learning, Usage())
    assert told.step_usd == pytest.approx(sum(one.usd for one in found.purposes.values()))
    assert "as the 4 of the newest steps were billed" in told.words
    twice = Settings(run=Run(method="combine"), training=Training(batch_size=8))
    assert forecast(twice, PRICE, ledger).step == told.step + told.step
    ledger.close()


async def test_what_is_assumed_is_within_a_factor_of_two_where_turns_are_as_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, tokens in {
        "PROMPT_TOKENS": 4,
        "REPLY_TOKENS": 2,
        "JUDGE_PROMPT_TOKENS": QUESTION.prefill,
        "VOTE_TOKENS": QUESTION.sampled // 3,
    }.items():
        monkeypatch.setattr(estimate, name, tokens)
    told = forecast(SETTINGS, PRICE).step_usd
    found = await scripted(tmp_path)
    billed = sum(one.usd for one in found.purposes.values())
    assert told is not None
    assert billed / 2 < told < billed * 2


async def test_verdict_that_was_paid_for_is_kept_while_the_teacher_waits(tmp_path: Path) -> None:
    def budget(usd: float) -> Callable[[Ledger, Telemetry], Spending]:
        return lambda ledger, telemetry: Spending(
            PRICE, ledger.spend, telemetry, budget=Budget(usd)
        )

    trainer = FakeTrainer(bills=True)
    async with world(tmp_path, trainer=trainer, spending=budget(1e-9)) as w:
        w.says.billed = QUESTION
        turn = w.turn("NO, HOW it should be")
        await w.until(lambda: w.spending.paused() is not None)
        assert w.ledger.judgements.hints(turn) == ("do it the other way",)
        assert judgeable(w.ledger) == [turn]
        assert w.base.scored == []
        asked = w.says.asked
    async with world(tmp_path, trainer=trainer, spending=budget(600)) as w:
        await w.settled()
        assert w.ledger.samples.queued() == 1
        assert w.says.asked == 0
        assert asked == 1, "it was not judged a second time"


def test_first_estimate_says_what_it_assumes() -> None:
    told = forecast(load([]), Price(0.195, 0.039, 0.6, 0.44))
    for words in ("16 samples from 16", "11,000", "300", "3 votes", "30% of", "assumed"):
        assert words in told.words
    # Half of the samples are scored again. The gate asks the shipped canaries.
    judge = Usage(prefill=16 * 2_750, cached=16 * 5_500, sampled=16 * 300)
    teacher = Usage(prefill=round(4.8 * 11_040), sampled=round(4.8 * 300))
    train = Usage(prefill=8 * 11_300, sampled=8, trained=16 * 11_299)
    gate = Usage(prefill=3_300, sampled=72)
    assert told.step == judge + teacher + train + gate
    assert told.serve == Usage(prefill=16 * 11_000, sampled=16 * 300)
    assert told.serve_usd == pytest.approx((176_000 * 0.195 + 4_800 * 0.6) / 1e6)
    assert told.step_usd is not None
    assert 0.1 < told.step_usd < 0.2


def test_method_and_judge_change_the_estimate() -> None:
    def step(*flags: str) -> Usage:
        return forecast(load(flags), Price()).step

    assert step("--method", "binary").trained == 16 * 11_299
    assert step("--judge-url", "http://127.0.0.1:9/v1").cached == 0
    assert step("--judge-thinking").sampled > 2 * step().sampled
    # opd learns from hinted turns only, so more turns are judged for a batch.
    assert step("--method", "opd").cached > 3 * step("--method", "binary").cached
    three = step("--recipe", "paper").prefill - step().prefill
    assert three > 2 * 4 * 11_000, "it scores three hints"


def test_estimate_is_announced_before_anything_is_spent(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure(stream)
    with closing(Ledger(tmp_path)) as ledger:
        announce(load(["--budget-usd", "5"]), PRICE, ledger)
        announce(load(["--model-name", "mine"]), Price(), ledger)
        announce(load(["--backend", "local"]), Price(), ledger)
    known, unknown = map(json.loads, stream.getvalue().splitlines())
    assert known["event"] == "spend.estimate"
    assert isinstance(known["step_usd"], float)
    assert (known["budget_usd"], known["note"]) == (5.0, None)
    assert unknown["step_usd"] is None
    assert unknown["step_tokens"]
    assert "--prices FILE" in unknown["note"]


def test_message_of_a_person_is_served_judged_and_learned_from() -> None:
    price = Price(0.195, 0.039, 0.6, 0.44)
    served = price.usd(Usage(prefill=10 * 11_000, sampled=10 * 300))
    judged = price.usd(Usage(prefill=10 * 2_750, cached=10 * 5_500, sampled=10 * 300))
    learned = price.usd(Usage(trained=2 * 11_299))  # an eighth of a step
    assert served is not None
    assert judged is not None
    assert learned is not None
    short, long = (price.usd(estimate.message(load([]), n)) for n in (11_000, 30_000))
    assert served + judged + learned < (short or 0) == pytest.approx(0.046, abs=0.001)
    assert long == pytest.approx(0.106, abs=0.001)
    unbilled = estimate.message(load(["--judge-url", "http://127.0.0.1:9/v1"]), 11_000)
    assert unbilled.cached == 0
