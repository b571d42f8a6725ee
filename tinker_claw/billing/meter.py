"""Metering: count tokens where a service bills them, and charge them to the caller's account.

Rule: a backend calls `bill` at the wire, once per request; the part of the loop that caused the
request opens an account with `charged`. Neither knows the other. The account in force is a context
variable, so tasks started inside it are charged to it as well. So is work that a service goes on
with although nobody waits for it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from tinker_claw.types import Usage


class Account:
    """Adds up what one turn or one step has cost so far."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.late: Callable[[Usage], None] | None = None
        """Callback for usage that is billed after the account was closed; None while it is open."""

    def add(self, usage: Usage) -> None:
        self.usage += usage
        if self.late is not None:
            self.late(usage)


_account: ContextVar[Account | None] = ContextVar("account", default=None)


@contextmanager
def charged() -> Generator[Account]:
    """Collect what is billed inside the block; an inner block takes over from an outer one."""
    account = Account()
    before = _account.set(account)
    try:
        yield account
    finally:
        _account.reset(before)


def bill(usage: Usage) -> None:
    """Add to the account in force; without one (a probe at start-up) nobody is charged."""
    account = _account.get()
    if account is not None:
        account.add(usage)
