"""Report of a run, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev

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


def lines(track: Track, state: State) -> list[str]:
    ((episodes, broken, replies),) = state.rows(
        "SELECT COUNT(*), COUNT(*) - COUNT(score), "
        "(SELECT COUNT(*) FROM replies JOIN episodes USING (session)) "
        "FROM episodes WHERE reported"
    )
    first, last = state.fact("first version"), state.fact("last version")
    lines = [f"# {track.environment}, {track.model}", ""]
    if first is not None:
        lines += [
            f"{state.groups()} tasks, {track.group_size} tries each: {episodes} episodes, "
            f"{replies} replies. Versions v{first} to v{last or '?'}.",
            *([f"{broken} episodes broke, and have no outcome."] if broken else []),
            "",
        ]
    if exams := state.rows(
        "SELECT version, COUNT(*), SUM(solved) FROM exams GROUP BY version ORDER BY version"
    ):
        lines += ["Held-out tasks, tried once each:", "", "| version | tasks | solved | 95 % |"]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| v{version} | {tasks} | {solved / tasks:.2f} | {interval(solved, tasks)} |"
            for version, tasks, solved in exams
        ]
        lines += [""]
        if len(exams) > 1:
            ends = [state.examined(exam[0]) for exam in (exams[0], exams[-1])]
            lines += [f"From the first of them to the last: {change(*ends)} (95 %).", ""]
    if by_version := state.rows(_BY_VERSION):
        lines += [
            "Episodes, by the version that began them:",
            "",
            "| version | episodes | solved | outcome | replies | tokens |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| v{version} | {n} | {solved:.2f} | {score:+z.2f} | {turns:.1f} | {tokens:.0f} |"
            for version, n, solved, score, turns, tokens in by_version
        ]
    return lines


def interval(good: int, of: int) -> str:
    """Wilson's 95 % interval of a share."""
    share, z = good / of, NormalDist().inv_cdf(0.975)
    middle, half = share + z * z / (2 * of), z * sqrt((share * (1 - share) + z * z / (4 * of)) / of)
    low, high = ((middle + side) / (1 + z * z / of) for side in (-half, half))
    return f"{low:.2f} to {high:.2f}"


def change(before: Mapping[int, bool], after: Mapping[int, bool]) -> str:
    """Mean change of the tasks that both have tried, with its 95 % interval."""
    gains = [after[task] - before[task] for task in before.keys() & after.keys()]
    if len(gains) < 2:
        return "no tasks in common"
    mean, half = fmean(gains), NormalDist().inv_cdf(0.975) * stdev(gains) / sqrt(len(gains))
    return f"{mean:+.2f}, {mean - half:+.2f} to {mean + half:+.2f}"
