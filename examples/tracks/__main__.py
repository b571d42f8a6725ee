"""`python -m examples.tracks`: let an agent try tasks through the gateway until it does them.

    python -m examples.tracks run configs/tracks/tool-call.toml              train; again: go on
    python -m examples.tracks eval configs/tracks/tool-call.toml --versions 0 12

Exit status: 0 done, 1 something stopped it, 130 Ctrl-C. A run that was stopped or killed goes on
with the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from examples import as_ctrl_c
from examples.tracks import TrackError, cause, report
from examples.tracks.client import connected
from examples.tracks.environments import prepared
from examples.tracks.runner import Run
from examples.tracks.sandbox import sweep
from examples.tracks.state import opened
from examples.tracks.track import Track, read

_SETTINGS = ("url", "model", "concurrency", "group_size", "steps", "groups", "exam_tasks", "seed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or examine a track; returns the exit status."""
    os.umask(0o077)  # what agents write may be private
    options = _parser().parse_args(arguments)
    as_ctrl_c()
    try:
        track = read(options.track, **{name: getattr(options, name) for name in _SETTINGS})
        out = options.out or Path("runs") / f"track-{options.track.stem}"
        asyncio.run(play(track, out, getattr(options, "versions", None)))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (TrackError, ExceptionGroup) as error:
        print(f"Stopped: {cause(error)}", file=sys.stderr)
        return 1
    return 0


async def play(track: Track, out: Path, versions: Sequence[int] | None = None) -> None:
    """Train on a track, or examine these versions of it; the report is written in any case."""
    with opened(out) as state:
        state.begin(track)
        await asyncio.to_thread(sweep)
        async with connected(track) as gateway, prepared(track) as environment:
            run = Run(track, environment, gateway, state, _say)
            try:
                if versions is None:
                    await run.train()
                for version in versions or ():
                    await run.examine(version)
            finally:
                _say(f"report: {report.write(track, state, out)}")


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tracks",
        description="Train an agent on a set of tasks through the gateway, or examine it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    for name, about in (
        ("run", "train; the same command again goes on with a run that was stopped"),
        ("eval", "try the held-out tasks with fixed versions; nothing is trained"),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        add = command.add_argument
        add("track", type=Path, help="a file such as configs/tracks/tool-call.toml")
        add("--out", type=Path, help="folder of the run (default runs/track-NAME)")
        add("--url", help="of the gateway, with /v1")
        add("--model", help="the gateway's name for it")
        add("--concurrency", type=int, help="episodes at a time")
        add("--group-size", type=int, help="episodes of a task")
        add("--steps", type=int, help="policy versions to train")
        add("--groups", type=int, help="tasks to try at most")
        add("--exam-tasks", type=int, help="held-out tasks, tried before and after")
        add("--seed", type=int, help="of the tasks")
        if name == "eval":
            add("--versions", type=int, nargs="+", required=True, help="numbers of versions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
