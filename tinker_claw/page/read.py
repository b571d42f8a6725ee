"""Contents of the page, read from the ledger file at one moment, in a separate thread.

Rule: a visitor with a user's key sees this user's turns and nothing else. Texts of users, models
and tools go out unchanged: the templates escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from tinker_claw.config.settings import Training
from tinker_claw.errors import RequestError
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.figures import read_figures, read_headlines, read_live, read_stored
from tinker_claw.ledger.lessons import read_lessons
from tinker_claw.ledger.reference import gate_of
from tinker_claw.ledger.turn_view import (
    Contents,
    Record,
    read_contents,
    read_openings,
    read_turn,
    run_of,
)
from tinker_claw.ledger.versions import Line, read_line
from tinker_claw.ledger.views import Filter, read
from tinker_claw.page.charts import Point, curve
from tinker_claw.sinks.base import figures_of
from tinker_claw.types import Kind, StopReason, Tokens
from tinker_claw.words import plural, practised, run_fields, turn_fields

ROWS: Final = 50
"""Rows of a table."""
STEPS: Final = 300
"""Newest steps of a curve."""
LONGEST: Final = 20_000
"""Most characters of a text, and most tokens of a reply, that are shown."""
_WORDS: Final = 80
"""Characters of what a turn was asked that a table shows."""
_NAMED: Final = 8
"""Versions that a rollback names."""
_STRONG: Final = (0.05, 0.3, 1.0)
"""Advantages from which on a token's colour is light, plain and strong; a reward is about 1."""
_CURVES: Final = (
    ("mean reward", "of a step's samples", "step/reward_mean", "reward"),
    (
        "agreement",
        "how far the logprobs of sampler and trainer differ (k3)",
        "step/agreement_k3",
        "nats per token",
    ),
    (
        "canaries",
        "how much less likely right replies are than before the step",
        "gate/loss",
        "nats",
    ),
)
"""Name, description, figure of a step, and unit."""

Decode = Callable[[Tokens], str]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a reply that form one piece of text."""

    text: str
    advantage: float
    shade: str
    """CSS class: up-1 to up-3, down-1 to down-3, or none."""


def missing(what: str) -> RequestError:
    """Return the error for something that does not exist or belongs to somebody else."""
    message = f"There is no such {what}."
    return RequestError(message, status=HTTPStatus.NOT_FOUND, code="not_found")


def read_overview(rows: Rows, training: Training) -> Record:
    """Return the run's overview: the figures of `status`, in its words, with curves."""
    figures = read_figures(rows, training.batch_size)
    steps = [s for s in read(rows, "steps", Filter(), STEPS) if s["status"] == "committed"]
    shares = _shares(figures["accepted"][-STEPS:])
    page = {"fields": list(run_fields(figures)), "lessons": _lessons(rows, None)}
    page["begun"] = figures["turns"]["main"] > 0
    return {**figures, **page, "shares": shares, "curves": list(_curves(steps))}


def _shares(accepted: Sequence[Record]) -> Mapping[str, Any]:
    points = [
        Point(share["version"], share["share"], share["low"], share["high"]) for share in accepted
    ]
    return curve(points, "version", "%")


def _curves(steps: Sequence[Record]) -> Iterator[Record]:
    """Yield curves, each with its newest figures as a table for screen readers."""
    by_step = [(step["id"], dict(figures_of(step["metrics"]))) for step in steps]
    for name, about, figure, unit in _CURVES:
        points = [
            Point(number, figures[figure]) for number, figures in by_step if figure in figures
        ]
        if points:
            table = [(f"step {p.at:g}", f"{p.value:.3g}") for p in points[-2:]]
            drawn = curve(points, "step", unit)
            yield {"name": name, "about": about, "curve": drawn, "table": table}


def read_mine(rows: Rows, user: str | None) -> Record:
    """Return the overview that a user has: whether it helps them, and their lessons. `begun`:
    whether a main turn of theirs has come."""
    return {
        "headlines": read_headlines(rows, read_live(rows, user), user),
        "lessons": _lessons(rows, user),
        "begun": bool(read(rows, "turns", Filter(user=user, kind=Kind.MAIN), 1)),
        "run": run_of(rows),
    }


def _lessons(rows: Rows, user: str | None) -> list[Record]:
    """Return a user's lessons, or all, each with what its newest practice did."""
    lessons = read_lessons(rows, user)
    return [
        lesson | {"practised": [practised(run) for run in lesson["runs"][-1:]]}
        for lesson in lessons
    ]


def read_turns(rows: Rows, wanted: Filter) -> Record:
    """Return the newest turns that match, newest first; main turns with the first words that they
    were asked: `words`."""
    turns = read(rows, "turns", wanted, ROWS + 1)[::-1]
    words = read_openings(rows, [turn["id"] for turn in turns], _WORDS)
    return _first_rows("turns", [t | {"words": words.get(t["id"], "")} for t in turns], "id")


def _first_rows(name: str, rows: Sequence[Record], key: str) -> Record:
    """Return the rows of a page, and `rest`: the row before which the next page begins, or None.

    Args:
        rows: one row more than a page has, where there is one.
    """
    return {name: rows[:ROWS], "rest": rows[ROWS - 1][key] if len(rows) > ROWS else None}


def read_details(rows: Rows, turn_id: int, user: str | None, decode: Decode) -> Record:
    """Return everything shown about one turn.

    Args:
        user: user who must own it; None: anybody.

    Raises:
        RequestError: 404, the user has no such turn.
    """
    turn, contents = read_turn(rows, turn_id), read_contents(rows, turn_id)
    if turn is None or contents is None or (user is not None and turn.user != user):
        raise missing("turn")
    trained = turn.trained_in_step is not None and contents.advantages
    return {
        "turn": turn,
        "contents": contents,
        "fields": list(turn_fields(turn, contents)),
        "pieces": list(_pieces(contents, decode)) if trained else [],
        "feedback": next((entry for entry in contents.feedback[::-1] if not entry["final"]), None),
        # The turns of the session before and after it.
        "neighbours": rows.row(
            "SELECT MAX(id) FILTER (WHERE id < ?2), MIN(id) FILTER (WHERE id > ?2) FROM turns "
            "WHERE session_id = ?1",
            turn.session,
            turn_id,
        ),
    }


def _pieces(contents: Contents, decode: Decode) -> Iterator[TokenSpan]:
    """Yield text pieces with their advantages; tokens that share one character are joined."""
    waiting, values = list[int](), list[float]()
    tokens, advantages = contents.completion.tokens, contents.advantages
    # By the last token, which has no text.
    ended = contents.completion.stop_reason == StopReason.STOP
    spoken = tokens[: -1 if ended else None][:LONGEST]
    for token, advantage in zip(spoken, advantages, strict=False):
        waiting.append(token)
        values.append(advantage)
        text = decode(tuple(waiting))
        if text.endswith("\ufffd") and len(waiting) < 8:
            continue
        yield _piece(text, values)
        waiting, values = [], []
    if waiting:
        yield _piece(decode(tuple(waiting)), values)
    if ended and len(tokens) <= min(LONGEST, len(advantages)):
        yield _piece(" [end]", advantages[len(tokens) - 1 :][:1])


def _piece(text: str, values: Sequence[float]) -> TokenSpan:
    mean = sum(values) / len(values)
    strength = sum(abs(mean) >= bound for bound in _STRONG)
    side = "up" if mean > 0 else "down"
    return TokenSpan(text, mean, f"{side}-{strength}" if strength else "")


def read_versions(rows: Rows, before: int | None = None) -> Record:
    """Return the newest versions as a tree.

    `accepted`: share of its first judged turns that were accepted; None: it has none.
    `depth`: a lineage goes on at its depth, and versions left by a rollback are one deeper. `gate`:
    its result for the version; `refused`: results of versions refused after it, newest first.
    `drops`: what a rollback to it leaves behind; None: it would change nothing.

    Args:
        before: only versions of lower numbers.
    """
    kept: dict[int, Record] = {
        version["id"]: {**version, "gate": None, "refused": list[Record]()}
        for version in read_stored(rows)
    }
    for step in reversed(read(rows, "steps", Filter(), STEPS)):
        gate_result = gate_of(step)
        if gate_result is not None and gate_result["refused"]:
            kept[step["parent"]]["refused"].append(gate_result)
        elif gate_result is not None:
            kept[step["version"]]["gate"] = gate_result
    for version in kept.values():
        above = kept.get(version["parent"], {"depth": 0, "live": version["live"]})
        version["depth"] = above["depth"] + (above["live"] and not version["live"])
    page = [
        version for version in reversed(kept.values()) if before is None or version["id"] < before
    ]
    line = read_line(rows)
    waiting = rows.pairs(
        "SELECT policy_version, COUNT(*) FROM turns WHERE state IN ('queued', 'held') GROUP BY 1"
    )
    # To the newest it would only end a hold: learning goes on from there as it is.
    here = None if read_decline(rows) else max(kept, default=None)
    for version in page[:ROWS]:
        to = version["id"]
        version["drops"] = None if to == here else _drops(line, [*kept.values()], waiting, to)
    return _first_rows("versions", page, "id")


def _drops(line: Line, versions: Sequence[Record], waiting: Mapping[int, int], to: int) -> str:
    """Say what a rollback to a version leaves behind.

    Args:
        waiting: samples that wait for a step, by the version that they were sampled by.
    """
    kept, at = set[int](), to
    while at is not None:
        kept.add(at)
        at = line.parents[at]
    left_behind = [version for version in versions if version["live"] and version["id"] not in kept]
    after = replace(line, live=frozenset(kept))
    expire = sum(n for version, n in waiting.items() if version not in after.live)
    sentence = "no version is left behind"
    if left_behind:
        learned = plural(sum(version["samples"] for version in left_behind), "sample")
        named = ", ".join(f"v{version['id']}" for version in left_behind[-_NAMED:])
        more = f"{len(left_behind) - _NAMED} earlier ones, " if len(left_behind) > _NAMED else ""
        sentence = f"{more}{named} will be left behind, with what {learned} taught"
    waits = f"; {plural(expire, 'sample')} that wait for a step expire" if expire else ""
    return (
        f"{sentence}{waits}. Nothing is deleted: rolling back to v{max(line.live)} takes it back."
    )


def owner(rows: Rows, turn_id: int) -> str | None:
    """Return the user of a turn; None: there is no such turn."""
    return rows.one(
        "SELECT user FROM turns JOIN sessions ON sessions.id = session_id WHERE turns.id = ?",
        turn_id,
    )
