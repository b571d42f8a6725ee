"""How a run goes, from its ledger: what `run.py status` tells beside the gateway's own words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinker_claw.ledger.figures import Figures, read_figures
from tinker_claw.ledger.reading import FILE, reading
from tinker_claw.story.helps import Measure, measures

LAST_STEPS = 5
_TOGETHER = ("side turn", "the teacher could not score it")
"""Reasons that go on with something of the turn's own."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of a data directory, with what they mean."""

    directory: Path
    figures: Figures
    batch_size: int
    untrained: tuple[tuple[str, int], ...]
    """Why turns were not trained, or not yet, and how many; the most frequent first."""
    measures: tuple[Measure, ...]

    @property
    def verdicts(self) -> dict[str, int]:
        seen = self.figures.versions
        good, bad = sum(v.good for v in seen), sum(v.bad for v in seen)
        voted = sum(v.voted for v in seen)
        silent = sum(v.judged for v in seen) - voted
        return {"good": good, "neutral": voted - good - bad, "bad": bad, "none": silent}

    @property
    def queued(self) -> int:
        return self.figures.samples.get("queued", 0)


def read_overview(directory: Path, batch_size: int) -> Overview:
    """The overview of a data directory.

    Raises:
        LedgerError: it holds no ledger, or one that cannot be read.
    """
    with reading(directory / FILE) as ledger, ledger.moment():
        figures = read_figures(ledger, LAST_STEPS)
    return Overview(
        directory=directory,
        figures=figures,
        batch_size=batch_size,
        untrained=tuple(_untrained(figures).most_common()),
        measures=measures(
            [v for v in figures.versions if v.version in figures.live], figures.first_versions
        ),
    )


def _untrained(figures: Figures) -> Counter[str]:
    """Turns without a step, by reason; those that wait are among them."""
    waits = figures.open
    counts = Counter(
        {
            "waits for a next state": waits.next_state,
            "waits for a next state in an idle session": waits.ended,
            "waits for the judge": waits.judge,
            "was judged, waits for the teacher or to be queued": waits.teacher,
            "waits for its step": figures.samples.get("queued", 0),
            "its sample expired": figures.samples.get("expired", 0),
            "its sample was set aside, steps with it failed": figures.samples.get("quarantined", 0),
        }
    )
    for reason, turns in figures.refused.items():
        counts[next((told for told in _TOGETHER if reason.startswith(told)), reason)] += turns
    return +counts


def as_json(overview: Overview) -> dict[str, Any]:
    """For scripts."""
    figures = overview.figures
    return {
        "data_dir": str(overview.directory),
        "run": dict(figures.run),
        "policy_version": figures.version,
        "pinned": figures.pinned,
        "step": figures.step,
        "samples_waiting": overview.queued,
        "batch_size": overview.batch_size,
        "sessions": figures.sessions,
        "private_sessions": figures.private,
        "turns": {"main": figures.main, "side": figures.side},
        "verdicts": overview.verdicts,
        "hints": figures.hints,
        "samples": dict(figures.samples),
        "steps": [_step(asdict(step)) for step in figures.steps],
        "not_trained": dict(overview.untrained),
        "lost_next_states": dict(figures.lost),
        "usd": dict(figures.usd),
        "bills_without_price": figures.unpriced,
        "helps": {
            measure.name.replace(" ", "_"): {
                "meaning": measure.meaning,
                "by_versions": [
                    {**asdict(share), "share": share.value} for share in measure.shares
                ],
            }
            for measure in overview.measures
        },
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    metrics: Mapping[str, Any] = step["metrics"]
    return {**step, "metrics": {k: v for k, v in metrics.items() if k != "rule"}}
