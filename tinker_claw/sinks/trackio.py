"""trackio: a local database, or the Space or server in its own variables (TRACKIO_DIR,
TRACKIO_SPACE_ID, TRACKIO_SERVER_URL ...)."""

# Where the package is not installed, pyright takes this file for it.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import os
import time

from tinker_claw.sinks.base import PROJECT, Report, Run

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_LOOK_S = 0.05


class Opened:
    """One trackio run for each of ours, continued after a restart."""

    def __init__(self, run: Run) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._database, self._name = SQLiteStorage, f"{run.name}-{run.id[:6]}"
        self._run = trackio.init(
            PROJECT,
            name=self._name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._here = not any(map(os.environ.get, _ELSEWHERE))

    def write(self, report: Report) -> None:
        self._run.log(dict(report.figures), step=report.step)
        # A thread of trackio's writes it, and does not report failures.
        kept = self._database.get_max_step_for_run
        while self._here and (kept(PROJECT, self._name) or 0) < report.step:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        self._run.finish()
