"""TensorBoard: event files in the data directory, for its own viewer."""

from __future__ import annotations

from typing import Any

from tinker_claw.sinks.base import Report, TrackedRun

PACKAGE = "tensorboard>=2.20"


class TensorBoardRun:
    """Event file in which a step is one record, written whole or not at all."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))

    def write(self, report: Report) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        # Classes that protobuf makes when it is imported.
        event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        values = [summary.Value(tag=n, simple_value=v) for n, v in report.figures.items()]
        self._writer.add_event(
            event(wall_time=report.finished_at, step=report.step, summary=summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


SINK = TensorBoardRun
