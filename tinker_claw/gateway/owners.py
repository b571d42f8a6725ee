"""Owners: the people in chat services whose words teach.

Rule: an owner is whom the settings name. The first other person in a channel is remembered, so that
the owner can be told which line names them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tinker_claw.conversation.openclaw import Sender
from tinker_claw.ledger.turns import TurnTable
from tinker_claw.served import Belongs, Surface
from tinker_claw.telemetry import log
from tinker_claw.wishes import plain_line

_MAX_NAME = 60
"""Characters of a name or an id that are shown."""


class Owners:
    """Recognises owners by the settings."""

    def __init__(
        self, turns: TurnTable, named: Collection[str] = (), *, listed_only: bool = False
    ) -> None:
        """
        Args:
            named: `channel:sender id` of each owner, and agents that nobody else can reach.
            listed_only: what is sent to an agent that is not known is nobody's.
        """
        self._listed_only = listed_only
        self._turns = turns
        self._named = frozenset(name.strip().lower() for name in named)
        self._strangers = set[tuple[str, str]]()
        if self._named:
            turns.forget_strangers()

    def of(self, surface: Surface) -> Surface:
        """Return a surface as the settings say whose it is."""
        if surface.alone and surface.alone in self._named:
            return replace(surface, belongs=Belongs.OWNER, because="")
        if self._listed_only and not surface.listed:
            because = "an agent that is not listed (--agents listed)"
            return replace(surface, belongs=Belongs.NOBODY, because=because)
        return surface

    def is_owner(self, sender: Sender) -> bool:
        """Return whether the sender of a channel's message is an owner."""
        if sender.id is None or sender.channel is None or sender.group:
            return False
        return f"{sender.channel}:{sender.id}".lower() in self._named

    def note_stranger(self, user: str, sender: Sender) -> None:
        """Remember who is not an owner, and say once which line would name them, where the settings
        name nobody of the channel."""
        if sender.id is None or sender.channel is None or sender.group:
            return
        named = any(name.startswith(f"{sender.channel.lower()}:") for name in self._named)
        if named or (user, sender.channel) in self._strangers:
            return
        self._strangers.add((user, sender.channel))
        texts = sender.channel, sender.id, sender.name
        channel, id, name = (plain_line(t).replace('"', "")[:_MAX_NAME] for t in texts)
        if self._turns.first_stranger(user, channel, id, name):
            log.warning("sender.unlisted", channel=channel, sender=id, name=name)
