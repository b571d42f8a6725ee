"""Steps of a thousand messages as people send them, through judge, queue and batches of 16.

python -m pytest -s tests/learner/test_shares.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.support.learning import Says, world
from tests.support.ledger import sample_counts, sql
from tinker_claw.judge.prompts import Schema
from tinker_claw.ledger.samples import read_queue, ready
from tinker_claw.types import Charge, Message, uncharged

PEOPLE = {
    "goes_on": 736,
    "new_content": 71,
    "corrects": 67,
    "new_style": 49,
    "complains": 47,
    "accepts": 27,
    "cannot_tell": 3,
}
"""Of a thousand follow-ups of public conversations, by one reader's labels of 300. *Goes on* holds
new topics (43) and requests to continue (40)."""
WEAK = {"goes_on": 958, "complains": 39, "cannot_tell": 3}
"""The same as a judge of 1.5B parameters called them: no hint, and a third of the rejections."""
SIZE = 16


class ByClass(Says):
    """A judge that copies the class which stands in the message, with a hint where there is one."""

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        text = messages[-1]["content"]
        does = next(one for one in PEOPLE if f"CLASS {one} " in text)
        hint = "do it the other way" if "HOW" in text else ""
        return [json.dumps({"quote": "HOW" if hint else "CLASS", "does": does, "hint": hint})] * n


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "hinted"), [(PEOPLE, True), (WEAK, False)])
async def test_a_thousand_real_messages_make_no_step_of_nothing(
    tmp_path: Path, shares: Mapping[str, int], *, hinted: bool
) -> None:
    messages = [does for does, count in shares.items() for _ in range(count)]
    Random(0).shuffle(messages)
    tells = {"corrects", "new_style"} if hinted else set[str]()
    async with world(tmp_path, endpoint=ByClass(), batch_size=SIZE) as w:
        for at in range(0, len(messages), SIZE):
            for does in messages[at : at + SIZE]:
                w.turn(f"CLASS {does} {'HOW' * (does in tells)}")
            await w.settled()
            await w.until(lambda: ready(read_queue(w.ledger.rows), SIZE) < SIZE)
        steps = sql(w.ledger).rows(
            "SELECT step_id, COUNT(*) AS of, SUM(COALESCE(reward, 0) < 0 OR hint IS NOT NULL) "
            "AS tell FROM samples WHERE step_id IS NOT NULL GROUP BY step_id"
        )
        counts = sample_counts(w.ledger)
    tell = [step["tell"] for step in steps]
    signal = [does for does in messages if does not in ("new_content", "cannot_tell")]
    signal = [does for does in signal if hinted or does != "new_style"]
    arrived = [signal[at : at + SIZE] for at in range(0, len(signal) - SIZE + 1, SIZE)]
    nothing = sum({*batch} <= {"goes_on", "accepts"} for batch in arrived)
    print(
        f"{len(messages)} messages: {len(steps)} steps, {sum(tell) / len(steps):.1f} samples of "
        f"each say what is better; {counts}; in order of arrival {len(arrived)}, {nothing} of "
        "nothing"
    )
    assert min(tell) > 0
    assert all(step["of"] == SIZE for step in steps)
    assert counts["quarantined"] == 0
