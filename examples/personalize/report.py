"""Report of an experiment: every score as CSV, means over seeds as Markdown, and one plot.

Rule: a run that ended early counts with the version that it ended with, and is reported as such.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported: there may be no display

import matplotlib.pyplot as plt

from examples.demo.scoring import FIRST_WISH
from examples.personalize.experiment import TOLD, Experiment
from examples.personalize.run import written
from tinker_claw.evidence import Rate, in_words, record

SCORES, MARKDOWN, PICTURE = "scores.csv", "report.md", "curves.png"
IN_A_ROW = 3
"""Number of right first replies in a row after which the user has what they want."""
_NO_SKILL = frozenset(
    {"step", "sessions", "at_sessions", "score", "alike", "characters", "work", FIRST_WISH}
)
Found = Mapping[str, Any]
"""Contents of a run's report.json."""


@dataclass(frozen=True, slots=True)
class Row:
    """Runs that differ in their seed only."""

    name: str
    runs: tuple[Found, ...]

    def at_step(self, step: int, what: str = "score") -> list[float]:
        """A figure of the newest scored version of at most this many steps, a seed each."""
        points = [point_at(run, step) for run in self.runs]
        return [point[what] for point in points if what in point]

    def at_sessions(self, sessions: int) -> list[float]:
        """The score when this many sessions had ended, a seed each."""
        points = [point for run in self.runs for point in run["curve"]]
        return [p["score"] for p in points if p.get("at_sessions") == sessions]


def rows(experiment: Experiment, out: Path) -> list[Row]:
    """Make a row for each kind of run of which at least one has ended."""
    kinds: dict[str, list[Found]] = {}
    for run in experiment.runs():
        if (results := written(out, run)) is not None:
            kinds.setdefault(run.kind, []).append(results)
    return [Row(kind, tuple(results)) for kind, results in kinds.items()]


def until_right(firsts: Sequence[bool]) -> int | None:
    """Sessions up to the last of the first three right replies in a row; None: there are none."""
    row = 0
    for number, right in enumerate(firsts, 1):
        row = row + 1 if right else 0
        if row == IN_A_ROW:
            return number
    return None


def point_at(run: Found, step: int) -> Found:
    """Newest scored version of at most this many steps."""
    points = [p for p in run["curve"] if "at_sessions" not in p and p["step"] <= step]
    return max(points, key=lambda p: p["step"])


def write(experiment: Experiment, out: Path) -> list[Path]:
    """Write the three files; return their paths."""
    kinds = rows(experiment, out)
    paths = [out / SCORES, out / MARKDOWN, out / PICTURE]
    _scores(experiment, out, paths[0])
    paths[1].write_text("\n".join(markdown(experiment, kinds)) + "\n", encoding="utf-8")
    _picture(kinds, paths[2])
    return paths


def _scores(experiment: Experiment, out: Path, path: Path) -> None:
    """One line for each scored version of each run."""
    lines: list[dict[str, Any]] = []
    for run in experiment.runs():
        whose = {"method": run.method, "scenario": run.scenario}
        whose |= {"condition": run.condition, "seed": run.seed}
        results = written(out, run) or {"curve": []}
        lines += [whose | point for point in results["curve"]]
    names = dict.fromkeys(name for line in lines for name in line)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(names))
        table.writeheader()
        table.writerows(lines)


def markdown(experiment: Experiment, kinds: Sequence[Row]) -> Iterator[str]:
    """Markdown lines: what ran where, and a table."""
    runs = [run for row in kinds for run in row.runs]
    usd = sum(run["usd"] for run in runs)
    where = dict.fromkeys(f"commit {run['commit']}, {run['date']}" for run in runs)
    yield f"# Personalize: {experiment.name}"
    yield ""
    yield f"{len(runs)} of {len(experiment.runs())} runs have ended; {'; '.join(where)}."
    yield f"Model {experiment.served}, settings {experiment.config.name}, ${usd:.2f} billed."
    yield "Share of first replies that the user accepts: mean over seeds ± standard deviation."
    yield ""
    yield from table(experiment, kinds)


def table(experiment: Experiment, kinds: Sequence[Row]) -> Iterator[str]:
    """Lines of the table."""
    steps, sessions = experiment.steps, experiment.sessions
    marks, ended = (0, steps // 2, steps), (sessions // 2, sessions)
    heads = ["", "seeds", *(f"step {step}" for step in marks), *(f"{n} sessions" for n in ended)]
    heads += ["sessions to three right", "worst skill", "right equation", "length", "ended early"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in kinds:
        at_steps = (spread(row.at_step(step)) for step in marks)
        at_sessions = (spread(row.at_sessions(count)) for count in ended)
        cells = (row.name, str(len(row.runs)), *at_steps, *at_sessions, *_others(row, steps))
        yield "| " + " | ".join(cells) + " |"
    for row in kinds:
        for run in row.runs:
            if "by_rule" in run:
                exam = experiment.scenarios[run["settings"]["user"]].exam(experiment.questions)
                yield from _judged(run, len(exam.subjects))


def _judged(run: Found, questions: int) -> Iterator[str]:
    """Lines on the verdicts and hints of a judge beside a rule that knows the words, and on the
    exam of so many questions before and after."""
    turns: Counter[tuple[str, str]] = Counter()
    for count in run["by_rule"]:
        rejects = "asks for something" if count["asks"] else "rejects"
        stance = "accepts" if count["rule"] == 1 else rejects
        value = count["verdict"]
        verdict = "unread" if value is None else f"{value:+d}".replace("+0", "0")
        turns[stance, verdict] += count["turns"]
        turns[stance, "hint"] += count["turns"] * count["hint"]
    heads = ("-1", "0", "+1", "unread", "hint")
    yield ""
    yield "| the user \\ the judge | " + " | ".join(heads) + " |"
    yield "|" + "---|" * (len(heads) + 1)
    for stance in ("asks for something", "rejects", "accepts"):
        yield f"| {stance} | " + " | ".join(str(turns[stance, head]) for head in heads) + " |"
    yield ""
    for step in (0, run["settings"]["steps"]):
        point = point_at(run, step)
        share = Rate(point["score"] * questions, questions)
        yield f"Accepted after {point['step']} steps: {in_words(record(share))}"


def _others(row: Row, steps: int) -> list[str]:
    """Cells on what else became of the replies."""
    lasts = [point_at(run, steps) for run in row.runs]
    skills = [last[name] for last in lasts for name in last if name not in _NO_SKILL]
    lengths = [
        last["characters"] / max(1, point_at(run, 0)["characters"])
        for run, last in zip(row.runs, lasts, strict=True)
    ]
    right = [until_right(run["firsts"]) for run in row.runs]
    never = right.count(None)
    cell = spread([float(count) for count in right if count is not None], digits=0)
    early = sum(run["learner"] == "held" for run in row.runs)
    return [
        cell + (f" ({never} never)" if never else ""),
        f"{min(skills):.2f}" if skills else "-",
        spread(row.at_step(steps, "work")),
        spread(lengths),
        str(early),
    ]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation over seeds as text."""
    if not values:
        return "-"
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.{digits}f}"


def _picture(kinds: Sequence[Row], path: Path) -> None:
    """Draw each kind's mean over the steps that all of its seeds reached."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row in kinds:
        if row.name.endswith(f"-{TOLD}"):
            axes.axhline(fmean(row.at_step(0)), linestyle="--", color="gray", label=row.name)
            continue
        reached = min(max(p["step"] for p in run["curve"]) for run in row.runs)
        steps = sorted({p["step"] for run in row.runs for p in run["curve"]})
        marked = [step for step in steps if step % 4 == 0 and step <= reached]
        means = [fmean(row.at_step(step)) for step in marked]
        axes.plot(marked, means, marker="o", markersize=3, label=row.name)
    axes.set(xlabel="optimizer steps", ylabel="first replies accepted", ylim=(0, 1))
    if kinds:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
