"""`run.py status`: how the gateway that runs is, and how the run goes, from its ledger.

Rule: what is wrong, since when, and what that means to the user, before any figures. A share never
stands without its interval, and where intervals overlap nothing is claimed.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from pydantic import Field

from tinker_claw.cli.common import (
    WIDTH,
    Column,
    Flags,
    GatewayUnreachable,
    apart,
    ask,
    key_of,
    note,
    number,
    plural,
    printable,
    read_run_view,
    short,
    span,
    table,
    until_left,
    url_of,
    wrapped,
    write,
    write_json,
)
from tinker_claw.config.settings import Settings
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.figures import Figures, StepFigures, VersionFigures, read_figures
from tinker_claw.ledger.outcome import count_outcomes, moment
from tinker_claw.privacy.marker import NEAR_MISS

EXIT_WELL = 0
EXIT_WRONG = 1
EXIT_UNREACHABLE = 2
EVERY_S = 2.0
"""Between two looks of the live view. One takes a fraction of it, also with a long ledger."""


class StatusFlags(Flags):
    """Say how the gateway that runs is: what is wrong, since when, what it means; and from its
    ledger how the run goes, and whether it helps."""

    MORE: ClassVar[str] = (
        "Exit status: 0 all is well, 1 something is wrong, 2 no gateway answers (its ledger is "
        "shown all the same). The data directory is that of --data-dir, else the one that the "
        "gateway names; without a gateway the one that run.py would use with the same flags, all "
        "of which can be given."
    )

    host: str | None = Field(None, description="its address (default: the setting, 127.0.0.1)")
    port: int | None = Field(None, description="its port (default: the setting, 30000)")
    as_json: bool = Field(
        False, alias="json", description="what /healthz says, and the ledger, as JSON"
    )
    live: bool = Field(False, description="a view that keeps itself up to date")


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

    @property
    def said(self) -> list[str]:
        return [] if self.health is None else describe(self.health, self.url, time.time())

    @property
    def figures(self) -> list[str]:
        return [] if self.overview is None else board(self.overview)

    def as_json(self) -> dict[str, Any]:
        ledger = as_json(self.overview) if self.overview else None
        if self.health is None:
            return {"status": "unreachable", "error": " ".join(self.notes), "ledger": ledger}
        return {**self.health, "ledger": ledger}


def status(given: StatusFlags) -> int:
    """Print how the gateway is, and what its ledger tells; the exit status says whether all is
    well.

    Raises:
        ConfigError: a setting is wrong.
    """
    settings = given.settings
    url = url_of(settings, given.host, given.port)
    if given.live:
        _watch(lambda: _look(url, settings))
        return EXIT_WELL
    look = _look(url, settings)
    with until_left():
        if given.as_json:
            write_json([look.as_json()])
        else:
            for told in look.notes:
                note(told)
            write([*look.said, *([""] if look.said and look.figures else []), *look.figures])
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
    its_own = (health or {}).get("data_dir")
    overview, directory = None, settings.run.directory
    if settings.run.data_dir is None and health is not None:
        directory = None if its_own is None else Path(its_own)
    if directory is not None:
        try:
            batch_size = (health or {}).get("batch_size", settings.training.batch_size)
            overview = read_overview(directory, batch_size)
        except LedgerError as error:
            notes.append(f"No figures of the ledger: {error}.")
        else:
            if its_own is not None and Path(its_own) != directory.absolute():
                notes.append(
                    f"The gateway keeps its records in {its_own}; the figures are those of "
                    f"{directory}."
                )
    return _Look(url, health, overview, tuple(notes))


def _watch(look: Callable[[], _Look]) -> None:
    """Show what there is to see, again and again, until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

    left = Event()  # an exception could be swallowed by whoever is at work
    before = signal.signal(signal.SIGINT, lambda number, frame: left.set())
    try:
        with Live(auto_refresh=False) as live:
            while not left.is_set():
                seen = look()
                style = "green" if seen.exit_status == EXIT_WELL else "bold red"
                head = Text("\n".join([*seen.said, *seen.notes]), style=style)
                figures = Text.from_ansi("\n".join(seen.figures))
                live.update(Group(Panel(head, title="tinker-claw"), figures), refresh=True)
                left.wait(EVERY_S)
    finally:
        signal.signal(signal.SIGINT, before)


# What /healthz says

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
            line += f", after {plural(times, 'attempt')}"
            line += f"; next try in {wait_s:.0f} s" if wait_s is not None else "; trying now"
        elif state == "failed" and wait_s is not None:
            line += f"; starting again in {wait_s:.0f} s"
        yield line
        error = health.get(f"{part}_error")
        # What the backend's outage says, the parts that wait for it need not say again.
        if error and (part == "backend" or state != "stalled"):
            yield f"    {error}"
    if taken := health.get("private_near_misses"):
        yield f"  private: {plural(taken, 'time')} since the start"
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
    return f"{moment(since, now)} ({span(max(0, now - since))} ago)"


# How the run goes, from its ledger

LAST_STEPS = 5


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
        outcomes = count_outcomes(ledger, read_run_view(ledger, batch_size))
    return Overview(
        directory=directory,
        figures=figures,
        batch_size=batch_size,
        untrained=tuple(outcomes.most_common()),
        measures=measures(
            [v for v in figures.versions if v.version in figures.live], figures.first_versions
        ),
    )


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
        "steps": [
            {**asdict(step), "metrics": {k: v for k, v in step.metrics.items() if k != "rule"}}
            for step in figures.steps
        ],
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


# The same as lines: first how far the next step is, last whether it helps

BAR = 24
_LABEL = 10
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
        *_under("last steps", table(STEPS, overview.figures.steps)),
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
        pin = "" if figures.pinned is None else f"; v{figures.pinned} answers, which is pinned"
        yield _line(
            "policy", f"v{figures.version}, {plural(figures.step, 'step')} from the base{pin}"
        )
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
    return f"{plural(total, 'answer')} that could not be tied to a reply: {told}"


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


def _figure(name: str, key: str) -> Column:
    return Column(name, lambda step: number(step.metrics.get(key)), right=True)


def _losses(step: StepFigures) -> str:
    return " ".join(number(loss) for loss in step.metrics.get("losses", ())) or "-"


_TAKEN: dict[str, str] = {"committed": "taken", "intent": "under way"}
STEPS = (
    Column("step", lambda step: str(step.id), right=True),
    Column("when", lambda step: moment(step.finished_at or step.created_at)),
    Column("status", lambda step: _TAKEN.get(step.status, str(step.status))),
    Column("made", lambda step: "-" if step.version is None else f"v{step.version}"),
    Column("losses", _losses),
    *(_figure("gradient", "grad_norm"), _figure("reward", "reward_mean")),
    _figure("clipped", "clip_share"),
    Column("apart", lambda step: apart(step.metrics), right=True),
    Column("error", lambda step: short(step.error or "", 50)),
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
    return printable(short(told, WIDTH - BAR - 11))


def helps(measures: tuple[Measure, ...]) -> Iterator[str]:
    """Shares by versions, and what they mean."""
    for measure in measures:
        yield from wrapped(f"{measure.name}: {measure.meaning}")
        for share in measure.shares:
            yield (
                f"  {share.versions:<14} {bar(share.value, 1)} {share.value:4.0%} "
                f"[{share.low:4.0%} to {share.high:4.0%}] of {share.of}"
            )
    yield from wrapped(DEFINED)


# Whether learning helps on this user's own traffic, as far as their turns can tell

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
