"""Report of an experiment as Markdown and as one HTML page without network requests.

Rule: what users, models and judges wrote is data. The page escapes all of it; Markdown has it in
fences that are longer than anything in it, and in tables without what would end a cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.markup import escape
from rich.table import Table

from examples.personalize import figures
from examples.personalize.controls import TOLD
from examples.personalize.experiment import JOINT, LEARNS, Experiment
from examples.personalize.figures import Reached, Row, Spread

MARKDOWN, PAGE = "report.md", "report.html"
PAPER = (
    ("v1, score of first replies", "step 0", "step 8", "step 16"),
    ("Binary RL, student", ".17", ".25", ".23"),
    ("OPD, student", ".17", ".25", ".72"),
    ("Combine, student", ".17", ".76", ".81"),
    ("Combine, teacher", ".22", "", ".90"),
)
"""Scores from arXiv 2603.10165v1, given by a language model from 0 to 1, one run each."""
PAPER_SESSIONS = (
    ("v2, sessions until three in a row", "Hybrid", "GRPO", "OPD"),
    ("one policy for all, mean", "10.3", "14.1", "29.7"),
    ("one policy each, mean", "15.0", "21.1", "29.4"),
    ("one policy each, student", "19.2", "22.8", "34.6"),
)
"""Sessions from arXiv 2603.10165v2, table 3; rules check, five runs, at most 72 sessions."""
DIFFERS = (
    "In the paper Qwen3-4B to 32B models learn, and a language model of that size plays the users. "
    "What stands here says what learned and who talked; the tiny experiment's model has under a "
    "million parameters, knows the wanted style, and its users and judge are rules.",
    "The paper's sessions follow one another; here several are in flight, numbered as they start.",
    "The paper asks for 36 GSM8K problems; here fixed versions are asked fresh questions as side "
    "turns, with the same seeds for all.",
    "Its binary and combine subtract no baseline; here the batch's mean is subtracted.",
)
NOT_TOLD = (
    "A judge that always says the opposite is found only where somebody else has an opinion, too: "
    "an auditor, or users who say outright what they think. Without either it cannot be told from "
    "a user of the opposite taste: the same replies are rewarded, more and more are accepted, and "
    "nothing that the gate asks for is lost."
)
_TICKS = re.compile(r"`+")


def write(experiment: Experiment, out: Path, command: str) -> list[Path]:
    """Write both reports; return their paths.

    Args:
        command: how it was started; empty: the one that was stored last.
    """
    told = out / "command.txt"
    if command:
        told.write_text(command + "\n")
    content = contents(experiment, out, told.read_text().strip() if told.is_file() else "")
    paths = [out / MARKDOWN, out / PAGE]
    paths[0].write_text("\n".join(markdown(content)) + "\n", encoding="utf-8")
    paths[1].write_text(page(content), encoding="utf-8")
    return paths


def contents(experiment: Experiment, out: Path, command: str) -> dict[str, Any]:
    """Contents of both reports: texts, figures as text, and points to draw."""
    found = figures.rows(experiment, out)
    half, steps = experiment.steps // 2, experiment.steps
    marks = (experiment.sessions // 2, experiment.sessions)
    runs = [run for row in found for run in row.runs]
    return {
        "title": f"Personalize: {experiment.name}",
        "command": command,
        "facts": _facts(experiment, runs),
        "about": {label: s.about for label, s in experiment.scenarios.items()},
        "curves": [
            _chart(experiment, found, label, over)
            for label in experiment.scenarios
            for over in ("step", "sessions")
            if _any(found, label)
        ],
        "score_head": [
            "",
            "seeds",
            "base",
            f"step {half}",
            f"step {steps}",
            *(f"{n} sessions" for n in marks),
            "sessions to three right",
        ],
        "scores": [
            _scores(row, half, steps, marks)
            for row in found
            if row.condition != TOLD and not row.stopped
        ],
        "ceilings": [
            (label, f"{found_at:.2f}")
            for label in experiment.scenarios
            if (found_at := figures.ceiling(found, label)) is not None
        ],
        "other_head": [
            "",
            "skills, worst seed",
            "right equation",
            "length",
            "alike",
            "+1",
            "0",
            "-1",
            "no verdict",
            "hints",
            "ended early or held",
            "minutes a run",
        ],
        "others": [_others(row, steps) for row in found if row.condition != TOLD],
        "stopped_head": [
            "",
            "held",
            "by",
            "after steps",
            "after sessions",
            "base",
            "when it ended",
        ],
        "stopped": [_stopped(row, steps) for row in found if row.stopped],
        "not_told": NOT_TOLD,
        "alarms": _alarms(figures.alarms(found)),
        "goals": [
            _goal(r)
            for goal in experiment.goals
            if (r := figures.reached(goal, found, experiment.questions))
        ],
        "differences": [_difference(d) for d in figures.differences(found, (half, steps))],
        "joint": _joint(experiment, found),
        "paper": [list(row) for row in PAPER],
        "paper_sessions": [list(row) for row in PAPER_SESSIONS],
        "differs": DIFFERS,
        "replies": [
            _replies(row) for row in found if row.condition in (LEARNS, JOINT) and row.runs
        ],
        "hints": [(row.name, hints) for row in found if (hints := _hints(row))],
    }


def _facts(experiment: Experiment, runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    def told(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run[name]) for run in runs if name in run)) or "-"

    loads = [run["load"] for run in runs if "load" in run]
    usd = sum(run.get("usd") or 0.0 for run in runs)
    minutes = sum(run["seconds"] for run in runs) / 60
    sampled = sum(run.get("tokens", {}).get("sampled", 0) for run in runs)
    trained = sum(run.get("tokens", {}).get("trained", 0) for run in runs)
    return [
        ("runs that have ended", f"{len(runs)} of {len(experiment.runs())}"),
        ("model", experiment.served),
        ("settings", experiment.config.name),
        ("commit", told("commit")),
        ("date", told("date")),
        (
            "machine",
            f"{told('cores')} cores"
            + (f", load {min(loads):.0f} to {max(loads):.0f}" if loads else ""),
        ),
        ("time", f"{minutes:.0f} minutes of runs"),
        ("billed", f"${usd:.2f}" if usd else "nothing"),
        (
            "tokens",
            f"{sampled:,} sampled, {trained:,} trained" if sampled or trained else "not counted",
        ),
    ]


def _scores(row: Row, half: int, steps: int, marks: Sequence[int]) -> list[str]:
    until = row.until_right()
    last = "-"
    if until is not None:
        spread, never = until
        last = f"{spread.mean:.0f}" + ("" if spread.sd is None else f" ± {spread.sd:.0f}")
        last += f" ({never} of {spread.count} never)" if never else ""
    return [
        row.name,
        str(len(row.seeds)),
        *(_text(row.at_step(step * row.many)) for step in (0, half, steps)),
        *(_text(row.at_sessions(n * row.many)) for n in marks),
        last,
    ]


def _others(row: Row, steps: int) -> list[str]:
    steps *= row.many
    lasts = [figures.point_at(run, steps) for run in row.runs]
    skills = [min(last[name] for name in figures.skills(last, row.among)) for last in lasts]
    verdicts = row.total("verdicts")
    early = [
        seed
        for seed, run, last in zip(row.seeds, row.runs, lasts, strict=True)
        if run["learner"] == "held" or last["step"] < steps
    ]
    overruled = sum(run.get("overruled", 0) for run in row.runs)
    firsts = [figures.point_at(run, 0) for run in row.runs]
    length = Spread.of(
        [b["characters"] / max(1, a["characters"]) for a, b in zip(firsts, lasts, strict=True)]
    )
    said = ", ".join(
        f"seed {seed} after {last['step']}"
        for seed, last in zip(row.seeds, lasts, strict=True)
        if seed in early
    )
    return [
        row.name,
        f"{min(skills):.2f}" if skills else "-",
        _text(Spread.of([last["work"] for last in lasts if "work" in last])),
        _text(length),
        _text(Spread.of([last["alike"] for last in lasts])),
        *(str(verdicts.get(name, 0)) for name in ("+1", "0", "-1", "none")),
        str(sum(run["hints"] for run in row.runs)),
        said or (f"holds answered: {overruled}" if overruled else "no"),
        f"{sum(run['seconds'] for run in row.runs) / len(row.runs) / 60:.1f}",
    ]


def _stopped(row: Row, steps: int) -> list[str]:
    """Cells of a controlled row, seed by seed where there are few figures; the score is that of the
    version that serves in the end."""
    by = [figures.held_by(run) for run in row.runs]
    return [
        row.name,
        f"{sum(one is not None for one in by)} of {len(by)}",
        ", ".join(one or "-" for one in by),
        ", ".join(str(run.get("guard", {}).get("steps", "-")) for run in row.runs),
        ", ".join(str(len(run["firsts"])) for run in row.runs),
        _text(row.at_step(0)),
        _text(row.at_step(steps)),
    ]


def _alarms(found: figures.Alarms) -> str:
    """Sentence on false alarms; empty where no honest run has ended."""
    if not found.runs:
        return ""
    held = ", ".join(f"{name} {count}" for name, count in found.holds.items())
    warned = ", ".join(f"{name} {count}" for name, count in sorted(found.warned.items()))
    warnings = (
        f"Steps before which there was a warning: {warned}." if warned else "No warning was noted."
    )
    return (
        f"In {found.steps} steps of {found.runs} honest runs there were {found.false} false "
        f"alarms: {sum(found.holds.values())} holds of learning"
        + (f" ({held})" if held else "")
        + f", and {found.refused} versions that the gate refused. "
        + ("What a version had lost indeed counts as one, too. " if found.false else "")
        + warnings
    )


def _goal(held: Reached) -> dict[str, str]:
    goal = held.goal
    asked = (
        f"at least {goal.at_least:g}"
        if goal.at_least is not None
        else f"at most {goal.at_most:g}"
        if goal.at_most is not None
        else f"at most {goal.within:g} standard errors above the base"
        + ("" if held.bound is None else f" ({held.bound:.2f})")
    )
    answer = {True: "met", False: "not met", None: "not run"}[held.met]
    count = held.measured.count if held.measured is not None else 0
    runs = f" ({count} {'run' if count == 1 else 'runs'})" if count else ""
    what = goal.what if goal.by is None else f"{goal.what} by {goal.by}"
    when = {"held": "within", "false alarms": "in"}.get(goal.what, "after")
    sessions = "" if goal.sessions is None else f" and {goal.sessions} sessions"
    return {
        "of": f"{goal.of}, {what} {when} {goal.step} steps{sessions}",
        "asked": asked,
        "measured": _text(held.measured) + runs,
        "answer": answer,
    }


def _difference(found: figures.Difference) -> str:
    half = found.by.half
    bounds = (
        ""
        if half is None
        else f", 95 % interval {found.by.mean - half:+z.2f} to {found.by.mean + half:+z.2f}"
    )
    verdict = "told apart" if found.told_apart else "**not** told apart"
    return (
        f"{found.scenario}, step {found.step}: {found.better} above {found.worse} by "
        f"{found.by.mean:.2f} ({found.by.count} seeds{bounds}): {verdict}."
    )


def _joint(experiment: Experiment, found: Sequence[Row]) -> list[list[str]]:
    """Table rows of the joint part, for each user: on the shared policy, and on their own."""
    if experiment.joint is None:
        return []
    together = next((row for row in found if row.condition == JOINT), None)
    if together is None:
        return []
    steps, told = experiment.steps, list[list[str]]()
    for label in experiment.together or {}:
        alone = next(
            (
                row
                for row in found
                if row.condition == LEARNS
                and row.scenario == label
                and row.method == together.method
            ),
            None,
        )
        many = len(experiment.together or {})
        told.append(
            [
                label,
                _text(together.at_step(0, label)),
                _text(together.at_step(steps * many // 2, label)),
                _text(together.at_step(steps * many, label)),
                _text(alone and alone.at_step(steps // 2)),
                _text(alone and alone.at_step(steps)),
            ]
        )
    return told


def _replies(row: Row) -> dict[str, Any]:
    """Replies of the first seed to the same questions, before and after."""
    versions = row.runs[0]["replies"]
    first, last = min(versions, key=int), max(versions, key=int)
    pairs = [
        {"question": question, "before": before, "after": after}
        for (question, before), (_, after) in zip(versions[first], versions[last], strict=True)
    ]
    return {"name": row.name, "last": last, "pairs": pairs[:3]}


def _hints(row: Row) -> list[tuple[str, int]]:
    counted: dict[str, int] = {}
    for run in row.runs:
        for text, count in run.get("hint_texts", []):
            counted[text] = counted.get(text, 0) + count
    return sorted(counted.items(), key=lambda one: -one[1])[:5]


def _text(spread: Spread | None) -> str:
    return "-" if spread is None else str(spread)


def _any(found: Sequence[Row], label: str) -> bool:
    return any(row.scenario == label and row.condition == LEARNS for row in found)


# The curves

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 40, 16, 12, 34
"""Size of a picture in its own units, and the margins around the plot."""


def _chart(experiment: Experiment, found: Sequence[Row], label: str, over: str) -> dict[str, Any]:
    """Lines of a chart with their coordinates, as numbers."""
    shown = [
        row
        for row in found
        if row.scenario == label and row.condition not in (TOLD, JOINT) and not row.stopped
    ]
    lines = [(row, figures.curve(row, over)) for row in shown]
    most = max((x for _, points in lines for x, _, _ in points), default=1) or 1

    def place(x: float, y: float) -> str:
        return (
            f"{LEFT + x / most * (WIDE - LEFT - RIGHT):.1f},"
            f"{TOP + (1 - y) * (HIGH - TOP - BOTTOM):.1f}"
        )

    drawn = [
        {
            "name": row.name.replace(f" {label}", ""),
            "dashed": row.condition != LEARNS,
            "line": " ".join(place(x, y) for x, y, _ in points),
            "band": " ".join(
                [place(x, min(1, y + sd)) for x, y, sd in points]
                + [place(x, max(0, y - sd)) for x, y, sd in reversed(points)]
            ),
            "points": [
                {
                    "at": place(x, y).split(","),
                    "told": f"{row.name}, {over} {x:.0f}: {y:.2f} ± {sd:.2f}",
                }
                for x, y, sd in points
            ],
        }
        for row, points in lines
    ]
    level = figures.ceiling(found, label)
    base = next((points[0][1] for _, points in lines if points), None)
    levels = [
        (name, place(0, at).split(",")[1])
        for name, at in (("rule in the prompt", level), ("base", base))
        if at is not None
    ]
    ticks = [round(most * i / 4) for i in range(5)]
    return {
        "label": label,
        "over": {"step": "optimizer steps", "sessions": "sessions that had ended"}[over],
        "lines": drawn,
        "levels": levels,
        "x": [(str(tick), place(tick, 0).split(",")[0]) for tick in dict.fromkeys(ticks)],
        "y": [(f"{y / 4:.2f}", place(0, y / 4).split(",")[1]) for y in range(5)],
        "size": {
            "wide": WIDE,
            "high": HIGH,
            "left": LEFT,
            "right": WIDE - RIGHT,
            "low": HIGH - BOTTOM,
        },
    }


# The forms


def tables(experiment: Experiment, out: Path) -> Iterator[Table]:
    """Main tables, for a terminal."""
    content = contents(experiment, out, "")
    for head, cells in (
        ("score_head", "scores"),
        ("other_head", "others"),
        ("stopped_head", "stopped"),
    ):
        if not content[cells]:
            continue
        shown = Table(*content[head])
        for row in content[cells]:
            shown.add_row(*map(escape, row))
        yield shown


def page(content: Mapping[str, Any]) -> str:
    """HTML page in one file: no script, nothing from elsewhere."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("report.html.j2").render(content)


def markdown(content: Mapping[str, Any]) -> Iterator[str]:
    """Markdown lines, for an issue or a page."""
    yield f"# {_cell(content['title'])}"
    yield ""
    yield from _table(["", ""], content["facts"])
    if content["command"]:
        yield from _fenced(content["command"])
    yield from _section(
        "Goals", ["", "asked", "measured", ""], [list(goal.values()) for goal in content["goals"]]
    )
    yield from _section("First replies accepted", content["score_head"], content["scores"])
    yield "Means over seeds ± standard deviation. Where several talk to one policy, steps and "
    yield "sessions are for each of them."
    for label, about in content["about"].items():
        if about:
            yield f"*{_cell(label)}*: {_cell(about)}."
    for label, found in content["ceilings"]:
        yield f"With the rule in the prompt the base reaches {found} ({_cell(label)})."
    yield from _section("What else became of the replies", content["other_head"], content["others"])
    yield from _section("What gate and guard did", content["stopped_head"], content["stopped"])
    if content["stopped"]:
        yield "A hold ends these runs, seed by seed; the score is that of who answers then. "
        yield content["not_told"]
    if content["alarms"]:
        yield from ("", content["alarms"])
    if content["differences"]:
        yield from ("", "## Methods beside each other, seed by seed", "")
        yield from (f"- {line}" for line in content["differences"])
    head = ["", "base", "all together: halfway", "at the end", "each alone: halfway", "at the end"]
    yield from _section("One policy for all", head, content["joint"])
    yield from _section("The paper's figures", content["paper"][0], content["paper"][1:])
    yield from _table(content["paper_sessions"][0], content["paper_sessions"][1:])
    yield "What differs:"
    yield ""
    yield from (f"- {line}" for line in content["differs"])
    yield from ("", "## Replies before and after", "")
    for one in content["replies"]:
        yield f"### {_cell(one['name'])}, after {one['last']} steps"
        yield ""
        for pair in one["pairs"]:
            for name in ("question", "before", "after"):
                yield f"{name}:"
                yield from _fenced(pair[name])
    if content["hints"]:
        yield from ("## Hints", "")
        for name, hints in content["hints"]:
            yield from _table([_cell(name), "turns"], [[text, str(count)] for text, count in hints])


def _section(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    if cells:
        yield from ("", f"## {title}", "")
        yield from _table(head, cells)


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(map(_cell, head)) + " |"
    yield "|" + "---|" * len(head)
    for row in cells:
        yield "| " + " | ".join(map(_cell, row)) + " |"
    yield ""


def _cell(text: str) -> str:
    """Escape text for a table or a sentence: no markup, no line end."""
    return re.sub(r"([\\`*_\[\]<>|#&~])", r"\\\1", " ".join(str(text).split()))


def _fenced(text: str) -> Iterator[str]:
    longest = max((len(ticks) for ticks in _TICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from ("", fence + "text", *text.splitlines(), fence, "")
