"""Choose the queued samples for the next step.

Rule: pure, and the order in which samples are given makes no difference. A batch is what people
said: what tools have judged comes last and is at most half of it. The newest come first: where more
arrive than a step takes, the oldest would all be several versions behind. A group is taken whole or
not at all. A rejection without a hint is taken only beside a better reply of the same judge; what
neither rejects, nor has a hint or an explicit rating, only beside a sample of the same judge that
does. No session or user fills more than their share of a batch while there are enough others;
samples over a share wait for others for a time and then fill the batch: a step from few sources is
better than none. A group larger than a share makes the batch larger, and takes no room from others.
A single user's samples do not wait for other sessions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tinker_claw.ledger.samples import QueuedSample, ready, usable
from tinker_claw.types import JUDGES, JudgedBy, Lacks

SHARE = 0.5
"""Largest share of a batch from one session or one user, and of turns judged by tools."""
FILL_S = 300.0
"""Seconds that a sample over its share waits: long enough for other active users, and short enough
that no step comes much later."""


GROUPED = 8
"""Most samples of a step, as a multiple of `--batch-size`, so that whole groups fit: with sixteen,
eight tries of sixteen steps each. It costs as much as eight steps, and does not come more often."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The samples for the next step."""

    ids: tuple[int, ...]
    """Sample ids, ascending; (): there is no batch yet."""
    look_at: float | None
    """When to look again even without a new sample, in seconds since 1970; None: only after one."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that are taken together: a single one, or a group."""

    ids: tuple[int, ...]
    fills_at: float
    """When it may fill a batch over its share, in seconds since 1970: it waits for other users, if
    any has samples in the queue."""
    origins: tuple[Hashable, ...]
    """Session and user, each of which has a share."""
    tools: bool
    """Whether tools have judged it."""


def choose(
    waiting: Sequence[QueuedSample], *, batch_size: int, most: int, now: float, share: float = SHARE
) -> Choice:
    """Choose whole groups and single samples until there are at least `batch_size`.

    If newer samples leave no room for a group and make no batch without it, the group goes first;
    the batch may then be smaller than `batch_size`, if the next group would make it too large.

    Args:
        most: samples of a step. A group that is larger is taken alone.
        share: largest part of `batch_size` for each session and each user. A single user has no
            user's share; groups, which stay whole, have no other.
        now: seconds since 1970.
    """
    units, limit = _units(waiting), max(1, int(share * batch_size))
    chosen, crowded = _take(units, batch_size, most, limit, now)
    if len(chosen) < batch_size and crowded:
        others = [unit for unit in units if unit is not crowded[0]]
        chosen, _ = _take([crowded[0], *others], batch_size, most, limit, now)
    elif len(chosen) < batch_size:
        due = [unit.fills_at for unit in units if unit.fills_at > now]
        enough = ready(waiting, batch_size) >= batch_size
        return Choice((), min(due, default=None) if enough else None)
    return Choice(tuple(sorted(chosen)), None)


def _take(
    units: Sequence[_Unit], batch_size: int, most: int, limit: int, now: float
) -> tuple[list[int], list[_Unit]]:
    """Return the ids of the samples taken, and the units for which there was no room."""
    chosen, crowded, over = list[int](), list[_Unit](), list[_Unit]()
    counts = Counter[Hashable]()
    filled = of_tools = 0

    def take(unit: _Unit, fills: int) -> None:
        nonlocal filled, of_tools
        if chosen and len(chosen) + len(unit.ids) > most:
            crowded.append(unit)
        elif filled < batch_size and not (unit.tools and of_tools == batch_size // 2):
            chosen.extend(unit.ids)
            counts.update(dict.fromkeys(unit.origins, len(unit.ids)))
            filled, of_tools = filled + fills, of_tools + unit.tools

    for unit in units:
        if any(counts[origin] >= limit for origin in unit.origins):
            over.append(unit)
        else:
            take(unit, min(len(unit.ids), limit) if unit.origins else len(unit.ids))
    filled = len(chosen)
    for unit in over:
        if now >= unit.fills_at:
            take(unit, len(unit.ids))
    return chosen, crowded


def _units(waiting: Sequence[QueuedSample]) -> list[_Unit]:
    """Group the samples that a step may take into units: those that people judged, then those that
    tools judged, each the newest first.

    Two come before the rest of their kind: the newest sample of people that is no plain acceptance,
    and the newest reply that each judge's bare rejections need.
    """
    together = defaultdict[Hashable, list[QueuedSample]](list)
    able = usable(waiting)
    for sample in able:
        together[sample.id if sample.group is None else ("group", sample.group)].append(sample)
    alone = len({sample.user for sample in able}) <= 1
    needed = {_better(able, judge) for judge in JUDGES}
    says = max(
        (s.id for s in able if s.judge == "user" and s.lacks != Lacks.REJECTION), default=None
    )

    def sort_key(unit: _Unit) -> tuple[bool, bool, bool, int]:
        newest = unit.ids[-1]
        return unit.tools, newest != says, newest not in needed, -newest

    return sorted((_unit(samples, alone=alone) for samples in together.values()), key=sort_key)


def _unit(samples: Sequence[QueuedSample], *, alone: bool) -> _Unit:
    first = samples[0]
    origins: list[Hashable] = [] if alone else [("user", first.user)]
    if first.group is None:
        origins.append(("session", first.session))
    ids = tuple(sorted(sample.id for sample in samples))
    fills_at = 0.0 if alone else max(sample.queued_at for sample in samples) + FILL_S
    tools = first.group is None and first.judge == "tools"
    return _Unit(ids, fills_at, tuple(origins), tools)


def _better(waiting: Sequence[QueuedSample], judge: JudgedBy) -> int | None:
    """Return the newest sample that is better than a bare rejection of this judge; None: there is
    no such rejection."""
    mine = [sample for sample in waiting if sample.judge == judge and sample.group is None]
    bare = [sample.reward or 0.0 for sample in mine if sample.lacks == Lacks.BETTER]
    if not bare:
        return None
    worst = min(bare)
    return max(other.id for other in mine if other.reward is not None and other.reward > worst)
