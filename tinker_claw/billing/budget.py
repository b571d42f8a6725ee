"""Counts what was billed, and lets work wait that the budget has no room for.

Rule: the sum comes from the ledger, so a restart changes nothing. Work is let in while everything
spent, everything in hand and its own estimate stay within the budget; what does not fit waits, for
ever if need be, and is still in the ledger for a run with a higher budget.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from tinker_claw.billing.estimate import Estimate
from tinker_claw.billing.meter import Account, charged
from tinker_claw.billing.prices import Price, load
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.spend import Bill, Purpose, SpendTable
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Usage

PROVIDER: Final = "thinkingmachines.dev"
"""The host whose prices the shipped table holds."""


def price_in_force(settings: Settings) -> Price:
    """The price of the model that is served; nothing is known of a server of one's own.

    Raises:
        ConfigError: the price table is wrong.
    """
    run, given = settings.run, settings.spend.prices
    host = urlsplit(run.base_url or os.environ.get("TINKER_BASE_URL") or "").hostname
    own = host is not None and host != PROVIDER and not host.endswith(f".{PROVIDER}")
    if given is None and (own or run.backend == "local"):
        return Price()
    return load(given).of(run.model_name)


def check_budget(settings: Settings, price: Price) -> None:
    """Refuse a budget that cannot be kept.

    Raises:
        ConfigError: nothing is billed, or a price is not known; says what to do.
    """
    budget = settings.spend.budget_usd
    if budget is None:
        return
    if settings.run.backend == "local":
        raise ConfigError(
            "--budget-usd is for a service that bills, and --backend local bills nothing: "
            "leave it out"
        )
    if price.missing:
        raise ConfigError(
            f"--budget-usd {budget:g} cannot be kept: of {settings.run.model_name} the price per "
            f"million tokens is not known ({', '.join(price.missing)}). Give a table with --prices "
            "FILE, in the form of configs/prices.toml, or leave --budget-usd out"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """A sum that learning must stay within."""

    usd: float
    forecast: Callable[[], Estimate]
    """What the next step will cost, as things are."""


class Spending:
    """Everything that a run is billed."""

    def __init__(
        self,
        price: Price,
        table: SpendTable,
        telemetry: Telemetry,
        budget: Budget | None = None,
    ) -> None:
        self._price = price
        self._table = table
        self._telemetry = telemetry
        self._budget = budget
        self._spent = table.total()
        self._reserved: list[float] = []
        self._released = asyncio.Event()
        self._paused_since: float | None = None
        self._paused_because: str | None = None

    @property
    def spent_usd(self) -> float | None:
        """None: some of it has no price. What was billed before there was one is priced now."""
        rest = self._price.usd(self._spent.unpriced)
        return None if rest is None else self._spent.usd + rest

    def bill(self, purpose: Purpose, usage: Usage) -> Bill | None:
        """What to write down for these tokens; None: nothing was billed."""
        return Bill(purpose, usage, self._price.usd(usage)) if usage != Usage() else None

    def count(self, bill: Bill | None) -> None:
        """Take a bill into the sums. It has been written to the ledger."""
        if bill is not None:
            self._spent = self._spent.plus(bill)
            self._telemetry.billed(bill.purpose, bill.usage, bill.usd)

    def record(
        self,
        purpose: Purpose,
        usage: Usage,
        *,
        turn_id: int | None = None,
        step_id: int | None = None,
    ) -> None:
        """Write down what was billed, if anything was."""
        if bill := self.bill(purpose, usage):
            self._table.add(bill, turn_id=turn_id, step_id=step_id)
            self.count(bill)

    @contextmanager
    def paying(
        self, purpose: Purpose, *, turn_id: int | None = None, step_id: int | None = None
    ) -> Generator[Account]:
        """Charge what happens inside to a turn or a step; it is written down however it ends."""
        with charged() as account:
            try:
                yield account
            finally:
                self.record(purpose, account.usage, turn_id=turn_id, step_id=step_id)

    def figures(self, usage: Usage) -> dict[str, Any]:
        """For a step's event: tokens and dollars, or nothing where nothing was billed."""
        bill = self.bill("train", usage)
        return {"usd": bill.usd, "billed": asdict(usage)} if bill else {}

    def room_to_judge(self) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for judging a turn, and for the step after it."""
        budget = self._budget
        return self._room(budget.forecast().judge_turn if budget else Usage(), then_a_step=True)

    def room_to_teach(self, expected: Usage) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for so many tokens, and for the step after them."""
        return self._room(expected, then_a_step=True)

    def room_to_step(self, expected: Usage) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for a step of so many tokens."""
        return self._room(expected, then_a_step=False)

    @asynccontextmanager
    async def _room(self, expected: Usage, *, then_a_step: bool) -> AsyncGenerator[None]:
        """Hold room for work of about that size; without a step, judging would be worth nothing."""
        if self._budget is None:
            yield
            return
        need = self._known(self._price.usd(expected))
        while not self._fits(ahead := need + (self._step_usd() if then_a_step else 0.0)):
            if self._paused_since is None and not self._reserved:
                self._pause(ahead)
            self._released.clear()
            await self._released.wait()
        self._reserved.append(need)
        try:
            yield
        finally:
            self._reserved.remove(need)
            self._released.set()

    def shown_in(self, health: Mapping[str, Any]) -> dict[str, Any]:
        """/healthz with the sums, and with the pause where there is one."""
        shown = {
            **health,
            "spent_usd": self.spent_usd,
            "budget_usd": self._budget.usd if self._budget else None,
            "spent_tokens": asdict(self._spent.usage),
            "spending_paused": self._paused_because,
        }
        if self._paused_since is not None:
            paused = {"judge": "paused", "judge_since": self._paused_since}
            paused |= {"learner": "paused", "learner_since": self._paused_since}
            # What has failed for good stays failed.
            shown |= {k: v for k, v in paused.items() if health.get(k.split("_")[0]) != "failed"}
            shown["status"] = "paused" if health.get("status") == "ok" else health.get("status")
        return shown

    def _fits(self, need: float) -> bool:
        if self._paused_since is not None:
            return False
        in_hand = self._known(self.spent_usd) + sum(self._reserved)
        return in_hand + need <= (self._budget.usd if self._budget else 0.0)

    def _step_usd(self) -> float:
        return self._known(self._budget.forecast().train_usd) if self._budget else 0.0

    def _pause(self, need: float) -> None:
        """From here on nothing is let in any more: smaller work would only eat what is left."""
        spent, budget = self._known(self.spent_usd), self._budget.usd if self._budget else 0.0
        self._paused_since = time.time()
        self._paused_because = (
            f"${spent:.4f} of the budget of ${budget:g} are spent, and to go on learning would "
            f"take about ${need:.4f} more. Nothing is judged or trained; turns are answered and "
            "kept, which goes on costing, and samples stay queued. To go on, start again with a "
            "higher --budget-usd."
        )
        log.warning("spend.paused", because=self._paused_because)

    @staticmethod
    def _known(usd: float | None) -> float:
        """A budget is only accepted where every price is known (`check_budget`)."""
        if usd is None:
            raise ConfigError("a budget needs the price of everything that is billed")
        return usd
