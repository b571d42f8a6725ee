"""Report of an experiment: every score as CSV, means over seeds as Markdown, and one plot.

Rule: a run that ended early counts with the version that it ended with, and is reported as such.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from examples import tables
from examples.demo.report import picture
from examples.demo.scoring import FIRST_WISH
from examples.personalize.experiment import TOLD, Experiment
from examples.personalize.run import written
from tinker_claw.evidence import Rate, in_words, record

SCORES, MARKDOWN, PICTURE = "scores.csv", "report.md", "curves.png"
IN_A_ROW = 3
"""Number of right first replies in a row after which the user has what they want."""
_NO_SKILL = frozenset({"step", "sessions", "score", "characters", "work", FIRST_WISH})
Results = Mapping[str, Any]
"""Contents of a run's report.json."""
Rows = Mapping[str, Sequence[Results]]
"""Runs that differ in their seed only, by their kind."""


def rows(experiment: Experiment, out: Path) -> Rows:
    """Return the runs that have ended."""
    kinds: dict[str, list[Results]] = {}
    for run in experiment.runs():
        if (results := written(out, run)) is not None:
            kinds.setdefault(run.kind, []).append(results)
    return kinds


def until_right(firsts: Sequence[bool]) -> int | None:
    """Sessions up to the last of the first three right replies in a row; None: there are none."""
    row = 0
    for number, right in enumerate(firsts, 1):
        row = row + 1 if right else 0
        if row == IN_A_ROW:
            return number
    return None


def point_at(run: Results, step: int) -> Results:
    """Newest scored version of at most this many steps."""
    return max((p for p in run["curve"] if p["step"] <= step), key=lambda p: p["step"])


def at_step(runs: Sequence[Results], step: int, what: str = "score") -> list[float]:
    """A figure of the newest scored version of at most this many steps, a seed each."""
    points = [point_at(run, step) for run in runs]
    return [point[what] for point in points if what in point]


def write(experiment: Experiment, out: Path) -> list[Path]:
    """Write the three files; return their paths."""
    kinds = rows(experiment, out)
    paths = [out / SCORES, out / MARKDOWN, out / PICTURE]
    _write_scores(experiment, out, paths[0])
    paths[1].write_text("\n".join(_markdown(experiment, kinds)) + "\n", encoding="utf-8")
    _draw(kinds, paths[2])
    return paths


def _write_scores(experiment: Experiment, out: Path, path: Path) -> None:
    """One line for each scored version of each run."""
    lines: list[dict[str, Any]] = []
    for run in experiment.runs():
        whose = {"method": run.method, "scenario": run.scenario}
        whose |= {"condition": run.condition, "seed": run.seed}
        results = written(out, run) or {"curve": []}
        lines += [whose | point for point in results["curve"]]
    names = dict.fromkeys(name for line in lines for name in line)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(lines)


def _markdown(experiment: Experiment, kinds: Rows) -> Iterator[str]:
    """Markdown lines: what ran where, and a table."""
    ended = [*chain.from_iterable(kinds.values())]
    usd = sum(run["usd"] for run in ended)
    where = dict.fromkeys(f"commit {run['commit']}, {run['date']}" for run in ended)
    served = experiment.settings.served_name
    yield f"# Personalize: {experiment.name}"
    yield ""
    yield f"{len(ended)} of {len(experiment.runs())} runs have ended; {'; '.join(where)}."
    yield f"Model {served}, settings {experiment.config.name}, ${usd:.2f} billed."
    yield "Share of first replies that the user accepts: mean over seeds ± standard deviation."
    yield ""
    yield from table(experiment, kinds)


def table(experiment: Experiment, kinds: Rows) -> Iterator[str]:
    """Lines of the table."""
    marks = (0, experiment.steps // 2, experiment.steps)
    heads = ["", "seeds", *(f"step {step}" for step in marks), "sessions to three right"]
    heads += ["worst skill", "right equation", "length", "ended early"]
    yield from tables.table(
        heads,
        (
            [
                kind,
                len(runs),
                *(spread(at_step(runs, step)) for step in marks),
                *_others(runs, experiment.steps),
            ]
            for kind, runs in kinds.items()
        ),
    )
    for run in chain.from_iterable(kinds.values()):
        if "by_rule" in run:
            exam = experiment.scenarios[run["settings"]["user"]].exam(experiment.questions)
            yield from _judged(run, len(exam.subjects))


def _judged(run: Results, questions: int) -> Iterator[str]:
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
    yield from tables.table(
        ("the user \\ the judge", *heads),
        (
            (stance, *(turns[stance, head] for head in heads))
            for stance in ("asks for something", "rejects", "accepts")
        ),
    )
    yield ""
    for step in (0, run["settings"]["steps"]):
        point = point_at(run, step)
        share = Rate(point["score"] * questions, questions)
        yield f"Accepted after {point['step']} steps: {in_words(record(share))}"


def _others(runs: Sequence[Results], steps: int) -> list[str]:
    """Cells on what else became of the replies."""
    skills, lengths, right = list[float](), list[float](), list[int | None]()
    for run in runs:
        last = point_at(run, steps)
        skills += [last[name] for name in last if name not in _NO_SKILL]
        lengths.append(last["characters"] / max(1, run["curve"][0]["characters"]))
        right.append(until_right(run["firsts"]))
    cell = spread([float(count) for count in right if count is not None], digits=0)
    return [
        f"{cell} ({right.count(None)} never)" if None in right else cell,
        f"{min(skills):.2f}" if skills else "-",
        spread(at_step(runs, steps, "work")),
        spread(lengths),
        str([run["learner"] for run in runs].count("held")),
    ]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation over seeds as text."""
    if not values:
        return "-"
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.{digits}f}"


def _draw(kinds: Rows, path: Path) -> None:
    """Draw each kind's mean over the steps that all of its seeds reached."""
    with picture(path, xlabel="optimizer steps") as axes:
        for kind, runs in kinds.items():
            if kind.endswith(f"-{TOLD}"):
                axes.axhline(fmean(at_step(runs, 0)), linestyle="--", color="gray", label=kind)
                continue
            reached = min(run["curve"][-1]["step"] for run in runs)
            steps = {p["step"] for run in runs for p in run["curve"] if p["step"] <= reached}
            marked = sorted(step for step in steps if step % 4 == 0)
            means = [fmean(at_step(runs, step)) for step in marked]
            axes.plot(marked, means, marker="o", markersize=3, label=kind)
