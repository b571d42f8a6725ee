"""MLflow. Its own variables name the server (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME ...).

Rule: the library's own telemetry to its makers is switched off.
"""

# Where the package is not installed, pyright takes this file for it.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import os

from tinker_claw.sinks.base import PROJECT, Report, Run

_RUN = "tinker_claw.run"


class Opened:
    """One MLflow run for each of ours, found again by its tag."""

    def __init__(self, run: Run) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, self._client = Metric, MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, run_name=run.name, tags={_RUN: run.id})
            self._id = made.info.run_id
        for key, value in run.config.items():  # idempotent
            self._client.log_param(self._id, key, value)

    def write(self, report: Report) -> None:
        at = round(report.finished_at * 1000)
        figures = report.figures.items()
        metrics = [self._metric(name, value, at, report.step) for name, value in figures]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.update_run(self._id, status="FINISHED")
