"""Which states and samplers stay, over weeks of a run."""

from __future__ import annotations

import random

from tinker_claw.policy import KEPT_DAYS, KEPT_STATES, to_keep

HOUR_S, DAY_S = 3600.0, 86_400.0


def live(days: int, seed: int, newest: int = KEPT_STATES) -> tuple[list[float], dict[str, float]]:
    """Save and prune through weeks with busy days and days off; return all times and what is
    left."""
    rng, times, left = random.Random(seed), list[float](), dict[str, float]()
    for day in range(days):
        at = 1000 * DAY_S + day * DAY_S
        for _ in range(rng.choice((0, 1, 3, 40, 200))):
            at += rng.random() * DAY_S / 220
            times.append(at)
            left[f"v{len(times) - 1}"] = at
            stays = to_keep(left, newest)
            left = {name: one for name, one in left.items() if name in stays}
    return times, left


def test_a_week_can_be_undone_whatever_was_learned_in_it() -> None:
    for seed in range(20):
        times, left = live(40, seed)
        assert left.keys() >= {"v0"}
        assert left.keys() >= {f"v{n}" for n in range(len(times))[-KEPT_STATES:]}
        last_of_day = {at // DAY_S: f"v{n}" for n, at in enumerate(times)}
        assert left.keys() >= {*list(last_of_day.values())[-KEPT_DAYS:]}
        assert len(left) <= 1 + KEPT_DAYS + KEPT_STATES
        worked = [at for at in left.values() if at < times[-1] - 7 * DAY_S]
        assert worked, "something is left from before the last week"


def test_a_young_run_keeps_all() -> None:
    assert to_keep({"a": 1.0, "b": 2.0}, 8) == {"a", "b"}
    assert to_keep({}, 8) == set()
