"""TensorBoard: event files in the data directory, which its own viewer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinker_claw.sinks.base import Report, Run


class Opened:
    """A step is one record of the file, so it is there whole or not at all, and nothing but these
    files has to say which steps they have."""

    def __init__(self, run: Run) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        self.last = newest(folder)
        self._writer = EventFileWriter(str(folder))

    def write(self, report: Report) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        # Classes that protobuf makes when it is imported.
        event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        values = [summary.Value(tag=n, simple_value=v) for n, v in report.figures.items()]
        told = summary(value=values)
        self._writer.add_event(event(wall_time=report.finished_at, step=report.step, summary=told))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def newest(folder: Path) -> int:
    """The newest step of a folder's files; 0: there is none. What a kill has cut off counts not."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = folder.glob("events.out.tfevents.*")
    return max(
        (event.step for file in files for event in EventFileLoader(str(file)).Load()), default=0
    )
