"""What tokens cost: a dated table that we own, or one of the user's.

Rule: a price that nobody was found to have read is None, never 0, and what needs it has no dollars.
The shipped table is configs/prices.toml, which says where each figure comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinker_claw.config.load import read_toml
from tinker_claw.errors import ConfigError
from tinker_claw.shipped import PRICES
from tinker_claw.types import Usage

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Of one model, in USD per million tokens. None: not known."""

    prefill: float | None = None
    cached: float | None = None
    sample: float | None = None
    train: float | None = None
    as_of: date | None = None
    """When the oldest figure of the row was read; None: there is no row."""
    storage: float | None = None
    """USD per GB and month of checkpoints, which nobody counts here."""

    def usd(self, usage: Usage) -> float | None:
        """What these tokens cost; None where a price that they need is not known."""
        total = 0.0
        for tokens, price in (
            (usage.prefill, self.prefill),
            (usage.cached, self.cached),
            (usage.sampled, self.sample),
            (usage.trained, self.train),
        ):
            if tokens and price is None:
                return None
            total += tokens * (price or 0.0)
        return total / _MILLION

    @property
    def missing(self) -> tuple[str, ...]:
        """Which of the four prices are not known."""
        return tuple(
            name for name in ("prefill", "cached", "sample", "train") if getattr(self, name) is None
        )


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices of a service's models."""

    path: Path
    models: Mapping[str, Price]

    def of(self, model: str) -> Price:
        """The row with exactly this id; without one nothing is known."""
        return self.models.get(model, Price())


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Row(_Entry):
    prefill: float | None = Field(default=None, ge=0)
    cached: float | None = Field(default=None, ge=0)
    sample: float | None = Field(default=None, ge=0)
    train: float | None = Field(default=None, ge=0)
    as_of: date | None = None


class _File(_Entry):
    as_of: date
    cached_share: float | None = Field(default=None, ge=0, le=1)
    """Of the prefill price, for rows that name no price of cached tokens."""
    storage_usd_per_gb_month: float | None = Field(default=None, ge=0)
    models: dict[str, _Row]


def load(path: Path | None = None) -> PriceTable:
    """Read a table; None reads the shipped one.

    Raises:
        ConfigError: the file cannot be read, or an entry is unknown or out of range, by name.
    """
    path = path or PRICES
    try:
        content = _File.model_validate(read_toml("--prices", path))
    except ValidationError as error:
        problems = "; ".join(_problem(e) for e in error.errors(include_input=False))
        raise ConfigError(f"--prices {path}: {problems}") from error
    models = {name: _price(row, content) for name, row in content.models.items()}
    return PriceTable(path, models)


def _price(row: _Row, content: _File) -> Price:
    cached = row.cached
    if cached is None and row.prefill is not None and content.cached_share is not None:
        cached = row.prefill * content.cached_share
    return Price(
        prefill=row.prefill,
        cached=cached,
        sample=row.sample,
        train=row.train,
        as_of=row.as_of or content.as_of,
        storage=content.storage_usd_per_gb_month,
    )


def _problem(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no such entry"
    return f"{where}: {error['msg']}"
