"""Figures of steps in a CSV file, without any package."""

from __future__ import annotations

import csv

from tinker_claw.sinks.base import Report, TrackedRun


class CsvFile:
    """A row a figure: step, name, value."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.folder / "steps.csv").open("a", newline="")

    def write(self, report: Report) -> None:
        rows = ((report.step, name, value) for name, value in report.figures.items())
        csv.writer(self._file).writerows(rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()
