"""Count what was billed, and hold learning once a budget is spent.

Rule: the sums come from the ledger, so a restart changes nothing. A bill counts at once; while the
ledger cannot be written it waits, and nothing more is bought for learning. Judging, the teacher and
steps begin while less is spent than the budget: what is in flight then is all that goes beyond it.

A month is one of the local clock, and what counts is all that was billed since it began: where the
clock is turned back, later bills count, too. A ledger has one gateway, and so has a budget.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Budget
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.spend import Bill, Purpose, SpendTable, Spent
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Usage

_LOOK_S = 60.0
"""Seconds between two looks at the budget while learning is paused."""
_DAY_S = 86_400.0
NEAR = 0.8
"""Share of the budget from which it is warned."""


def month_of(now: float) -> tuple[float, float]:
    """Return when the local month of a time began and when the next one does, in seconds since
    1970."""
    first = datetime.fromtimestamp(now).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return first.timestamp(), following.timestamp()


class Account:
    """Account of one turn or one step: what a service bills for it."""

    def __init__(self, write: Callable[[Usage], None]) -> None:
        """`write`: writes down usage; raises LedgerError where it is written later."""
        self.usage, self.is_open = Usage(), True
        self._write = write

    def add(self, usage: Usage) -> None:
        """Add usage; once the account is closed it is written at once. A service may go on with
        work for which nobody waits any more."""
        self.usage += usage
        if not self.is_open:
            with suppress(LedgerError):
                self._write(usage)

    def close(self) -> Usage:
        """Close the account, and return what was billed until now."""
        self.is_open = False
        return self.usage


class Spending:
    """Everything that a run is billed, and the budget that learning must stay within."""

    def __init__(
        self,
        price: Price,
        table: SpendTable,
        telemetry: Telemetry,
        *,
        budget: Budget | None = None,
        stops_serving: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`stops_serving`: once the budget is spent, no request is answered either."""
        self._price = price
        self._table = table
        self._telemetry = telemetry
        self._budget = budget
        self._stops_serving = stops_serving
        self._now = now
        self._spent = table.total()
        self._month: tuple[float, Spent] | None = None
        """When the present month began, and what was billed since; None: not summed yet."""
        self._unwritten = deque[tuple[Bill, int | None, int | None]]()
        """Bills that the ledger has not taken yet, each with its turn and its step."""
        self.paused_since: float | None = None
        self._warned_of: float | None = None
        """The month's beginning (0: the run's) of which it was warned; None: not yet."""

    @property
    def spent_usd(self) -> float | None:
        """US dollars in all, at today's prices where there were none; None: a price is missing."""
        return self._usd(self._spent)

    def _usd(self, spent: Spent) -> float | None:
        rest = self._price.usd(spent.unpriced)
        return None if rest is None else spent.usd + rest

    def _used_usd(self) -> float:
        """US dollars that count against the budget, with which every price is known."""
        if self._budget is None or not self._budget.monthly:
            return self.spent_usd or 0.0
        began, _ = month_of(self._now())
        if self._month is None or self._month[0] != began:
            since = self._table.total(began)
            for bill, _, _ in self._unwritten:
                since = since.plus(bill)
            self._month = began, since
        return self._usd(self._month[1]) or 0.0

    def bill(self, purpose: Purpose, usage: Usage) -> Bill | None:
        """Return the bill for these tokens, or None if nothing was billed."""
        return Bill(purpose, usage, self._price.usd(usage)) if usage != Usage() else None

    def count(self, bill: Bill | None) -> None:
        """Add a bill to the totals."""
        if bill is not None:
            self._spent = self._spent.plus(bill)
            if self._month is not None:
                self._month = self._month[0], self._month[1].plus(bill)
            self._telemetry.billed(bill.purpose, bill.usd)

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
            self._unwritten.append((bill, turn_id, step_id))
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            bill, turn_id, step_id = self._unwritten[0]
            self._table.add(bill, turn_id=turn_id, step_id=step_id)
            self._unwritten.popleft()

    @contextmanager
    def paying(
        self, purpose: Purpose, *, turn_id: int | None = None, step_id: int | None = None
    ) -> Generator[Account]:
        """Open the account of a turn or a step, which is written down however this ends."""
        write = partial(self.record, purpose, turn_id=turn_id, step_id=step_id)
        account = Account(write)
        try:
            yield account
        finally:
            write(account.close())

    def figures(self, usage: Usage) -> dict[str, Any]:
        """Tokens and dollars for a step's log event; {} if nothing was billed."""
        bill = self.bill("train", usage)
        return {"usd": bill.usd, "billed": asdict(usage)} if bill else {}

    def affords(self, usage: Usage) -> bool:
        """Return whether the budget has room for so much more."""
        if self._budget is None:
            return True
        return self._used_usd() + (self._price.usd(usage) or 0.0) <= self._budget.usd

    async def room(self) -> None:
        """Wait until learning may spend something.

        Raises:
            LedgerError: what was billed before cannot be written, and neither could this.
        """
        self._write()
        while self.paused():  # noqa: ASYNC110 - it ends with a restart, or a bill that is corrected
            await asyncio.sleep(_LOOK_S)

    def paused(self) -> str | None:
        """Reason why nothing is judged or trained; None: there is money left."""
        if self._budget is None:
            return None
        used = self._used_usd()
        if used < self._budget.usd:
            self.paused_since = None
            self._warn()
            return None
        until, sooner = "", ""
        if self._budget.monthly:
            _, following = month_of(self._now())
            until = f" until {time.strftime('%Y-%m-%d %H:%M', time.localtime(following))}"
            sooner = "sooner, "
        serving = (
            "no request is answered (--budget-serving stops)"
            if self._stops_serving
            else f"turns are answered and kept, which still costs ({self._serving()})"
        )
        because = (
            f"${used:.4f} of the budget of {self._budget} are spent. Nothing is judged or trained"
            f"{until}; {serving}, and samples stay queued. To go on {sooner}"
            "start again with a higher --budget-usd."
        )
        if self.paused_since is None:
            self.paused_since = self._now()
            log.warning("spend.paused", because=because)
        return because

    def refused(self) -> str | None:
        """Reason why no request is answered; None: they are."""
        return self.paused() if self._stops_serving else None

    def near(self) -> str | None:
        """A warning that most of the budget is spent; None: it is not, or all of it is."""
        if self._budget is None or not NEAR <= (used := self._used_usd()) / self._budget.usd < 1:
            return None
        return (
            f"${used:.4f} of the budget of {self._budget} are spent ({self._serving()}). At all of "
            "it judging and training wait."
        )

    def _warn(self) -> None:
        """Log the warning once a month, or once a run."""
        began = month_of(self._now())[0] if self._budget and self._budget.monthly else 0.0
        if self._warned_of != began and (near := self.near()):
            self._warned_of = began
            log.warning("spend.near", because=near)

    def _serving(self) -> str:
        """Describe the cost of serving in the last day."""
        usd = self._usd(self._table.total(self._now() - _DAY_S, purpose="serve"))
        return f"serving: ${usd or 0.0:.2f} in the last 24 hours"

    def sums(self) -> dict[str, Any]:
        """Return what was spent, for /healthz. `month_usd`: this month; None: the budget is the
        run's, or there is none."""
        return {
            "spent_usd": self.spent_usd,
            "budget_usd": self._budget and self._budget.usd,
            "month_usd": self._used_usd() if self._budget and self._budget.monthly else None,
            "spending_near": self.near(),
            "spent_tokens": asdict(self._spent.usage),
        }
