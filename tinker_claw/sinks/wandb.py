"""Weights & Biases. Its own variables name the server (WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE
...).

Rule: automatic collection by the library (console, code, git, machine, command line, its own
errors) is switched off.
"""

# Where the package is not installed, pyright takes this file for it.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import os

from tinker_claw.sinks.base import PROJECT, Report, TrackedRun

PACKAGE = "wandb>=0.23"


class WandbRun:
    """One W&B run for each of ours, continued after a restart."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            id=run.id,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )

    def write(self, report: Report) -> None:
        self._run.log(dict(report.figures), step=report.step, commit=True)

    def close(self) -> None:
        self._run.finish()


SINK = WandbRun
