"""Choose the lessons for a session's prompt, and settle each by its evidence.

A lesson is tried first: a part of the sessions is not told, until it is clear whether telling
helps. Later a few sessions show whether it is still needed. Once accepted replies are as likely
untold, it is withdrawn. Rule: what a user has kept or written is always told, and nothing here
decides what is claimed (`evidence` does): these are decisions of what to tell, with error rates
that docs/lessons.md measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from statistics import fmean

from tinker_claw.ledger.lessons import Evidence, Lesson, LessonTable, State

MOST = 8
"""Most lessons that a session is told."""
MOST_TOKENS = 256
"""Most tokens of all lessons that a session is told."""
TRIAL = 4
"""While a lesson is tried, one session in so many is not told."""
PROBES = ((64, 8), (192, 16))
"""(n, m): up to n first replies, one session in m is not told of a lesson that helps."""
RAREST = 32
HELPS = 0.95
"""Least probability that telling helps, from which a lesson is told without a trial."""
USELESS = 0.1
"""Largest such probability at which it is dropped."""
FEWEST = 4
"""First replies before a trial can end, told, or before a lesson comes back, untold."""
LIKELY = 0.05
"""Nats a token by which accepted replies may be less likely untold where a lesson is learned."""
ENOUGH = 8
"""Probes, and measured replies, without which nothing is withdrawn."""
_LATELY = 32
"""Newest first replies, told and untold, by which that is decided."""
_GRID = [(n + 0.5) / 200 for n in range(200)]


def told_text(lessons: Iterable[Lesson]) -> str:
    """Return the text of lessons in a prompt."""
    return " ".join(lesson.text for lesson in lessons)


class Lessons:
    """Choice of the lessons that sessions are told."""

    def __init__(self, table: LessonTable, tokens: Callable[[str], Sequence[int]]) -> None:
        """`tokens`: encodes a text as it would stand in a prompt."""
        self._table = table
        self._tokens = tokens

    def told(self, session_id: int, user: str | None, version: int) -> list[Lesson]:
        """Return the lessons that a session is told, the same from its first request on.

        Args:
            user: the owner who opened the session; None: somebody else did, and nothing is told.
            version: version that answers its first request.
        """
        known = self._table.of_session(session_id)
        if known is None:
            drawn = self._drawn(user, version) if user is not None else []
            self._table.begin(session_id, dict(drawn))
            known = self._table.of_session(session_id)
        return known or []

    def _drawn(self, user: str, version: int) -> list[tuple[int, bool]]:
        found, texts = list[tuple[int, bool]](), list[Lesson]()
        for lesson in self._table.of_user(user):
            state = lesson.state
            if len(texts) < MOST or state is State.LEARNED:  # else nothing is drawn, nor found out
                state = self._settled(lesson, version)
            if state is State.LEARNED:
                found.append((lesson.id, False))  # takes the place of no other
            elif (
                state is not State.DROPPED
                and len(texts) < MOST
                and len(self._tokens(told_text([*texts, lesson]))) <= MOST_TOKENS
            ):
                texts.append(lesson)
                found.append((lesson.id, self._is_told(lesson, state)))
        return found

    def _settled(self, lesson: Lesson, version: int) -> State:
        """Return the state of a lesson for a version, changed where the evidence says so."""
        if lesson.kept or lesson.state is State.DROPPED:
            return lesson.state
        if lesson.version is not None and not self._table.descends(version, lesson.version):
            lesson = replace(lesson, state=State.TOLD)  # a pin or a rollback: not learned here
        ruled = settle(lesson, self._table.evidence(lesson, version))
        if ruled is None:
            return lesson.state
        state, reason = ruled
        self._table.change(lesson, state, reason, version if state is State.LEARNED else None)
        return state

    def _is_told(self, lesson: Lesson, state: State) -> bool:
        return lesson.kept or not is_probe(lesson.id, self._table.sessions(lesson), state)


def is_probe(lesson_id: int, number: int, state: State) -> bool:
    """Return whether the session with this number, counted from 0, is not told a lesson: one of
    each row of sessions, chosen by a hash, the same after a restart."""
    later = next((one_in for most, one_in in PROBES if number < most), RAREST)
    one_in = TRIAL if state is State.TRIED else later
    row, place = divmod(number, one_in)
    return sha256(f"untold {lesson_id} {row}".encode()).digest()[0] % one_in == place


def settle(lesson: Lesson, seen: Evidence) -> tuple[State, str] | None:
    """Return the new state of a lesson and why; None: it stays as it is."""
    told = [good for was_told, good, _ in seen.replies if was_told]
    probes = [good for was_told, good, _ in seen.replies if not was_told]
    # With older ones, a lesson that has just come back would be withdrawn at once.
    since = [good for was_told, good, at in seen.replies if not was_told and at > lesson.changed_at]
    if lesson.state is State.LEARNED:
        since = since[:_LATELY]
        lately = _counts(told[:_LATELY]), _counts(since)
        if len(since) >= FEWEST and chance_higher(*lately) >= HELPS:
            return State.TOLD, f"replies got worse without it: {_share(since)} accepted"
        return None
    alike = len(seen.gaps) >= ENOUGH and fmean(seen.gaps) <= LIKELY
    lately = _counts(told[:_LATELY]), _counts(since[:ENOUGH])
    if alike and len(since) >= ENOUGH and chance_higher(*lately) < HELPS:
        return State.LEARNED, (
            f"accepted replies are as likely without it ({fmean(seen.gaps):+.3f} nats a token), "
            f"and {_share(since[:ENOUGH])} were accepted untold"
        )
    if lesson.state is State.TOLD or len(told) < FEWEST:
        return None
    good, bad = _counts(probes)
    earlier = _counts(seen.before)
    chance = chance_higher(_counts(told), (good + earlier[0] / 2, bad + earlier[1] / 2))
    if USELESS < chance < HELPS:
        return None
    share = f"{_share(told)} first replies accepted told, {_share(probes)} untold"
    if chance >= HELPS:
        return State.TOLD, f"it helps: {share}"
    return State.DROPPED, f"telling does not help: {share}"


def chance_higher(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return P(p > q) for p and q with uniform priors, from the good and bad outcomes of each.

    The Beta posteriors are summed over a grid of 200 points; the error is below 0.005.
    """
    below = total = 0.0
    for p, q in zip(_posterior(*one), _posterior(*other), strict=True):
        total += p * (below + q / 2)
        below += q
    return total


def _posterior(good: float, bad: float) -> list[float]:
    logs = [good * math.log(x) + bad * math.log1p(-x) for x in _GRID]
    top = max(logs)
    masses = [math.exp(one - top) for one in logs]
    total = math.fsum(masses)
    return [mass / total for mass in masses]


def _counts(outcomes: Sequence[bool]) -> tuple[float, float]:
    return float(sum(outcomes)), float(len(outcomes) - sum(outcomes))


def _share(outcomes: Sequence[bool]) -> str:
    return f"{sum(outcomes)} of {len(outcomes)}"
