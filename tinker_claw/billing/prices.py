"""Token prices: a dated table of our own, or one of the user's.

Rule: a price without a source is None, never 0, and no sum in dollars is given of what needs it.
The shipped table is configs/prices.toml, which names the source of each figure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from tinker_claw.config.load import read_as
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.shipped import PRICES
from tinker_claw.types import Usage

PROVIDER = "thinkingmachines.dev"
"""The host whose prices the shipped table holds."""
_ENTRIES = ConfigDict(extra="forbid", allow_inf_nan=False)
_Usd = Annotated[float | None, Field(ge=0, strict=True)]


@dataclass(frozen=True, slots=True, config=_ENTRIES)
class Price:
    """Prices of one model, in USD per million tokens. None: not known."""

    prefill: _Usd = None
    cached: _Usd = None
    sample: _Usd = None
    train: _Usd = None
    as_of: date | None = None
    """When the oldest figure of the row was read; None: there is no row."""

    def usd(self, usage: Usage) -> float | None:
        """Return the cost in US dollars, or None if a price that it needs is not known."""
        total = 0.0
        prices = (self.prefill, self.cached, self.sample, self.train)
        for tokens, price in zip(astuple(usage), prices, strict=True):
            if tokens and price is None:
                return None
            total += tokens * (price or 0.0)
        return total / 1_000_000

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the prices that are not known."""
        return tuple(
            name for name in ("prefill", "cached", "sample", "train") if getattr(self, name) is None
        )


class _File(BaseModel):
    model_config = _ENTRIES

    as_of: date
    cached_share: _Usd = None
    """Price of cached tokens as a share of prefill's, for rows that name none."""
    models: dict[str, Price]


def load(path: Path | None = None) -> Mapping[str, Price]:
    """Read the prices of a service's models by their exact ids; None reads the shipped table.

    Raises:
        ConfigError: the file cannot be read, or an entry is unknown or out of range, by name.
    """
    file = read_as(_File, "--prices", path or PRICES)
    prices = dict[str, Price]()
    for name, row in file.models.items():
        cached = row.cached
        if cached is None and row.prefill is not None and file.cached_share is not None:
            cached = row.prefill * file.cached_share
        prices[name] = replace(row, cached=cached, as_of=row.as_of or file.as_of)
    return prices


def price_in_force(settings: Settings) -> Price:
    """The price of the model that is served; nothing is known of a server of one's own.

    Raises:
        ConfigError: the price table is wrong.
    """
    run, price_file = settings.run, settings.spend.prices
    host = urlsplit(run.base_url or os.environ.get("TINKER_BASE_URL") or "").hostname
    own = host is not None and host != PROVIDER and not host.endswith(f".{PROVIDER}")
    if price_file is None and (own or run.backend == "local"):
        return Price()
    return load(price_file).get(run.model_name, Price())


def unknown(settings: Settings, price: Price) -> str | None:
    """Explain why the cost in dollars is unknown; None: it is known."""
    if not price.missing:
        return None
    return (
        f"of {settings.run.model_name} the price per million tokens is not known "
        f"({', '.join(price.missing)}). Give a table with --prices FILE, in the form of "
        "configs/prices.toml"
    )


def check_budget(settings: Settings, price: Price) -> None:
    """Refuse a budget that cannot be kept.

    Raises:
        ConfigError: nothing is billed, or a price is not known; says what to do.
    """
    if settings.spend.budget is None:
        return
    if settings.run.backend == "local":
        raise ConfigError(
            "--budget-usd is for a service that bills, and --backend local bills nothing: leave it "
            "out"
        )
    if reason := unknown(settings, price):
        budget = settings.spend.budget_usd
        budget_text = f"{budget:g}" if isinstance(budget, float) else budget
        raise ConfigError(f"--budget-usd {budget_text} cannot be kept: {reason}, or leave it out")
