"""Counts what was billed, and lets work wait that the budget has no room for.

Rule: the sums come from the ledger, so a restart changes nothing. A bill counts at once; while the
ledger cannot be written it waits, and nothing more is bought for learning. Work is let in while
everything spent, everything in hand and its own estimate stay within the budget; what does not fit
into a day waits for the next one, and what does not fit at all for a run with a higher budget. It
is still in the ledger then.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from tinker_claw.billing.estimate import Estimate
from tinker_claw.billing.meter import Account, charged
from tinker_claw.billing.prices import Price, load
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.ledger.spend import Bill, Purpose, SpendTable, Spent
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Usage

PROVIDER: Final = "thinkingmachines.dev"
"""The host whose prices the shipped table holds."""
DAY_S: Final = 86_400
"""Days are UTC's, and begin where seconds since 1970 are a multiple of this."""
_LOOK_S: Final = 60.0
"""What waits for a new day looks at the clock so often: a machine may sleep through midnight."""


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
    spend = settings.spend
    limits = {"--budget-usd": spend.budget_usd, "--budget-usd-per-day": spend.budget_usd_per_day}
    for flag, usd in limits.items():
        if usd is None:
            continue
        if settings.run.backend == "local":
            raise ConfigError(
                f"{flag} is for a service that bills, and --backend local bills nothing: "
                "leave it out"
            )
        if price.missing:
            raise ConfigError(
                f"{flag} {usd:g} cannot be kept: of {settings.run.model_name} the price per "
                f"million tokens is not known ({', '.join(price.missing)}). Give a table with "
                f"--prices FILE, in the form of configs/prices.toml, or leave {flag} out"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """The sums that learning must stay within; None: this one has no bound."""

    usd: float | None
    """In all."""
    usd_per_day: float | None
    forecast: Callable[[], Estimate]
    """What the next step will cost, as things are."""

    @property
    def bounded(self) -> bool:
        return self.usd is not None or self.usd_per_day is not None


class Spending:
    """Everything that a run is billed."""

    def __init__(
        self,
        price: Price,
        table: SpendTable,
        telemetry: Telemetry,
        budget: Budget | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since 1970."""
        self._price = price
        self._table = table
        self._telemetry = telemetry
        self._budget = budget if budget and budget.bounded else None
        self._clock = clock
        self._spent = table.total()
        self._day = self._midnight()
        """When the day began that `_today` is of."""
        self._today = table.total(since=self._day)
        self._unwritten: dict[tuple[Purpose, int | None, int | None], Usage] = {}
        """Of what was billed, by purpose, turn and step, what the ledger has not taken yet."""
        self._reserved: list[float] = []
        self._released = asyncio.Event()
        self._paused_since: float | None = None
        self._paused_because: str | None = None
        self._paused_for_today = False
        """The pause ends with the day."""

    @property
    def spent_usd(self) -> float | None:
        """None: some of it has no price. What was billed before there was one is priced now."""
        return self._usd(self._spent)

    @property
    def spent_today_usd(self) -> float | None:
        """Since midnight UTC; None as above."""
        self._look_at_the_clock()
        return self._usd(self._today)

    def bill(self, purpose: Purpose, usage: Usage) -> Bill | None:
        """What to write down for these tokens; None: nothing was billed."""
        return Bill(purpose, usage, self._price.usd(usage)) if usage != Usage() else None

    def count(self, bill: Bill | None) -> None:
        """Take a bill into the sums."""
        if bill is not None:
            self._look_at_the_clock()
            self._spent, self._today = self._spent.plus(bill), self._today.plus(bill)
            self._telemetry.billed(bill.purpose, bill.usage, bill.usd)

    def record(
        self,
        purpose: Purpose,
        usage: Usage,
        *,
        turn_id: int | None = None,
        step_id: int | None = None,
    ) -> None:
        """Count what was billed, if anything was, and write it down.

        Raises:
            LedgerError: it cannot be written; it is counted all the same, and written later.
        """
        if bill := self.bill(purpose, usage):
            self.count(bill)
            of = (purpose, turn_id, step_id)
            self._unwritten[of] = self._unwritten.get(of, Usage()) + usage
            self._write()

    def _write(self) -> None:
        for (purpose, turn_id, step_id), usage in list(self._unwritten.items()):
            if bill := self.bill(purpose, usage):
                self._table.add(bill, turn_id=turn_id, step_id=step_id)
            del self._unwritten[purpose, turn_id, step_id]

    @contextmanager
    def paying(
        self, purpose: Purpose, *, turn_id: int | None = None, step_id: int | None = None
    ) -> Generator[Account]:
        """Charge what happens inside to a turn or a step; it is written down however it ends, and
        so is what is billed for it later."""
        with charged() as account:
            try:
                yield account
            finally:
                account.late = self.late(purpose, turn_id=turn_id, step_id=step_id)
                self.record(purpose, account.usage, turn_id=turn_id, step_id=step_id)

    def late(
        self, purpose: Purpose, *, turn_id: int | None = None, step_id: int | None = None
    ) -> Callable[[Usage], None]:
        """Records what is billed when the sum has been taken: a service went on with what nobody
        waited for any more."""

        def record(usage: Usage) -> None:
            with suppress(LedgerError):  # it is written later still
                self.record(purpose, usage, turn_id=turn_id, step_id=step_id)

        return record

    def figures(self, usage: Usage) -> dict[str, Any]:
        """For a step's event: tokens and dollars, or nothing where nothing was billed."""
        bill = self.bill("train", usage)
        return {"usd": bill.usd, "billed": asdict(usage)} if bill else {}

    def room_to_judge(self) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for judging a turn, and for the step after it."""
        budget = self._budget
        return self._room(budget.forecast().judge_turn if budget else Usage(), then_a_step=True)

    @property
    def has_room_to_judge(self) -> bool:
        """Whether there is that room now: a wait would pause all, also for what need not be."""
        if self._budget is None:
            return True
        need = self._known(self._price.usd(self._budget.forecast().judge_turn))
        return self._fits(need + self._step_usd())

    def room_to_teach(self, expected: Usage) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for so many tokens, and for the step after them."""
        return self._room(expected, then_a_step=True)

    def room_to_step(self, expected: Usage) -> AbstractAsyncContextManager[None]:
        """Wait until the budget has room for a step of so many tokens."""
        return self._room(expected, then_a_step=False)

    @asynccontextmanager
    async def _room(self, expected: Usage, *, then_a_step: bool) -> AsyncGenerator[None]:
        """Hold room for work of about that size; without a step, judging would be worth nothing.

        Raises:
            LedgerError: what was billed before cannot be written, and neither could this.
        """
        if then_a_step:
            self._write()
        if self._budget is None:
            yield
            return
        need = self._known(self._price.usd(expected))
        while not self._fits(ahead := need + (self._step_usd() if then_a_step else 0.0)):
            if self._paused_since is None and not self._reserved:
                self._pause(ahead)
            self._released.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s()):
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
            "spent_today_usd": self.spent_today_usd,
            "budget_usd_per_day": self._budget.usd_per_day if self._budget else None,
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
        self._look_at_the_clock()
        return self._paused_since is None and self._short(need) is None

    def _short(self, need: float) -> tuple[float, float, bool] | None:
        """What is spent of which bound, and whether that is a day's, where there is no room for
        `need` beside what is in hand; None: there is."""
        if self._budget is None:
            return None
        ahead = sum(self._reserved) + need
        for spent, usd, daily in (
            (self._spent, self._budget.usd, False),
            (self._today, self._budget.usd_per_day, True),
        ):
            if usd is not None and (gone := self._known(self._usd(spent))) + ahead > usd:
                return gone, usd, daily
        return None

    def _step_usd(self) -> float:
        return self._known(self._budget.forecast().train_usd) if self._budget else 0.0

    def _pause(self, need: float) -> None:
        """From here on nothing is let in any more: smaller work would only eat what is left."""
        short = self._short(need)
        if short is None:
            return
        spent, usd, self._paused_for_today = short
        whose, flag = "of the budget", "--budget-usd"
        if self._paused_for_today:
            whose, flag = "of today's budget", "--budget-usd-per-day"
        waiting_helps = self._paused_for_today and need <= usd
        how = f"To go on, start again with a higher {flag}."
        if waiting_helps:
            how = "Learning goes on by itself at midnight UTC."
        self._paused_since = self._clock()
        self._paused_because = (
            f"${spent:.4f} {whose} of ${usd:g} are spent, and to go on learning would "
            f"take about ${need:.4f} more. Nothing is judged or trained; turns are answered and "
            f"kept, which goes on costing, and samples stay queued. {how}"
        )
        log.warning("spend.paused", because=self._paused_because)

    # Days

    def _midnight(self) -> float:
        return self._clock() // DAY_S * DAY_S

    def _look_at_the_clock(self) -> None:
        """Begin a new day where it has come: with nothing spent, and without the pause of the last.

        A clock that was set back goes on with the day that it was.
        """
        if (day := self._midnight()) <= self._day:
            return
        self._day, self._today = day, Spent()
        if self._paused_for_today:
            self._paused_since, self._paused_because = None, None
            self._paused_for_today = False
            log.info("spend.resumed")

    def _look_s(self) -> float | None:
        """How long what waits may sleep; None: no day changes anything."""
        if self._budget is None or self._budget.usd_per_day is None:
            return None
        return max(0.0, min(_LOOK_S, self._day + DAY_S - self._clock()))

    def _usd(self, spent: Spent) -> float | None:
        rest = self._price.usd(spent.unpriced)
        return None if rest is None else spent.usd + rest

    @staticmethod
    def _known(usd: float | None) -> float:
        """A budget is only accepted where every price is known (`check_budget`)."""
        if usd is None:
            raise ConfigError("a budget needs the price of everything that is billed")
        return usd
