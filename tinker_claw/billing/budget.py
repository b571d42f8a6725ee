"""Count what was billed, and hold learning once a budget is spent.

Rule: the sums come from the ledger, so a restart changes nothing. A bill counts at once; while the
ledger cannot be written it waits, and nothing more is bought for learning. Judging, the teacher and
steps begin while less is spent than the budget: what is in flight then is all that goes beyond it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from tinker_claw.billing.meter import Account, charged
from tinker_claw.billing.prices import Price
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.spend import Bill, Purpose, SpendTable
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Usage

_LOOK_S: Final = 60.0
"""Seconds between two looks at the budget while learning is paused."""


class Spending:
    """Everything that a run is billed, and the budget that learning must stay within."""

    def __init__(
        self,
        price: Price,
        table: SpendTable,
        telemetry: Telemetry,
        *,
        usd: float | None = None,
    ) -> None:
        """`usd`: the budget; None: none."""
        self._price = price
        self._table = table
        self._telemetry = telemetry
        self._usd = usd
        self._spent = table.total()
        self._unwritten = deque[tuple[Bill, int | None, int | None]]()
        """Bills that the ledger has not taken yet, each with its turn and its step."""
        self._paused_since: float | None = None

    @property
    def spent_usd(self) -> float | None:
        """US dollars in all, at today's prices where there were none; None: a price is missing."""
        rest = self._price.usd(self._spent.unpriced)
        return None if rest is None else self._spent.usd + rest

    def bill(self, purpose: Purpose, usage: Usage) -> Bill | None:
        """Return the bill for these tokens, or None if nothing was billed."""
        return Bill(purpose, usage, self._price.usd(usage)) if usage != Usage() else None

    def count(self, bill: Bill | None) -> None:
        """Add a bill to the totals."""
        if bill is not None:
            self._spent = self._spent.plus(bill)
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
        """Return a callback that records usage billed after its account was closed."""

        def record(usage: Usage) -> None:
            with suppress(LedgerError):  # it is written later still
                self.record(purpose, usage, turn_id=turn_id, step_id=step_id)

        return record

    def figures(self, usage: Usage) -> dict[str, Any]:
        """Tokens and dollars for a step's log event; {} if nothing was billed."""
        bill = self.bill("train", usage)
        return {"usd": bill.usd, "billed": asdict(usage)} if bill else {}

    async def room(self) -> None:
        """Wait until learning may spend something.

        Raises:
            LedgerError: what was billed before cannot be written, and neither could this.
        """
        self._write()
        while self.paused():  # noqa: ASYNC110 - it ends with a restart, or a bill that is corrected
            await asyncio.sleep(_LOOK_S)

    def paused(self) -> str | None:
        """Why nothing is judged or trained; None: there is money left."""
        gone = self.spent_usd or 0.0  # with a budget every price is known
        if self._usd is None or gone < self._usd:
            self._paused_since = None
            return None
        because = (
            f"${gone:.4f} of the budget of ${self._usd:g} are spent. Nothing is judged or trained; "
            "turns are answered and kept, which goes on costing, and samples stay queued. To go "
            "on, start again with a higher --budget-usd."
        )
        if self._paused_since is None:
            self._paused_since = time.time()
            log.warning("spend.paused", because=because)
        return because

    def shown_in(self, health: Mapping[str, Any]) -> dict[str, Any]:
        """/healthz with the sums, and with the pause where there is one."""
        paused, since = self.paused(), self._paused_since
        shown = {
            **health,
            "spent_usd": self.spent_usd,
            "budget_usd": self._usd,
            "spent_tokens": asdict(self._spent.usage),
            "spending_paused": paused,
        }
        if paused:
            for part in ("judge", "learner"):
                if health.get(part) != "failed":  # what has failed for good stays failed
                    shown |= {part: "paused", f"{part}_since": since}
            if health.get("status") == "ok":
                shown["status"] = "paused"
        return shown
