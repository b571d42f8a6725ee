"""Report of a run, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from examples.tables import Z, table, wilson
from examples.tracks.state import State
from examples.tracks.track import Track

REPORT = "report.md"
_BY_VERSION = """
SELECT began, COUNT(*), AVG(score > 0), AVG(score), AVG(turns), AVG(tokens) FROM (
  SELECT score, MIN(version) AS began, COUNT(*) AS turns, SUM(tokens) AS tokens
  FROM episodes JOIN replies USING (session) WHERE reported GROUP BY session)
GROUP BY began ORDER BY began
"""


def write(track: Track, state: State, folder: Path) -> Path:
    """Write the report into a folder; return its path."""
    path = folder / REPORT
    path.write_text("\n".join(lines(track, state)) + "\n", encoding="utf-8")
    return path


def lines(track: Track, state: State) -> Iterator[str]:
    """Yield the lines of the report."""
    ((episodes, broken, replies),) = state.rows(
        "SELECT COUNT(*), COUNT(*) - COUNT(score), "
        "(SELECT COUNT(*) FROM replies JOIN episodes USING (session)) "
        "FROM episodes WHERE reported"
    )
    first, last = state.fact("first version"), state.fact("last version")
    yield f"# {track.environment}, {track.model}\n"
    if first is not None:
        yield (
            f"{state.groups()} tasks, {track.group_size} tries each: {episodes} episodes, "
            f"{replies} replies. Versions v{first} to v{last or '?'}."
        )
        if broken:
            yield f"{broken} episodes broke, and have no outcome."
    exams = state.rows(
        "SELECT version, COUNT(*), SUM(solved) FROM exams GROUP BY version ORDER BY version"
    )
    if exams:
        yield "\nHeld-out tasks, tried once each:\n"
        yield from table(("version", "tasks", "solved", "95 %"), map(_exam, exams))
    if len(exams) > 1:
        ends = [state.examined(exam[0]) for exam in (exams[0], exams[-1])]
        yield f"\nFrom the first of them to the last: {change(*ends)} (95 %)."
    if by_version := state.rows(_BY_VERSION):
        yield "\nEpisodes, by the version that began them:\n"
        heads = ("version", "episodes", "solved", "outcome", "replies", "tokens")
        yield from table(heads, map(_version, by_version))


def _exam(row: tuple[int, int, int]) -> Sequence[object]:
    version, tasks, solved = row
    low, high = wilson(solved, tasks)
    return f"v{version}", tasks, f"{solved / tasks:.2f}", f"{low:.2f} to {high:.2f}"


def _version(row: tuple[int, int, float, float, float, float]) -> Sequence[object]:
    version, n, solved, score, turns, tokens = row
    cells = (f"{solved:.2f}", f"{score:+z.2f}", f"{turns:.1f}", f"{tokens:.0f}")
    return f"v{version}", n, *cells


def change(before: Mapping[int, bool], after: Mapping[int, bool]) -> str:
    """Mean change of the tasks that both have tried, with its 95 % interval."""
    gains = [after[task] - before[task] for task in before.keys() & after.keys()]
    if len(gains) < 2:
        return "no tasks in common"
    mean, half = fmean(gains), Z * stdev(gains) / sqrt(len(gains))
    return f"{mean:+.2f}, {mean - half:+.2f} to {mean + half:+.2f}"
