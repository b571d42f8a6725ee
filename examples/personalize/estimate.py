"""Estimate the time and cost of runs before they start.

Rule: times measured in this folder go before the constants here; what is not known is reported as
unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.personalize.controls import TOLD
from examples.personalize.experiment import Experiment, Run
from examples.personalize.run import written
from tinker_claw.billing.estimate import forecast
from tinker_claw.billing.prices import price_in_force, unknown
from tinker_claw.config.load import load
from tinker_claw.config.settings import Settings

DEMO_STEP_S = 3.0
"""Seconds per step of the demo's model, exams included, on two free cores."""
DEMO_START_S = 10.0
TURNS = 3
"""Mean number of replies in a session, over a run of the demo's user."""


def lines(experiment: Experiment, out: Path, missing: Sequence[Run]) -> Iterator[str]:
    """Lines on the expected time and cost of the runs that are missing."""
    found = load(["--config", str(experiment.config), *experiment.flags])
    there = len(experiment.runs()) - len(missing)
    yield f"{len(missing)} runs, {there} are there already; about {left(experiment, out, missing)}."
    learning = [run for run in missing if run.condition != TOLD]
    steps = sum(experiment.steps * len(experiment.cast(run)) for run in learning)
    if found.run.backend == "tinker":
        yield _bill(found, steps)
    played = [run for run in learning if any(s.persona for s in experiment.cast(run).values())]
    if played:
        talks = sum(experiment.sessions * len(experiment.cast(run)) for run in played)
        yield (
            f"The model that plays the users is asked some {talks * TURNS} times, for at least "
            f"{talks} sessions; each time it reads a whole conversation."
        )
    scored = [
        run for run in missing if any(s.scored == "model" for s in experiment.cast(run).values())
    ]
    if scored:
        exams = sum(experiment.steps // 4 + 3 for _ in scored)
        yield f"The model that scores is asked some {exams * experiment.questions} times."


def left(experiment: Experiment, out: Path, missing: Sequence[Run]) -> str:
    """Time that these runs will take, in words."""
    done = [one for run in experiment.runs() if (one := written(out, run)) is not None]
    whole = [one for one in done if one["learner"] != "held"]  # few steps tell little of a rate
    rates = [rate for one in whole if (rate := _seconds_a_step(one)) is not None]
    step = fmean(rates) if rates else None
    if step is None and experiment.served == "demo":
        step = DEMO_STEP_S
    if step is None:
        return "a time that is not known before a run has learned to its end"
    seconds = sum(
        DEMO_START_S
        + (0 if run.condition == TOLD else step * experiment.steps * len(experiment.cast(run)))
        for run in missing
    )
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _seconds_a_step(found: dict[str, Any]) -> float | None:
    steps = max((point["step"] for point in found["curve"]), default=0)
    return found["seconds"] / steps if steps else None


def _bill(found: Settings, steps: int) -> str:
    price = price_in_force(found)
    told = forecast(found, price)
    if told.step_usd is None or told.serve_usd is None:
        return f"No dollars: {unknown(found, price)}."
    return (
        f"{steps} steps at about ${told.step_usd:.2f} each, and ${told.serve_usd:.2f} for serving "
        f"the turns behind it: ${steps * (told.step_usd + told.serve_usd):.0f} in all, without the "
        f"exams. It rests on {told.words}"
    )
