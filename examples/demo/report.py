"""Report of a run: a table, a picture and report.json.

Rule: all three show the same points, and a point that was not reached is not there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported: there may be no display

import matplotlib.pyplot as plt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.demo import DemoError
from examples.demo.options import Options
from examples.demo.progress import Point, Progress

REPORT = "report.json"
PICTURE = "curve.png"


def write(progress: Progress) -> dict[str, Path]:
    """Write the report; return the paths of everything the run left, by what it is.

    Raises:
        DemoError: there is no room, or no permission.
    """
    try:
        return _write(progress)
    except OSError as error:
        raise DemoError(
            f"its report cannot be written ({error}); see that there is room"
        ) from error


def _write(progress: Progress) -> dict[str, Path]:
    options = progress.options
    curve = progress.curve()
    report = options.out / REPORT
    report.write_text(json.dumps(contents(progress), indent=2) + "\n")
    paths = {"report": report}
    if curve:
        paths["picture"] = options.out / PICTURE
        draw(curve, options, paths["picture"])
    run = options.out / "run"
    paths |= {"ledger": run / "ledger.sqlite3", "metrics": run / "metrics.jsonl"}
    return {what: path for what, path in paths.items() if path.exists()}


def contents(progress: Progress) -> dict[str, Any]:
    """The content of report.json."""
    return {
        "curve": [_entry(point) for point in progress.curve()],
        "whole": progress.last in progress.scores,
        "learner": progress.health.learner if progress.health else None,
        "error": progress.health.last_error if progress.health else None,
        "firsts": [o.first for o in sorted(progress.outcomes, key=lambda o: o.number)],
        "verdicts": dict(progress.figures.verdicts),
        "hints": progress.figures.hints,
        "usd": round(progress.figures.usd, 4),
        "replies": {
            str(version): progress.scores[version].excerpts
            for version in sorted({min(progress.scores), max(progress.scores)})
        }
        if progress.scores
        else {},
        "settings": _settings(progress.options),
        "seconds": round(progress.seconds, 1),
    }


def table(progress: Progress) -> Table:
    """Table of the points that the method's study reports, one row each."""
    options = progress.options
    rows = Table(title=_title(options), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows.add_column("after")  # nine columns in eighty characters
    for name in ("accepted", "sums", "lists", "length", "alike", "step", "sessions", "seconds"):
        rows.add_column(name, justify="right")
    for name, point in _rows(progress):
        rows.add_row(
            name,
            f"{point.score.accepted:.2f}",
            f"{point.score.shares['sums']:.2f}",
            f"{point.score.shares['lists']:.2f}",
            f"{point.score.characters:.0f}",
            f"{point.score.alike:.2f}",
            str(point.step),
            str(point.sessions),
            f"{point.seconds:.0f}",
        )
    return rows


def _title(options: Options) -> str:
    return f"{options.method}, user {options.user}, seed {options.seed}"


def _rows(progress: Progress) -> list[tuple[str, Point]]:
    curve = progress.curve()
    by_step = {point.step: point for point in curve if point.at_sessions is None}
    by_sessions = {point.at_sessions: point for point in curve if point.at_sessions}
    steps = [(f"{s} steps", by_step.get(s)) for s in dict.fromkeys(progress.options.milestones)]
    marks = [(f"{n} sessions", by_sessions.get(n)) for n in progress.options.marks]
    return [(name, point) for name, point in steps + marks if point is not None]


def draw(curve: Sequence[Point], options: Options, path: Path) -> None:
    """Draw shares against optimizer steps, with the sessions on the upper edge."""
    by_step = [point for point in curve if point.at_sessions is None]
    every = list({point.step: point for point in curve}.values())  # the marks' versions, too
    steps = [point.step for point in every]
    figure, axes = plt.subplots(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    for name, values, dash in (
        ("sums right", [point.score.shares["sums"] for point in every], "--"),
        ("lists right", [point.score.shares["lists"] for point in every], ":"),
    ):
        axes.plot(steps, values, label=name, color="#8a8f98", linestyle=dash, marker=".")
    accepted = [point.score.accepted for point in every]
    axes.plot(
        steps, accepted, label="first replies accepted", color="#c2410c", linewidth=2.5, marker="o"
    )
    for point in curve:
        if point.at_sessions is not None:
            _draw_mark(axes, point)
    axes.set(ylim=(0, 1.04), ylabel="share", xlabel="optimizer steps (16 samples each)")
    axes.set_title(f"Learning from being used: {_title(options)}", pad=12)
    axes.set_xticks([point.step for point in by_step])
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    upper = axes.secondary_xaxis("top")
    upper.set_xticks([point.step for point in by_step], [str(point.sessions) for point in by_step])
    upper.set_xlabel("sessions ended by then")
    figure.savefig(path)
    plt.close(figure)


def _draw_mark(axes: Any, point: Point) -> None:
    """Draw a ring for the version that served at the end of this many sessions."""
    at = (point.step, point.score.accepted)
    ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": "#1d4ed8"}
    axes.plot(*at, linestyle="none", **ring)
    axes.annotate(
        f"{point.at_sessions} sessions",
        at,
        xytext=(9, -14),
        textcoords="offset points",
        color="#1d4ed8",
        fontsize=9,
    )


def _entry(point: Point) -> dict[str, Any]:
    mark = {} if point.at_sessions is None else {"at_sessions": point.at_sessions}
    return {
        "step": point.step,
        "sessions": point.sessions,
        "score": round(point.score.accepted, 4),
        **{name: round(share, 4) for name, share in point.score.shares.items()},
        "alike": round(point.score.alike, 4),
        "characters": round(point.score.characters, 1),
        **mark,
    }


def _settings(options: Options) -> dict[str, Any]:
    """Settings needed to run this again."""
    return {
        "method": options.method,
        "user": options.user,
        "seed": options.seed,
        "steps": options.steps,
        "sessions": options.sessions,
        "eval_prompts": options.eval_prompts,
        "config": tomllib.loads(options.config.read_text()),
    }
