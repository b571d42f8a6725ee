"""Contents of the page, read from the ledger file at one moment, in a separate thread.

Rule: a visitor with a user's key sees this user's turns and nothing else. Texts of users, models
and tools go out unchanged: the templates escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from operator import itemgetter
from typing import Any

from tinker_claw.config.settings import Training
from tinker_claw.errors import RequestError
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.figures import read_figures, read_headlines, read_live, read_stored
from tinker_claw.ledger.lessons import read_lessons
from tinker_claw.ledger.turn_view import (
    Contents,
    Record,
    read_contents,
    read_openings,
    run_of,
)
from tinker_claw.ledger.views import Filter, read_steps, read_turns
from tinker_claw.page.charts import Point, curve
from tinker_claw.sinks.base import figures_of
from tinker_claw.types import Kind, StopReason, Tokens
from tinker_claw.words import plural, practised, run_fields, turn_fields

ROWS = 50
"""Rows of a table."""
STEPS = 300
"""Newest steps of a curve."""
LONGEST = 20_000
"""Most characters of a text, and most tokens of a reply, that are shown."""
_WORDS = 80
"""Characters of what a turn was asked that a table shows."""
_NAMED = 8
"""Versions that a rollback names."""
_STRONG = (0.05, 0.3, 1.0)
"""Advantages from which on a token's colour is light, plain and strong; a reward is about 1."""
_CURVES = (
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


def read_overview(rows: Rows, training: Training, user: str | None) -> Record:
    """Return the overview of a user: whether it helps them, and their lessons. `begun`: whether a
    main turn has come.

    Args:
        user: None: all, with the figures of `status`, in its words, and with curves.
    """
    seen = {
        "lessons": _lessons(rows, user),
        "begun": bool(read_turns(rows, Filter(user=user, kind=Kind.MAIN), 1)),
    }
    if user is not None:
        return seen | {
            "headlines": read_headlines(rows, read_live(rows, user), user),
            "run": run_of(rows),
            "fields": (),
        }
    figures = read_figures(rows, training.batch_size)
    steps = [s for s in read_steps(rows, STEPS) if s["status"] == "committed"]
    shares = _shares(figures["accepted"][-STEPS:])
    fields = [*run_fields(figures)]
    return {**figures, **seen, "fields": fields, "shares": shares, "curves": [*_curves(steps)]}


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


def _lessons(rows: Rows, user: str | None) -> list[Record]:
    """Return a user's lessons, or all, each with what its newest practice did."""
    lessons = read_lessons(rows, user)
    return [
        lesson | {"practised": [practised(run) for run in lesson["runs"][-1:]]}
        for lesson in lessons
    ]


def read_turn_list(rows: Rows, wanted: Filter) -> Record:
    """Return the newest turns that match, newest first; main turns with the first words that they
    were asked: `words`."""
    turns = read_turns(rows, wanted, ROWS + 1)[::-1]
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
    contents = read_contents(rows, turn_id)
    if contents is None or user not in (None, contents.turn["user"]):
        raise missing("turn")
    turn = contents.turn
    trained = turn["trained_in_step"] is not None and contents.advantages
    return {
        "turn": turn,
        "contents": contents,
        "fields": list(turn_fields(contents)),
        "pieces": list(_pieces(contents, decode)) if trained else [],
        "feedback": next((entry for entry in contents.feedback[::-1] if not entry["final"]), None),
        # The turns of the session before and after it.
        "neighbours": rows.row(
            "SELECT MAX(id) FILTER (WHERE id < ?2), MIN(id) FILTER (WHERE id > ?2) FROM turns "
            "WHERE session_id = ?1",
            turn["session"],
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
    """Return the newest versions.

    `accepted`: share of its first judged turns that were accepted; None: it has none.
    `drops`: what a rollback to it leaves behind; None: it would change nothing.

    Args:
        before: only versions of lower numbers.
    """
    kept = read_stored(rows)
    page = [version for version in reversed(kept) if before is None or version["id"] < before]
    # To the newest it would only end a hold: learning goes on from there as it is.
    here = kept[-1]["id"] if kept and not read_decline(rows) else None
    for version in page[:ROWS]:
        to = version["id"]
        version["drops"] = None if to == here else _drops(kept, to)
    return _first_rows("versions", page, "id")


def _drops(versions: Sequence[Record], to: int) -> str:
    """Say what a rollback to a version leaves behind."""
    parents = {version["id"]: version["parent"] for version in versions}
    kept, at = set[int](), to
    while at is not None:
        kept.add(at)
        at = parents[at]
    left_behind = [version for version in versions if version["live"] and version["id"] not in kept]
    sentence = "no version is left behind"
    if left_behind:
        learned = plural(sum(map(itemgetter("samples"), left_behind)), "sample")
        named = ", ".join(f"v{version['id']}" for version in left_behind[-_NAMED:])
        more = f"{len(left_behind) - _NAMED} earlier ones, " if len(left_behind) > _NAMED else ""
        sentence = f"{more}{named} will be left behind, with what {learned} taught"
    return f"{sentence}. Nothing is deleted: rolling back to v{versions[-1]['id']} takes it back."


def owner(rows: Rows, turn_id: int) -> str | None:
    """Return the user of a turn; None: there is no such turn."""
    return rows.one(
        "SELECT user FROM turns JOIN sessions ON sessions.id = session_id WHERE turns.id = ?",
        turn_id,
    )
