"""Report of the experiment: tables as Markdown, and one picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported: there may be no display

import matplotlib.pyplot as plt

from examples.real.cost import PRICED_AS
from examples.real.wishes import WISHES

MARKDOWN, PICTURE = "report.md", "sessions.png"
Cells = Sequence[Mapping[str, Any]]
_DRAWN: Final = {
    "told": "said once",
    "practised": "said once, then practised",
    "combine": "only corrected",
}
_HEADS: Final = (
    "",
    "wish",
    "seed",
    "first session",
    "second",
    "later",
    "steps",
    "untold",
    "told",
    "contrary",
    "facts",
    "end",
    "minutes",
    "of processor",
    f"$ as {PRICED_AS}",
)
_PARTS: Final = ("follow", "contrary", "facts", "ended")


def write(cells: Cells, out: Path) -> None:
    """Write both files."""
    loads: dict[str, list[float]] = {}
    for figures in cells:
        where = f"commit {figures['commit']}, {figures['date']}, {figures['threads']} threads"
        loads.setdefault(" ".join((where, *figures["flags"])), []).append(figures["load"])
    lines = ["# Said once, on a model of 1.5 billion parameters", ""]
    lines += [
        f"- {len(values)} cells: {where}, load {min(values)} to {max(values)}"
        for where, values in loads.items()
    ]
    lines += ["", *tables(cells), "", f"![first replies accepted by session]({PICTURE})"]
    (out / MARKDOWN).write_text("\n".join(lines) + "\n", encoding="utf-8")
    _picture(cells, out / PICTURE)


def tables(cells: Cells) -> Iterator[str]:
    """Yield the lines of the tables."""
    base = {figures["wish"]: figures["exams"] for figures in cells if figures["arm"] == "base"}
    yield from _row("the base", "wish", "contrary obeyed", "facts", "replies that end")
    yield from _rule(5)
    for wish, exams in base.items():
        for name, exam in exams.items():
            yield from _row(f"{wish}, {name}", *(_of(exam[part]) for part in _PARTS))
    for wish in base:
        yield from ("", f"*{wish}*: {WISHES[wish].text}")
    yield ""
    yield from _row(*_HEADS)
    yield from _rule(15)
    for figures in cells:
        if figures["arm"] != "base":
            yield from _cell(figures)
    yield ""
    for figures in cells:
        for run in figures["practice"]:
            whose = f"- practised, {figures['wish']}, seed {figures['seed']}: "
            yield whose + ("passed" if run["passed"] else f"not kept: {run['because']}")
    yield ""
    yield from _means(cells)


def _cell(figures: Mapping[str, Any]) -> Iterator[str]:
    firsts, exams = figures["firsts"], figures["exams"]
    later = firsts[2:] if len(firsts) < 24 else firsts[-16:]
    untold = [_of(exams.get("untold", {}).get(part)) for part in _PARTS]
    followed = _of(exams.get("told", {}).get("follow"))
    yield from _row(
        figures["arm"],
        figures["wish"],
        str(figures["seed"]),
        *(_of([sum(some), len(some)]) for some in (firsts[:1], firsts[1:2], later)),
        str(figures["steps"]),
        untold[0],
        followed,
        *untold[1:],
        f"{figures['wall_minutes']:.0f}",
        f"{figures['cpu_minutes']:.0f}",
        f"{figures['usd']:.2f}",
    )


def _means(cells: Cells) -> Iterator[str]:
    """Yield a table of each arm and wish over its seeds."""
    yield from _row(
        "", "wish", "seeds", "later sessions accepted", "untold exam", "contrary obeyed"
    )
    yield from _rule(6)
    for arm, wish in dict.fromkeys((figures["arm"], figures["wish"]) for figures in cells):
        some = [figures for figures in cells if (figures["arm"], figures["wish"]) == (arm, wish)]
        later = [first for figures in some for first in figures["firsts"][1:]]
        exams = [figures["exams"].get("untold", {}) for figures in some]
        means = [
            [exam[part][0] / exam[part][1] for exam in exams if part in exam]
            for part in ("follow", "contrary")
        ]
        shares = (f"{fmean(values):.2f}" if values else "-" for values in (later, *means))
        yield from _row(arm, wish, str(len(some)), *shares)


def _of(pair: Sequence[int] | None) -> str:
    return f"{pair[0]} of {pair[1]}" if pair else "-"


def _row(*cells: str) -> Iterator[str]:
    yield "| " + " | ".join(cells) + " |"


def _rule(cells: int) -> Iterator[str]:
    yield "|" + "---|" * cells


def _picture(cells: Cells, path: Path) -> None:
    """Draw the share of first replies that were accepted, over ever longer runs of sessions."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for arm, label in _DRAWN.items():
        runs = [figures["firsts"] for figures in cells if figures["arm"] == arm]
        points = list(_binned(runs))
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    axes.set(xlabel="session", ylabel="first replies accepted", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _binned(runs: Sequence[Sequence[bool]]) -> Iterator[tuple[int, float]]:
    """Yield the share in sessions 1, 2, 3 to 4, 5 to 8, 9 to 16 …, each at its last session."""
    begin, end = 0, 1
    while firsts := [first for run in runs for first in run[begin:end]]:
        yield min(end, max(map(len, runs))), fmean(firsts)
        begin, end = end, 2 * end
