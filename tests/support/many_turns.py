"""Fill a ledger as after long use."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.stories import Told
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind

SESSION = 10
"""Turns of one session; nothing follows the last one."""
PER_STEP = 16


def fill(directory: Path, turns: int, *, seed: int = 0) -> None:
    """Write turns of three users: most judged, and most of those trained.

    The later a version, the better it is: verdicts of +1 go from a third to nine tenths.
    """
    told, rng, queue = Told(directory), random.Random(seed), list[int]()
    for i in range(turns):
        key, user = f"key{i // SESSION}", f"user{i // SESSION % 3}"
        who = {"user": user, "session_id": told.ledger.turns.session(user, key)}
        if i % SESSION == 3:
            why = TurnRefusal(Reason.SIDE, "recap")
            told.turn(key, kind=Kind.SIDE, untrained_because=why, **who)
        elif i % SESSION == SESSION - 1:
            told.turn(key, **who)
        elif rng.random() < 0.1:
            turn = told.judged(key, rng.choice((0, None)), **who)
            told.ledger.turns.refuse(turn, TurnRefusal("neutral verdict, no hint"))
        else:
            value = 1 if rng.random() < 0.33 + 0.57 * i / turns else -1
            turn = told.judged(key, value, **who)
            queue.append(told.ledger.samples.add(turn, value, None))
        if len(queue) == PER_STEP:
            told.step(*queue)
            queue.clear()
    told.ledger.close()
