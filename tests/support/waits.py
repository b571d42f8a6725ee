"""Waiting for what nobody reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition; the limit is long, for machines are busy."""
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110 - an event would change what is observed
            await asyncio.sleep(0.005)
