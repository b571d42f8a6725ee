"""What the tables of `run.py log` show of their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinker_claw.ledger.listing import Table
from tinker_claw.story.table import Column, apart, moment, number, short, vote

_Record = Mapping[str, Any]
_LONGEST = 40


def _when(record: _Record) -> str:
    return moment(record["created_at"])


def _as_is(name: str) -> Column:
    return Column(name, lambda record: _text(record[name]))


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _right(name: str, key: str | None = None, least: int = 0) -> Column:
    return Column(name, lambda record: _text(record[key or name]), right=True, least=least)


def _version(name: str, key: str, least: int = 3) -> Column:
    return Column(name, lambda r: "-" if r[key] is None else f"v{r[key]}", least=least)


def _judged(record: _Record) -> str:
    if not record["judged"]:
        return "-"
    return vote(record["verdict"]) + (" hint" if record["hints"] else "")


def _training(record: _Record) -> str:
    if record["trained_in_step"] is not None:
        return f"step {record['trained_in_step']}"
    if record["untrained_because"] is not None:
        return f"no: {short(record['untrained_because'], _LONGEST)}"
    return _text(record["sample"])


def _by(record: _Record) -> str:
    return f"v{record['policy_version']}" + ("*" if record["fallback"] is not None else "")


def _usd(record: _Record) -> str:
    usd = record["metrics"].get("usd")
    return "-" if usd is None else f"${usd:.4f}"


def _metric(name: str, key: str) -> Column:
    return Column(name, lambda record: number(record["metrics"].get(key)), right=True, least=5)


def _losses(record: _Record) -> str:
    return " ".join(number(loss) for loss in record["metrics"].get("losses", ())) or "-"


_WHEN = Column("when", _when, least=8)
_ID = _right("id", least=4)
_TURN = _right("turn", least=4)
_SESSION = _right("session", least=4)
_USER = Column("user", lambda record: short(record["user"], 14), least=4)

COLUMNS: dict[Table, tuple[Column, ...]] = {
    "turns": (
        *(_ID, _WHEN, _USER, _SESSION, _right("index"), _as_is("kind")),
        Column("for", lambda record: short(_text(record["call"]), 16)),
        Column("by", _by, least=3),
        _right("prompt", "prompt_tokens", least=5),
        _right("reply", "completion_tokens", least=4),
        Column("next", lambda record: "yes" if record["has_next_state"] else "-"),
        Column("verdict", _judged, least=7),
        Column("trained", _training),
    ),
    "verdicts": (
        *(_TURN, _WHEN, _USER, _SESSION, _version("by", "policy_version")),
        Column("verdict", lambda record: vote(record["verdict"])),
        Column("votes", lambda record: " ".join(map(vote, record["votes"])) or "-", least=8),
        _right("hints"),
    ),
    "samples": (
        *(_ID, _TURN, _WHEN, _USER, _SESSION, _version("by", "policy_version")),
        Column("reward", lambda r: "-" if r["reward"] is None else vote(r["reward"])),
        Column("hint", lambda record: "yes" if record["hinted"] else "-"),
        Column("state", lambda record: record["state"], least=7),
        _right("step"),
    ),
    "steps": (
        *(_ID, _WHEN, Column("status", lambda record: record["status"], least=9)),
        *(_version("from", "parent"), _version("made", "version")),
        *(_right("samples"), _metric("hinted", "hinted"), Column("losses", _losses, least=12)),
        *(_metric("gradient", "grad_norm"), _metric("reward", "reward_mean")),
        _metric("clipped", "clip_share"),
        Column("apart", lambda record: apart(record["metrics"]), right=True, least=5),
        Column("cost", _usd),
        Column("error", lambda record: short(record["error"] or "", _LONGEST)),
    ),
    "versions": (
        *(_version("version", "id"), _WHEN, _version("from", "parent"), _right("step")),
        Column("saved", lambda record: "yes" if record["saved"] else "-"),
        *(_right("made by step", "made_by_step"), _right("replies", "main_turns")),
    ),
}
