"""Now and then, what the user does not want kept any longer goes: what is too old or too much, and
what somebody began to forget and did not finish.

Rule: beside the gateway, which never waits for more than a few milliseconds of it; a ledger that
cannot be written is no reason to stop.
"""

from __future__ import annotations

import asyncio
import time

from tinker_claw.config import Keeping
from tinker_claw.errors import LedgerError
from tinker_claw.ledger import Ledger
from tinker_claw.telemetry import log

EVERY_S = 600.0
DAY_S = 86_400.0


async def upkeep(ledger: Ledger, cfg: Keeping) -> None:
    """Keep the ledger as young and as small as it was asked to be, until cancelled."""
    while True:
        try:
            await ledger.finish_forgetting()
            await once(ledger, cfg)
        except LedgerError as error:
            log.warning("ledger.untrimmed", error=str(error))
        await asyncio.sleep(EVERY_S)


async def once(ledger: Ledger, cfg: Keeping) -> int:
    """One pass; returns how many turns were emptied."""
    if cfg.keep_days is None and cfg.keep_gb is None:
        return 0
    before = None if cfg.keep_days is None else time.time() - cfg.keep_days * DAY_S
    most = None if cfg.keep_gb is None else round(cfg.keep_gb * 1e9)
    dropped = await ledger.trim(before, most)
    if dropped:
        log.info("ledger.trimmed", turns=dropped, bytes=ledger.live_bytes())
    return dropped
