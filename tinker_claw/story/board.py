"""An overview as lines for a terminal.

Rule: first how far the next step is, last whether it helps.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tinker_claw.ledger.figures import StepFigures
from tinker_claw.story.helps import Measure, Share
from tinker_claw.story.overview import Overview
from tinker_claw.story.table import Column, apart, moment, number, printable, short, table

BAR = 24
_LABEL = 10
_WIDTH = 100
_MOST_REASONS = 8
DEFINED = (
    "Good: a verdict of +1, among turns with a verdict. Accepted: the first reply of a session "
    "whose verdict is not -1. In brackets the 95 % interval. Versions that a rollback has left "
    "behind do not count. What you ask changes over time as well: this is a record, no experiment."
)


def board(overview: Overview) -> list[str]:
    """All of it."""
    return [
        *facts(overview),
        *_under("last steps", table(STEPS, [step_record(s) for s in overview.figures.steps])),
        *_under("not trained, or not yet", list(reasons(overview))),
        *_under("does it help?", list(helps(overview.measures))),
    ]


def facts(overview: Overview) -> Iterator[str]:
    """What fits into a line each."""
    figures = overview.figures
    run = figures.run
    yield _line(
        "records",
        f"{_near(overview.directory)}: {run.get('method', '?')} on {run.get('model', '?')}, "
        f"backend {run.get('backend', '?')}",
    )
    if figures.version is None:
        yield _line("policy", "no version yet: the run has not begun")
    else:
        s = "" if figures.step == 1 else "s"
        pin = "" if figures.pinned is None else f"; v{figures.pinned} answers, which is pinned"
        yield _line("policy", f"v{figures.version}, {figures.step} step{s} from the base{pin}")
    yield _line(
        "next step",
        f"[{bar(overview.queued, overview.batch_size)}] {overview.queued} of "
        f"{overview.batch_size} samples",
    )
    private = f", {figures.private} of them private now" if figures.private else ""
    yield _line(
        "turns",
        f"{figures.main} main and {figures.side} side turns in {figures.sessions} sessions"
        f"{private}",
    )
    verdicts = overview.verdicts
    yield _line(
        "verdicts",
        f"{verdicts['good']} good, {verdicts['neutral']} neutral, {verdicts['bad']} bad, "
        f"{verdicts['none']} without a valid vote; {figures.hints} hints",
    )
    if figures.lost:
        yield _line("lost", lost(figures.lost))
    samples = ", ".join(f"{n} {state}" for state, n in sorted(figures.samples.items())) or "none"
    yield _line("samples", samples)
    if figures.usd:
        yield _line("spent", _spent(figures.usd, figures.unpriced))


def lost(causes: Mapping[str, int]) -> str:
    """What users said that nobody judges, by cause."""
    total = sum(causes.values())
    told = ", ".join(f"{n} {cause}" for cause, n in sorted(causes.items()))
    s = "" if total == 1 else "s"
    return f"{total} answer{s} that could not be tied to a reply: {told}"


def _near(path: Path) -> Path:
    """As seen from where we are, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _spent(usd: Mapping[str, float], unpriced: int) -> str:
    told = ", ".join(f"{purpose} ${cost:.4f}" for purpose, cost in sorted(usd.items()))
    note = f"; {unpriced} bills without a price" if unpriced else ""
    return f"${sum(usd.values()):.4f}: {told}{note}"


def _line(label: str, told: str) -> str:
    return f"{label:<{_LABEL}} {printable(told)}"


def _under(heading: str, lines: list[str]) -> list[str]:
    return ["", heading, *(f"  {line}".rstrip() for line in lines)]


def bar(part: float, whole: float, width: int = BAR) -> str:
    """Filled as far as part goes into whole."""
    filled = min(width, round(width * part / whole)) if whole else 0
    return "#" * filled + "." * (width - filled)


def step_record(step: StepFigures) -> Mapping[str, Any]:
    """What the table of steps shows of one."""
    metrics = step.metrics
    return {
        "id": step.id,
        "when": step.created_at if step.finished_at is None else step.finished_at,
        "status": {"committed": "taken", "intent": "under way"}.get(step.status, step.status),
        "made": "-" if step.version is None else f"v{step.version}",
        "losses": " ".join(number(loss) for loss in metrics.get("losses", ())) or "-",
        **{key: metrics.get(key) for key in ("grad_norm", "reward_mean", "clip_share")},
        "apart": apart(metrics),
        "error": short(step.error or "", 50),
    }


STEPS = (
    Column("step", lambda step: str(step["id"]), right=True),
    Column("when", lambda step: moment(step["when"])),
    *(Column("status", lambda step: step["status"]), Column("made", lambda step: step["made"])),
    Column("losses", lambda step: step["losses"]),
    Column("gradient", lambda step: number(step["grad_norm"]), right=True),
    Column("reward", lambda step: number(step["reward_mean"]), right=True),
    Column("clipped", lambda step: number(step["clip_share"]), right=True),
    Column("apart", lambda step: step["apart"], right=True),
    Column("error", lambda step: step["error"]),
)


def reasons(overview: Overview) -> Iterator[str]:
    """The histogram of why turns were not trained."""
    shown = overview.untrained[:_MOST_REASONS]
    if not shown:
        yield "none: every turn was trained"
    for reason, turns in shown:
        yield f"{turns:>7} {bar(turns, shown[0][1]).rstrip('.'):<{BAR}} {_reason(reason)}"
    if rest := overview.untrained[_MOST_REASONS:]:
        yield f"{sum(turns for _, turns in rest):>7} {'':<{BAR}} {len(rest)} other reasons"


def _reason(told: str) -> str:
    return printable(short(told, _WIDTH - BAR - 11))


def helps(measures: tuple[Measure, ...]) -> Iterator[str]:
    """Shares by versions, and what they mean."""
    for measure in measures:
        yield from textwrap.wrap(f"{measure.name}: {measure.meaning}", _WIDTH)
        for share in measure.shares:
            yield f"  {share.versions:<14} {share_told(share)}"
    yield from textwrap.wrap(DEFINED, _WIDTH)


def share_told(share: Share) -> str:
    """As figures and as a bar."""
    return (
        f"{bar(share.value, 1)} {share.value:4.0%} [{share.low:4.0%} to {share.high:4.0%}] "
        f"of {share.of}"
    )
