"""Owners: the people whose words teach.

Rule: whoever has the key is an owner; in chat services, where strangers write to the same agent,
those whom the settings name. Where they name nobody, the first person who writes directly is, and
nobody in a group is. Other people's ids are kept as keyed digests only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cached_property

from tinker_claw.conversation.openclaw import Sender
from tinker_claw.ledger.turns import TurnTable


class Owners:
    """Recognises owners, by the settings and by who wrote first in a channel."""

    def __init__(self, turns: TurnTable, named: Collection[str] = ()) -> None:
        """`named`: `channel:sender id` of each owner; empty: the settings name nobody."""
        self._turns = turns
        self._named = frozenset(name.strip().lower() for name in named)
        self._firsts: dict[tuple[str, str], bytes] = {}
        if self._named:
            turns.forget_channels()

    def has(self, user: str, sender: Sender) -> bool:
        """Whether the sender of a channel's message is an owner, for this user of the gateway."""
        if sender.mixed or sender.id is None or sender.channel is None:
            return False
        if self._named:
            return f"{sender.channel}:{sender.id}".lower() in self._named
        if sender.bot:
            return False
        if sender.group:
            self._turns.saw_stranger(user, sender.channel, group=True)
            return False
        return self._first(user, sender.channel, sender.id)

    @cached_property
    def _secret(self) -> bytes:
        return self._turns.secret

    def _first(self, user: str, channel: str, id: str) -> bool:
        """Whether this sender is the first who wrote directly in the channel."""
        digest = hashlib.blake2b(id.encode(), key=self._secret, digest_size=16).digest()
        first = self._firsts.get((user, channel))
        if first is None:
            first = self._firsts[user, channel] = self._turns.first_sender(user, channel, digest)
        if first == digest:
            return True
        self._turns.saw_stranger(user, channel, group=False)
        return False
