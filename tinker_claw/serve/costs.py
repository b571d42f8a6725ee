"""What learning will cost, said before the first dollar is spent."""

from __future__ import annotations

from dataclasses import asdict

from tinker_claw.config import Settings
from tinker_claw.ledger import Ledger
from tinker_claw.prices import Price
from tinker_claw.serve.model_files import DEMO
from tinker_claw.spending import Estimate, assumed, estimate, measured
from tinker_claw.telemetry import log


def forecast(settings: Settings, price: Price, ledger: Ledger | None) -> Estimate:
    """A step's cost, from this ledger's means; None: nothing has been measured."""
    base_judges = settings.judge.judge_url is None and settings.run.model_name != DEMO
    habits = assumed(settings, base_judges=base_judges)
    if ledger is not None:
        habits = measured(ledger.means(), habits, base_judges=base_judges)
    return estimate(settings, price, habits)


def unknown(settings: Settings, price: Price) -> str | None:
    """The sentence where dollars cannot be told; None: they can."""
    if not price.missing:
        return None
    return (
        f"No dollars: of {settings.run.model_name} the price is not known "
        f"({', '.join(price.missing)}). A table of your own is given with --prices FILE, in the "
        "form of configs/prices.toml; a server of your own needs none."
    )


def announce(settings: Settings, price: Price, ledger: Ledger) -> None:
    """One event at start. A local backend bills nothing and says nothing."""
    if settings.run.backend == "local":
        return
    told = forecast(settings, price, ledger)
    log.info(
        "spend.estimate",
        step_usd=told.step_usd,
        judge_usd=told.judge_usd,
        teacher_usd=told.teacher_usd,
        train_usd=told.train_usd,
        serving_usd=told.serve_usd,
        step_tokens=asdict(told.judge + told.teacher + told.train),
        serving_tokens=asdict(told.serve),
        budget_usd=settings.spend.budget_usd,
        prices_of=price.as_of.isoformat() if price.as_of else None,
        per=told.words,
        note=unknown(settings, price),
    )
