"""Report of the experiment: tables as Markdown, and one picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from examples.demo.report import picture
from examples.real.cost import PRICED_AS
from examples.real.wishes import WISHES
from examples.tables import table

MARKDOWN, PICTURE = "report.md", "sessions.png"
Cells = Sequence[Mapping[str, Any]]
_DRAWN: Final = {
    "told": "said once",
    "practised": "said once, then practised",
    "combine": "only corrected",
}
_SESSIONS: Final = ("first session", "second", "later", "steps")
_EXAM: Final = ("untold", "told", "contrary", "facts", "end")
_COST: Final = ("minutes", "of processor", f"$ as {PRICED_AS}")
_PARTS: Final = ("follow", "contrary", "facts", "ended")


def write(cells: Cells, out: Path) -> None:
    """Write both files."""
    loads: dict[str, list[float]] = {}
    for figures in cells:
        where = f"commit {figures['commit']}, {figures['date']}"
        loads.setdefault(" ".join((where, *figures["flags"])), []).append(figures["load"])
    lines = [
        "# Said once, on a model of 1.5 billion parameters\n",
        *(f"- {len(n)} cells: {where}, load {min(n)} to {max(n)}" for where, n in loads.items()),
        "",
        *report(cells),
        f"\n![first replies accepted by session]({PICTURE})\n",
    ]
    (out / MARKDOWN).write_text("\n".join(lines), encoding="utf-8")
    with picture(out / PICTURE, xlabel="session") as axes:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        for arm, label in _DRAWN.items():
            runs = [figures["firsts"] for figures in cells if figures["arm"] == arm]
            if points := list(_binned(runs)):
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)


def report(cells: Cells) -> Iterator[str]:
    """Yield the lines of the tables."""
    bases = [figures for figures in cells if figures["arm"] == "base"]
    heads = ("the base", "wish", "contrary obeyed", "facts", "replies that end")
    yield from table(heads, chain.from_iterable(map(_base, bases)))
    for base in bases:
        yield f"\n*{base['wish']}*: {WISHES[base['wish']].text}"
    yield ""
    others = [figures for figures in cells if figures["arm"] != "base"]
    yield from table(("", "wish", "seed", *_SESSIONS, *_EXAM, *_COST), map(_cell, others))
    yield ""
    yield from chain.from_iterable(map(_practice, cells))
    yield ""
    heads = ("", "wish", "seeds", "later sessions accepted", "untold exam", "contrary obeyed")
    yield from table(heads, _means(cells))


def _practice(figures: Mapping[str, Any]) -> Iterator[str]:
    for run in figures["practice"]:
        end = "passed" if run["passed"] else f"not kept: {run['because']}"
        yield f"- practised, {figures['wish']}, seed {figures['seed']}: {end}"


def _base(figures: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for name, exam in figures["exams"].items():
        yield f"{figures['wish']}, {name}", *(_of(exam[part]) for part in _PARTS)


def _cell(figures: Mapping[str, Any]) -> Sequence[object]:
    firsts, exams = figures["firsts"], figures["exams"]
    later = firsts[2:] if len(firsts) < 24 else firsts[-16:]
    follow, *others = (_of(exams.get("untold", {}).get(part)) for part in _PARTS)
    return (
        *(figures[name] for name in ("arm", "wish", "seed")),
        *(_of([sum(some), len(some)]) for some in (firsts[:1], firsts[1:2], later)),
        figures["steps"],
        follow,
        _of(exams.get("told", {}).get("follow")),
        *others,
        *(f"{figures[name]:.0f}" for name in ("wall_minutes", "cpu_minutes")),
        f"{figures['usd']:.2f}",
    )


def _means(cells: Cells) -> Iterator[Sequence[object]]:
    """Yield a row for each arm and wish, over its seeds."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for figures in cells:
        groups.setdefault((figures["arm"], figures["wish"]), []).append(figures)
    for whose, some in groups.items():
        later = [first for cell in some for first in cell["firsts"][1:]]
        exams = [cell["exams"].get("untold", {}) for cell in some]
        parts = [
            [exam[part][0] / exam[part][1] for exam in exams if part in exam]
            for part in ("follow", "contrary")
        ]
        shares = (f"{fmean(values):.2f}" if values else "-" for values in (later, *parts))
        yield *whose, len(some), *shares


def _of(pair: Sequence[int] | None) -> str:
    return f"{pair[0]} of {pair[1]}" if pair else "-"


def _binned(runs: Sequence[Sequence[bool]]) -> Iterator[tuple[int, float]]:
    """Yield the share in sessions 1, 2, 3 to 4, 5 to 8, 9 to 16 …, each at its last session."""
    begin, end = 0, 1
    while firsts := [first for run in runs for first in run[begin:end]]:
        yield min(end, max(map(len, runs))), fmean(firsts)
        begin, end = end, 2 * end
