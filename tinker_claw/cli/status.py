"""What /healthz says, in a few lines. Pure.

Rule: what is wrong, since when, and what that means to the user, before any figures.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, cast

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tinker_claw.cli.common import (
    Column,
    apart,
    moment,
    number,
    printable,
    short,
    table,
    until_left,
    write,
)
from tinker_claw.config.load import Flags, load
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.views import Figures, StepFigures, VersionFigures, read_figures
from tinker_claw.privacy.marker import NEAR_MISS

KEY_VARIABLE = "TINKER_CLAW_GATEWAY__API_KEY"
_FINE = {
    "backend": ("ok",),
    "learner": ("waiting", "training", "observing", "finished", "paused"),
    "judge": ("ok", "paused"),
    "agreement": ("ok",),
    "servers": ("ok",),
    "upkeep": ("ok",),
}


def describe(health: Mapping[str, Any], url: str, now: float) -> list[str]:
    """The lines for a terminal. `now`: seconds since 1970."""
    if "user" in health:
        return [
            f"tinker-claw at {url}: {health['status']}",
            f"{health['user']}: {health['turns']} turns since the start; tokens: "
            f"{health['prompt_tokens']} of prompts, {health['completion_tokens']} of replies",
            'It tells more to admins: role = "admin" in [[users]], or the key of the gateway.',
        ]
    if "policy_version" not in health:
        more = "It tells more to who sends a key: name its settings file with --config, or set "
        return [f"tinker-claw at {url}: {health['status']}", f"{more}{KEY_VARIABLE}."]
    return [
        f"tinker-claw at {url}: {health['status']}",
        *_wrong(health, now),
        *([health["meaning"]] if health.get("meaning") else []),
        ", ".join(_figures(health)),
    ]


def _wrong(health: Mapping[str, Any], now: float) -> Iterator[str]:
    for part, fine in _FINE.items():
        state = health.get(part, fine[0])
        if state in fine:
            continue
        line = f"  {part}: {state} since {_when(health[f'{part}_since'], now)}"
        wait_s = health.get(f"{part}_next_try_s")
        if part == "learner" and state == "stalled":
            times = health["learner_attempts"]
            line += f", after {times} attempt{'s' if times > 1 else ''}"
            line += f"; next try in {wait_s:.0f} s" if wait_s is not None else "; trying now"
        elif state == "failed" and wait_s is not None:
            line += f"; starting again in {wait_s:.0f} s"
        yield line
        error = health.get(f"{part}_error")
        # What the backend's outage says, the parts that wait for it need not say again.
        if error and (part == "backend" or state != "stalled"):
            yield f"    {error}"
    if taken := health.get("private_near_misses"):
        yield f"  private: {taken} time{'s' if taken > 1 else ''} since the start"
        yield f"    {NEAR_MISS}"
    if paused := health.get("spending_paused"):
        yield f"  spending: paused since {_when(health['learner_since'], now)}"
        yield f"    {paused}"


def _figures(health: Mapping[str, Any]) -> Iterator[str]:
    yield f"policy v{health['policy_version']}"
    yield f"{health['samples_waiting']}/{health['batch_size']} samples waiting"
    spent, budget = health.get("spent_usd"), health.get("budget_usd")
    if spent:
        yield f"${spent:.4f} spent" + (f" of ${budget:g}" if budget else "")


def _when(since: float, now: float) -> str:
    """Local time, with the day where it was another one, and how long ago."""
    began, today = datetime.fromtimestamp(since), datetime.fromtimestamp(now).date()
    shown = began.strftime("%H:%M:%S" if began.date() == today else "%Y-%m-%d %H:%M:%S")
    ago = max(0, int(now - since))
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if ago >= 2 * seconds:
            return f"{shown} ({ago // seconds} {unit} ago)"
    return f"{shown} ({ago} s ago)"


# Whether learning helps on this user's own traffic, as far as his turns can tell. Pure.
#
# Rule: a share never stands without its interval, and where intervals overlap nothing is claimed.
# What he asks changes over time, too: this is a record of use, no experiment.


FEWEST = 30
"""Verdicts below which versions are taken together with their neighbours."""
MOST_GROUPS = 5
"""Groups of versions with learning; more say less."""
_Z = 1.959964
"""Of the normal distribution: 95 % lie within."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of the replies of some successive versions."""

    first: int
    last: int
    good: int
    of: int
    low: float
    """The 95 % interval."""
    high: float

    @property
    def value(self) -> float:
        return self.good / self.of

    @property
    def versions(self) -> str:
        return f"v{self.first}" if self.first == self.last else f"v{self.first} to v{self.last}"


@dataclass(frozen=True, slots=True)
class Measure:
    """One question to the record, its answer by groups of versions, and what that means."""

    name: str
    shares: tuple[Share, ...]
    meaning: str


def measures(
    versions: Sequence[VersionFigures], untrained: AbstractSet[int]
) -> tuple[Measure, ...]:
    """Good verdicts, and accepted first replies.

    Args:
        versions: by id.
        untrained: ids of versions that no step has made.
    """
    good = groups(versions, untrained, lambda v: (v.good, v.voted))
    first = groups(versions, untrained, lambda v: (v.accepted, v.firsts))
    return (
        Measure("good verdicts", good, meaning(good)),
        Measure("accepted first replies", first, meaning(first)),
    )


def groups(
    versions: Sequence[VersionFigures],
    untrained: AbstractSet[int],
    count: Callable[[VersionFigures], tuple[int, int]],
) -> tuple[Share, ...]:
    """Successive versions together, so that each group has enough verdicts to say something.

    Versions before any step stay apart from later ones if they have enough; later ones make at
    most `MOST_GROUPS` groups. A small rest at the end belongs to the last group.
    """
    counted = [(v.version, *count(v)) for v in versions if count(v)[1]]
    before = [entry for entry in counted if entry[0] in untrained]
    if sum(of for _, _, of in before) < FEWEST:
        before = []
    after = [entry for entry in counted if entry not in before]
    least = max(FEWEST, math.ceil(sum(of for _, _, of in after) / MOST_GROUPS))
    gathered = [before] if before else []
    gathered += _gather(after, least)
    return tuple(_share(group) for group in gathered)


_Counted = tuple[int, int, int]
"""Version, good, of how many."""


def _gather(counted: Sequence[_Counted], least: int) -> list[list[_Counted]]:
    found = list[list[_Counted]]()
    room = 0
    for entry in counted:
        if room <= 0:
            found.append([])
            room = least
        found[-1].append(entry)
        room -= entry[2]
    if len(found) > 1 and least - room < max(FEWEST, least / 2):
        rest = found.pop()
        found[-1] += rest
    return found


def _share(group: Sequence[_Counted]) -> Share:
    good, of = sum(entry[1] for entry in group), sum(entry[2] for entry in group)
    low, high = wilson(good, of)
    return Share(group[0][0], group[-1][0], good, of, low, high)


def wilson(good: int, of: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209-212)."""
    p, z2 = good / of, _Z * _Z / of
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(p * (1 - p) / of + z2 / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def meaning(shares: Sequence[Share]) -> str:
    """What the first and the last group say together."""
    if not shares:
        return "no verdicts yet"
    if len(shares) == 1:
        return f"nothing to compare yet: {shares[0].of} verdicts, all in one group"
    first, last = shares[0], shares[-1]
    told = f"{_told(last)}, {_told(first)}"
    if last.low > first.high:
        return f"better than at first: {told}"
    if last.high < first.low:
        return f"worse than at first: {told}"
    return f"not enough turns to tell: {told}, and the intervals overlap"


def _told(share: Share) -> str:
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%}) by {share.versions}"


# How a run goes, from its ledger: what `run.py status` tells beside the gateway's own words.


LAST_STEPS = 5
_TOGETHER = ("side turn", "the teacher could not score it")
"""Reasons that go on with something of the turn's own."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of a data directory, with what they mean."""

    directory: Path
    figures: Figures
    batch_size: int
    untrained: tuple[tuple[str, int], ...]
    """Why turns were not trained, or not yet, and how many; the most frequent first."""
    measures: tuple[Measure, ...]

    @property
    def verdicts(self) -> dict[str, int]:
        seen = self.figures.versions
        good, bad = sum(v.good for v in seen), sum(v.bad for v in seen)
        voted = sum(v.voted for v in seen)
        silent = sum(v.judged for v in seen) - voted
        return {"good": good, "neutral": voted - good - bad, "bad": bad, "none": silent}

    @property
    def queued(self) -> int:
        return self.figures.samples.get("queued", 0)


def read_overview(directory: Path, batch_size: int) -> Overview:
    """The overview of a data directory.

    Raises:
        LedgerError: it holds no ledger, or one that cannot be read.
    """
    with reading(directory / FILE) as ledger, ledger.moment():
        figures = read_figures(ledger, LAST_STEPS)
    return Overview(
        directory=directory,
        figures=figures,
        batch_size=batch_size,
        untrained=tuple(_untrained(figures).most_common()),
        measures=measures(
            [v for v in figures.versions if v.version in figures.live], figures.first_versions
        ),
    )


def _untrained(figures: Figures) -> Counter[str]:
    """Turns without a step, by reason; those that wait are among them."""
    waits = figures.open
    counts = Counter(
        {
            "waits for a next state": waits.next_state,
            "waits for a next state in an idle session": waits.ended,
            "waits for the judge": waits.judge,
            "was judged, waits for the teacher or to be queued": waits.teacher,
            "waits for its step": figures.samples.get("queued", 0),
            "its sample expired": figures.samples.get("expired", 0),
            "its sample was set aside, steps with it failed": figures.samples.get("quarantined", 0),
        }
    )
    for reason, turns in figures.refused.items():
        counts[next((told for told in _TOGETHER if reason.startswith(told)), reason)] += turns
    return +counts


def as_json(overview: Overview) -> dict[str, Any]:
    """For scripts."""
    figures = overview.figures
    return {
        "data_dir": str(overview.directory),
        "run": dict(figures.run),
        "policy_version": figures.version,
        "pinned": figures.pinned,
        "step": figures.step,
        "samples_waiting": overview.queued,
        "batch_size": overview.batch_size,
        "sessions": figures.sessions,
        "private_sessions": figures.private,
        "turns": {"main": figures.main, "side": figures.side},
        "verdicts": overview.verdicts,
        "hints": figures.hints,
        "samples": dict(figures.samples),
        "steps": [_step(asdict(step)) for step in figures.steps],
        "not_trained": dict(overview.untrained),
        "lost_next_states": dict(figures.lost),
        "usd": dict(figures.usd),
        "bills_without_price": figures.unpriced,
        "helps": {
            measure.name.replace(" ", "_"): {
                "meaning": measure.meaning,
                "by_versions": [
                    {**asdict(share), "share": share.value} for share in measure.shares
                ],
            }
            for measure in overview.measures
        },
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    metrics: Mapping[str, Any] = step["metrics"]
    return {**step, "metrics": {k: v for k, v in metrics.items() if k != "rule"}}


# An overview as lines for a terminal.
#
# Rule: first how far the next step is, last whether it helps.


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


# The overview as a view that keeps itself up to date, until interrupted.


EVERY_S = 2.0
"""A glance takes a fraction of this, also with a long ledger."""
_WELL = "green"
_WRONG = "bold red"

Glance = Callable[[], tuple[bool, Sequence[str], Overview | None]]
"""Whether all is well, what the gateway says, and the ledger's overview where there is one."""


def watch(glance: Glance) -> None:
    """Show what `glance` sees, again and again.

    Raises:
        KeyboardInterrupt: the reader has seen enough.
    """
    left = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left = True  # whoever swallows the exception does not keep the view alive
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, leave)
    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while not left:
                live.update(view(*glance()), refresh=True)
                time.sleep(EVERY_S)
    finally:
        signal.signal(signal.SIGINT, before)


def view(well: bool, said: Sequence[str], overview: Overview | None) -> RenderableType:
    """One picture."""
    head = Text("\n".join(said), style=_WELL if well else _WRONG)
    if overview is None:
        return Panel(head, title="tinker-claw")
    parts: list[RenderableType] = [
        Panel(head, title="tinker-claw"),
        Group(
            Text("towards the next step"),
            ProgressBar(total=overview.batch_size, completed=overview.queued, width=60),
        ),
        Text("\n".join(["", *facts(overview), ""])),
        _steps(overview),
        _shares(overview),
        Panel(Text("\n".join(reasons(overview))), title="not trained, or not yet"),
    ]
    return Group(*parts)


def _steps(overview: Overview) -> Table:
    table = Table(title="last steps", title_justify="left", expand=True)
    for column in STEPS:
        table.add_column(column.name, justify="right" if column.right else "left")
    for step in overview.figures.steps:
        table.add_row(*(Text(column.show(step_record(step))) for column in STEPS))
    return table


def _shares(overview: Overview) -> Table:
    table = Table(title="does it help?", title_justify="left", expand=True, caption=DEFINED)
    for name in ("of", "by", "share, and its 95 % interval"):
        table.add_column(name)
    for measure in overview.measures:
        table.add_row(Text(measure.name), "", Text(measure.meaning))
        for share in measure.shares:
            table.add_row("", share.versions, Text(share_told(share)))
    return table


# `run.py status`: how the gateway that runs is, and how the run goes, from its ledger.
#
# Rule: what is wrong, since when, and what that means to the user, before any figures. The exit
# status says it to scripts: 0 all is well, 1 something is wrong, 2 nobody was there to ask. The
# ledger is read all the same.


EXIT_WELL = 0
EXIT_WRONG = 1
EXIT_UNREACHABLE = 2
TIMEOUT_S = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a gateway that listens everywhere is asked from its own machine."""


class GatewayUnreachable(Exception):
    """Nobody to ask; says why."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What there is to see at one moment."""

    url: str
    health: Mapping[str, Any] | None
    """None: no gateway answers."""
    overview: Overview | None
    """None: no ledger was found."""
    notes: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        if self.health is None:
            return EXIT_UNREACHABLE
        return EXIT_WELL if self.health["status"] == "ok" else EXIT_WRONG


def main(arguments: Sequence[str]) -> int:
    """Print how the gateway is, and what its ledger tells; the exit status says whether all is
    well.

    Raises:
        ConfigError: a setting is wrong.
    """
    given, rest = parser().parse_known_args(arguments)
    settings = load(rest)
    port: int = settings.gateway.port if given.port is None else given.port
    url = url_of(given.host or settings.gateway.host, port)
    if given.live:
        with until_left():
            watch(lambda: _glance(_look(url, settings)))
        return EXIT_WELL
    look = _look(url, settings)
    with until_left():
        if given.json:
            write([json.dumps(_as_json(look))])
        else:
            sys.stderr.writelines(f"tinker-claw: {note}\n" for note in look.notes)
            write(_lines(look))
    return look.exit_status


def _look(url: str, settings: Settings) -> _Look:
    health, notes = None, list[str]()
    try:
        health = ask(url, key_of(settings))
    except GatewayUnreachable as error:
        notes.append(
            f"No gateway answers at {url} ({error}). Start one with `python run.py`, or name the "
            "port of the one that runs with --port (its event `serving` says which)."
        )
    overview = None
    if (directory := _directory(settings, health)) is not None:
        try:
            batch_size = (health or {}).get("batch_size", settings.training.batch_size)
            overview = read_overview(directory, batch_size)
        except LedgerError as error:
            notes.append(f"No figures of the ledger: {error}.")
        else:
            notes += _elsewhere(directory, health)
    return _Look(url, health, overview, tuple(notes))


def _directory(settings: Settings, health: Mapping[str, Any] | None) -> Path | None:
    """Where the ledger lies: as was asked for, else where the gateway keeps it."""
    if settings.run.data_dir is not None or health is None:
        return settings.run.directory
    return Path(health["data_dir"]) if "data_dir" in health else None


def data_directory(settings: Settings) -> Path | None:
    """Where the gateway that runs with these settings keeps its records, if that is here.

    Raises:
        ConfigError: the port is not known.
    """
    url = url_of(settings.gateway.host, settings.gateway.port)
    try:
        health = ask(url, key_of(settings))
    except GatewayUnreachable:
        return None
    named = health.get("data_dir")
    return Path(named) if isinstance(named, str) and Path(named).is_dir() else None


def _elsewhere(directory: Path, health: Mapping[str, Any] | None) -> Iterator[str]:
    its_own = (health or {}).get("data_dir")
    if its_own is not None and Path(its_own) != directory.absolute():
        yield f"The gateway keeps its records in {its_own}; the figures are those of {directory}."


def _lines(look: _Look) -> list[str]:
    said = [] if look.health is None else describe(look.health, look.url, time.time())
    if look.overview is None:
        return said
    return [*said, *([""] if said else []), *board(look.overview)]


def _glance(look: _Look) -> tuple[bool, Sequence[str], Overview | None]:
    said = [] if look.health is None else describe(look.health, look.url, time.time())
    return look.exit_status == EXIT_WELL, [*said, *look.notes], look.overview


def _as_json(look: _Look) -> dict[str, Any]:
    told = as_json(look.overview) if look.overview else None
    if look.health is None:
        return {"status": "unreachable", "error": " ".join(look.notes), "ledger": told}
    return {**look.health, "ledger": told}


def ask(url: str, key: str | None = None) -> dict[str, Any]:
    """What the gateway at `url` (without /v1) says of itself; to strangers, `status` alone.

    Raises:
        GatewayUnreachable: there is none.
    """
    try:
        # Plain HTTP to a machine that was named: no proxy, and no certificates to load.
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
            headers = {"authorization": f"Bearer {key}"} if key else None
            health = client.get(f"{url}/healthz", headers=headers).json()
    except httpx.TimeoutException as error:
        raise GatewayUnreachable(f"nothing came back within {TIMEOUT_S:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise GatewayUnreachable(str(error) or type(error).__name__) from error
    except ValueError as error:
        raise GatewayUnreachable("what answers there is no tinker-claw") from error
    if not isinstance(health, dict) or "status" not in health:
        raise GatewayUnreachable("what answers there is no tinker-claw")
    return cast("dict[str, Any]", health)


def key_of(settings: Settings) -> str | None:
    """One that the gateway takes, an admin's where there is one."""
    admins_first = sorted(settings.users, key=lambda user: user.role != "admin")
    keys = [settings.gateway.api_key, *(user.key for user in admins_first)]
    return next((key.get_secret_value() for key in keys if key is not None), None)


def served_models(url: str, key: str | None) -> list[str] | None:
    """The names under which a gateway offers its models; None: it does not tell us."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
            answer = client.get(f"{url}/v1/models", headers=headers)
        return [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def url_of(host: str, port: int) -> str:
    """Where a gateway is asked from its own machine.

    Raises:
        ConfigError: the port is not known.
    """
    if port == 0:
        raise ConfigError("--port 0 lets the gateway choose: give the port that it chose")
    host = _ANYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def parser() -> argparse.ArgumentParser:
    top = Flags(
        prog="run.py status",
        description="Say how the gateway that runs is: what is wrong, since when, what it means; "
        "and from its ledger how the run goes, and whether it helps.",
        epilog="Exit status: 0 all is well, 1 something is wrong, 2 no gateway answers (its "
        "ledger is shown all the same). The data directory is that of --data-dir, else the one "
        "that the gateway names; without a gateway the one that run.py would use with the same "
        "flags, all of which can be given.",
        allow_abbrev=False,
    )
    top.add_argument("--host", help="its address (default: the setting, 127.0.0.1)")
    top.add_argument("--port", type=int, help="its port (default: the setting, 30000)")
    top.add_argument(
        "--json", action="store_true", help="what /healthz says, and the ledger, as JSON"
    )
    top.add_argument("--live", action="store_true", help="a view that keeps itself up to date")
    return top
