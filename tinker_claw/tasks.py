"""Run several awaitables at once; raise the first error instead of a group.

Rule: none still runs when the call returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from tinker_claw.errors import first_cause

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; return the results, in order."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from failures
    return [task.result() for task in tasks]
