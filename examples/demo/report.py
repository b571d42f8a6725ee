"""Report of a run: a table, a picture and report.json.

Rule: all three show the same points, and a point that was not reached is not there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
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
_GREY = "#8a8f98"


def write(progress: Progress) -> dict[str, Path]:
    """Write the report; return the paths of everything the run left, by what it is.

    Raises:
        DemoError: there is no room, or no permission.
    """
    out, curve, run = progress.options.out, progress.curve(), progress.options.launch.data
    paths = {"report": out / REPORT, "picture": out / PICTURE}
    try:
        paths["report"].write_text(json.dumps(contents(progress), indent=2) + "\n")
        if curve:
            _draw(curve, progress.options, paths["picture"])
    except OSError as error:
        raise DemoError(
            f"its report cannot be written ({error}); see that there is room"
        ) from error
    paths |= {"ledger": run / "ledger.sqlite3", "metrics": run / "metrics.jsonl"}
    return {what: path for what, path in paths.items() if path.exists()}


def contents(progress: Progress) -> dict[str, Any]:
    """The content of report.json."""
    health, scores = progress.health, progress.scores
    return {
        "curve": [_entry(point) for point in progress.curve()],
        "whole": progress.last in scores,
        "learner": health.learner if health else None,
        "error": health.last_error if health else None,
        "firsts": [o.first for o in sorted(progress.outcomes, key=lambda o: o.number)],
        "verdicts": dict(progress.figures.verdicts),
        "hints": progress.figures.hints,
        "replies": {
            str(step): score.excerpts
            for step, score in sorted(scores.items())
            if step in (min(scores), max(scores))
        },
        "settings": _settings(progress.options),
        "seconds": round(progress.seconds, 1),
    }


def _entry(point: Point) -> dict[str, Any]:
    moment, score = point
    return {
        "step": moment.version,
        "sessions": moment.sessions,
        "score": round(score.accepted, 4),
        **{name: round(share, 4) for name, share in score.shares.items()},
        "characters": round(score.characters, 1),
    }


def _settings(options: Options) -> dict[str, Any]:
    """Settings needed to run this again."""
    names = ("method", "user", "seed", "steps", "sessions", "eval_prompts")
    config = tomllib.loads(options.config.read_text())
    return {name: getattr(options, name) for name in names} | {"config": config}


def table(progress: Progress) -> Table:
    """Table of the milestones that were reached, one row each."""
    title = _title(progress.options)
    rows = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows.add_column("after")
    for name in ("accepted", "sums", "lists", "length", "sessions", "seconds"):
        rows.add_column(name, justify="right")
    for moment, score in progress.curve():
        if moment.version in progress.options.milestones:
            rows.add_row(
                f"{moment.version} steps",
                f"{score.accepted:.2f}",
                f"{score.shares['sums']:.2f}",
                f"{score.shares['lists']:.2f}",
                f"{score.characters:.0f}",
                str(moment.sessions),
                f"{moment.seconds:.0f}",
            )
    return rows


def _title(options: Options) -> str:
    return f"{options.method}, user {options.user}, seed {options.seed}"


@contextmanager
def picture(path: Path, **axes: Any) -> Generator[Any]:
    """Yield axes of a new picture with these settings; it is written at the end."""
    figure, drawn = plt.subplots(figsize=(8, 4.6), dpi=150, layout="constrained")
    drawn.set(**{"ylim": (-0.02, 1.04), "ylabel": "first replies accepted"} | axes)
    yield drawn
    if drawn.lines:
        drawn.legend(loc="lower right", fontsize="small", frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _draw(curve: Sequence[Point], options: Options, path: Path) -> None:
    """Draw shares against optimizer steps, with the sessions on the upper edge."""
    steps = [moment.version for moment, _ in curve]
    sessions = [str(moment.sessions) for moment, _ in curve]
    accepted = [score.accepted for _, score in curve]
    bottom = "optimizer steps (16 samples each)"
    with picture(path, ylabel="share", xlabel=bottom, xticks=steps) as axes:
        for name, dash in (("sums", "--"), ("lists", ":")):
            shares = [score.shares[name] for _, score in curve]
            axes.plot(steps, shares, dash, marker=".", color=_GREY, label=f"{name} right")
        line = {"color": "#c2410c", "linewidth": 2.5, "label": "first replies accepted"}
        axes.plot(steps, accepted, marker="o", **line)
        axes.set_title(f"Learning from being used: {_title(options)}", pad=12)
        axes.grid(alpha=0.25)
        upper = axes.secondary_xaxis("top")
        upper.set_xticks(steps, sessions)
        upper.set_xlabel("sessions ended by then")
