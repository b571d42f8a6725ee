"""Control conditions, as data: who lies, who checks, and whether the guards are on.

Rule: a control is done outside of the product, to the judge that is asked and to the users who
talk, or by the product's own settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from examples.demo.client import Client
from examples.personalize import judges

TOLD = "told"
"""Condition in which nothing is learned and the rule is in the prompt: the ceiling."""


@dataclass(frozen=True, slots=True)
class Control:
    """Changes of a control condition against an honest run."""

    lie: Callable[[judges.Think, Sequence[str]], judges.Think] | None = None
    """Makes a lying judge from an honest one and the hints of another rule; None: the judge is
    honest."""
    lies_from: int = 0
    """Optimizer steps after which the judge begins to lie."""
    user: str | None = None
    """Name of the demo's user who talks; None: the scenario's own."""
    presses: float = 0.0
    """Share of sessions in which users press 👍 or 👎 on every reply, when the session is over."""
    audited: float = 0.0
    """Share of turns that an honest auditor sees, too."""
    guarded: bool = True
    """Whether gate and guard are on, and a hold of learning ends the run. Otherwise the gate and
    the bound on a step are off, and a held run goes on at once."""


CONTROLS: Mapping[str, Control] = {
    "flipped": Control(judges.flipped, guarded=False),
    "shuffled": Control(judges.shuffled, guarded=False),
    "flipped, with feedback": Control(judges.flipped, presses=0.25),
    "flipped, audited": Control(judges.flipped, audited=0.25),
    "flipped, one in ten": Control(judges.flipped, presses=0.1),
    "turned, one in ten": Control(judges.flipped, lies_from=8, presses=0.1),
    "garbage": Control(user="garbage"),
}
"""Control conditions by name. With one session in four, of two or three replies each, the guard has
its ten opinions after some 16 sessions, or two steps; auditing one turn in four gives as many."""


class Presses(Client):
    """Client of users who rate replies once they have seen the whole session.

    By then the judge has judged all replies but perhaps the last; of replies that are rated at once
    it judges one in four.
    """

    def __init__(self, http: httpx.AsyncClient, *more: Any, share: float) -> None:
        super().__init__(http, *more)
        self._share = share
        self._replies: dict[str, list[str]] = {}
        """Ids of the replies of each session."""
        http.event_hooks = {"response": [self._note]}

    async def _note(self, response: httpx.Response) -> None:
        session = response.request.headers.get("x-session-id")
        if session and (reply := response.headers.get("x-request-id")):
            self._replies.setdefault(session, []).append(reply)

    async def tell(self, session: str, liked: Sequence[bool]) -> None:
        replies = self._replies.pop(session)
        if Random(f"presses-{session}").random() < self._share:
            for reply, good in zip(replies, liked, strict=False):  # the last one is not rated
                await self.press(reply, 1 if good else -1)
