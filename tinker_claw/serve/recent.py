"""The last requests as a table: what each was, what came of it, and why.

Rule: pure. Everything comes from the ledger, nothing of it is a user's words, and nothing is cut
off that explains something.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from tinker_claw.ledger.recent import RecentTurn
from tinker_claw.story.table import printable, short, vote
from tinker_claw.types import Kind

WIDTH = 110
_GAP = "  "
_NARROWEST = 24
"""The last column gets what the others leave, and at least this."""
_KEY_LENGTH = 14
_CALL_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cells: Sequence[str]
    right: bool = False

    @property
    def width(self) -> int:
        return max(len(self.name), *(len(cell) for cell in self.cells))

    def fit(self, cell: str) -> str:
        return cell.rjust(self.width) if self.right else cell.ljust(self.width)


def table(turns: Sequence[RecentTurn], now: float, *, reasons: bool = False) -> list[str]:
    """The lines of the table, oldest turn first.

    Args:
        turns: at least one.
        now: seconds since 1970; turns of another day show it.
        reasons: a further line per turn with its session's name and the reason of its kind.
    """
    columns = list(_columns(turns, now))
    begin = sum(column.width + len(_GAP) for column in columns)
    room = max(_NARROWEST, WIDTH - begin)
    lines = [_GAP.join([*(column.fit(column.name) for column in columns), "training"]).rstrip()]
    for at, turn in enumerate(turns):
        told = textwrap.wrap(printable(training(turn)), room)
        cells = [column.fit(column.cells[at]) for column in columns]
        lines.append(_GAP.join([*cells, told[0]]))
        lines += [" " * begin + more for more in told[1:]]
        if reasons:
            lines += _because(turn, columns[0].width + len(_GAP))
    return lines


def training(turn: RecentTurn) -> str:
    """Why this turn was trained, was not, or is not yet."""
    if turn.sample is not None:
        return _sampled(turn)
    if turn.untrained_because is not None:
        side = turn.kind is Kind.SIDE and turn.untrained_because.startswith("side turn")
        return "never: a side turn" if side else f"no: {turn.untrained_because}"
    if turn.kind is Kind.SIDE:
        return "never: a side turn"
    if turn.next_role is None:
        if turn.session_closed:
            return "waits for a next state; its session is idle"
        if turn.passed_over:
            return "waits for a next state; its session has gone on without it"
        return "waits for a next state"
    if not turn.judged:
        return "waits for the judge"
    return "judged; waits for the teacher" if turn.hints else "judged; waits to be queued"


def _sampled(turn: RecentTurn) -> str:
    if turn.sample == "trained":
        made = "" if turn.step_version is None else f", which made v{turn.step_version}"
        return f"trained in step {turn.step_id}{made}"
    if turn.sample == "expired":
        return "no: its sample expired: too many steps since, or a rollback"
    if turn.sample == "quarantined":
        return "no: set aside, steps with it failed"
    return "queued: waits for its batch"


def verdict(turn: RecentTurn) -> str:
    """+1, 0 or -1, `none` where no vote was valid, and whether there is a hint."""
    if not turn.judged:
        return "-"
    value = vote(turn.verdict)
    return f"{value} hint" if turn.hints else value


def _columns(turns: Sequence[RecentTurn], now: float) -> Iterator[_Column]:
    yield _Column("turn", [str(turn.id) for turn in turns], right=True)
    yield _Column("when", [_when(turn.created_at, now) for turn in turns])
    if len({turn.user for turn in turns}) > 1:
        yield _Column("user", [short(printable(turn.user), _KEY_LENGTH) for turn in turns])
    yield _Column("session", [_session(turn) for turn in turns])
    yield _Column("kind", [turn.kind for turn in turns])
    if any(turn.call for turn in turns):
        yield _Column("for", [short(printable(turn.call) or "-", _CALL_LENGTH) for turn in turns])
    yield _Column("by", [_by(turn) for turn in turns])
    yield _Column(
        "tokens", [f"{turn.prompt_tokens}+{turn.completion_tokens}" for turn in turns], right=True
    )
    yield _Column("next", [turn.next_role or "-" for turn in turns])
    yield _Column("verdict", [verdict(turn) for turn in turns])


def _because(turn: RecentTurn, indent: int) -> Iterator[str]:
    told = [f"session {turn.session_id} is {turn.session_key!r} of {turn.user!r}"]
    told.append(f"{turn.kind} because: {turn.kind_reason}")
    if turn.fallback is not None:
        told.append(f"answered by another version because: {turn.fallback}")
    for line in told:
        yield from textwrap.wrap(
            printable(line),
            WIDTH,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 2),
        )


def _by(turn: RecentTurn) -> str:
    return f"v{turn.policy_version}" + ("*" if turn.fallback is not None else "")


def _session(turn: RecentTurn) -> str:
    """The ledger's number, and the end of the client's name, which tells sessions apart."""
    key = printable(turn.session_key)
    if len(key) > _KEY_LENGTH:
        key = "…" + key[1 - _KEY_LENGTH :]
    return f"{turn.session_id}:{key}"


def _when(at: float, now: float) -> str:
    then = datetime.fromtimestamp(at)
    today = then.date() == datetime.fromtimestamp(now).date()
    return then.strftime("%H:%M:%S" if today else "%m-%d %H:%M")
