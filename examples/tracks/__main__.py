"""`python -m examples.tracks`: let an agent try tasks through the gateway until it does them.

    python -m examples.tracks run configs/tracks/tool-call.toml              train; again: go on
    python -m examples.tracks eval configs/tracks/tool-call.toml --versions 0 12

Exit status: 0 done, 1 something stopped it, 130 Ctrl-C. A run that was stopped or killed goes on
with the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from examples import exit_status, say
from examples.tracks import report
from examples.tracks.client import connected
from examples.tracks.environments import prepared
from examples.tracks.runner import Run
from examples.tracks.sandbox import sweep
from examples.tracks.state import opened
from examples.tracks.track import Track, read

_TEXTS = {"url": "of the gateway, with /v1", "model": "the gateway's name for it"}
_NUMBERS = {
    "concurrency": "episodes at a time",
    "group_size": "episodes of a task",
    "steps": "policy versions to train",
    "groups": "tasks to try at most",
    "exam_tasks": "held-out tasks, tried before and after",
    "seed": "of the tasks",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or examine a track; returns the exit status."""
    options = _parser().parse_args(arguments)
    out = options.out or Path("runs") / f"track-{options.track.stem}"

    def run() -> None:
        settings = {name: getattr(options, name) for name in (*_TEXTS, *_NUMBERS)}
        asyncio.run(play(read(options.track, **settings), out, options.versions))

    return exit_status(run)


async def play(track: Track, out: Path, versions: Sequence[int] | None = None) -> None:
    """Train on a track, or examine these versions of it; the report is written in any case."""
    with opened(out) as state:
        state.begin(track)
        await asyncio.to_thread(sweep)
        async with connected(track) as gateway, prepared(track) as environment:
            run = Run(track, environment, gateway, state, say)
            try:
                if versions is None:
                    await run.train()
                for version in versions or ():
                    await run.examine(version)
            finally:
                say(f"report: {report.write(track, state, out)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tracks",
        description="Train an agent on a set of tasks through the gateway, or examine it.",
        allow_abbrev=False,
    )
    parser.set_defaults(versions=None)
    commands = parser.add_subparsers(required=True)
    for command, about in (
        ("run", "train; the same command again goes on with a run that was stopped"),
        ("eval", "try the held-out tasks with fixed versions; nothing is trained"),
    ):
        add = commands.add_parser(
            command, help=about, description=about, allow_abbrev=False
        ).add_argument
        add("track", type=Path, help="a file such as configs/tracks/tool-call.toml")
        add("--out", type=Path, help="folder of the run (default runs/track-NAME)")
        for names, kind in ((_TEXTS, str), (_NUMBERS, int)):
            for name, meaning in names.items():
                add(f"--{name.replace('_', '-')}", type=kind, help=meaning)
        if command == "eval":
            add("--versions", type=int, nargs="+", required=True, help="numbers of versions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
