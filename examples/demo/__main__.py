"""`tinker-claw demo`: start the product, let a user talk to it, show what it learned.

Exit status: 0 done, 1 the product failed (the end of its log is shown), 2 wrong flags, 130 Ctrl-C.
On a terminal its page stays open at the end, until Ctrl-C.
Rule: before this returns the child has ended and the results so far are written, in any case.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from examples import exit_status
from examples.demo import report, server, view
from examples.demo.conduct import Cast, conduct
from examples.demo.options import Options, parse
from examples.demo.progress import Progress
from examples.demo.scoring import RuleExam
from examples.demo.user import USERS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parse(arguments)
    return exit_status(lambda: asyncio.run(_demo(options, Console())))


async def _demo(options: Options, console: Console) -> None:
    """Run the demo and present its results, once, even where the run was cut short."""
    options.out.mkdir(parents=True, exist_ok=True)
    launch = options.launch
    console.print(f"Starting the server; its log: {launch.log}", soft_wrap=True)
    progress, user, presented = Progress(options), USERS[options.user], False

    def present() -> None:
        nonlocal presented
        progress.ended = progress.ended or time.monotonic()
        if progress.births and not presented:
            presented = True
            _present(progress, console)

    try:
        async with server.running(launch) as child:
            page = f"{child.url}/ui"
            console.print(f"Watch it learn, in a browser: {page}", soft_wrap=True, highlight=False)
            progress.started = time.monotonic()
            exam = RuleExam.draw(user, options.eval_prompts)
            cast = Cast(child.client, [(child.client, user)], exam)
            await conduct(cast, progress, (child.watch, lambda: view.show(progress, console)))
            progress.ended = time.monotonic()
            if sys.stdout.isatty():
                present()
                _invite(page, launch, console)
                with suppress(asyncio.CancelledError):
                    await child.watch()
    finally:
        present()


def commands(launch: server.Launch) -> list[str]:
    """Return command lines that look at the run while its server stays."""
    folder = shlex.quote(str(launch.data))
    return [
        f"tinker-claw log turns --kind main --data-dir {folder}   # each turn",
        f"tinker-claw versions --data-dir {folder}   # steps, and the way back",
    ]


def _invite(page: str, launch: server.Launch, console: Console) -> None:
    """Say what there is to see while the server stays."""
    for text in (
        f"\nIts page stays open until Ctrl-C: {page}",
        "In another terminal, here:",
        *(f"    .venv/bin/{command}" for command in commands(launch)),
        "Your own agent next: .venv/bin/tinker-claw asks a few questions and starts.",
    ):
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def _present(progress: Progress, console: Console) -> None:
    paths = report.write(progress) | {"log": progress.options.launch.log}
    console.print(report.table(progress) if progress.scores else "No version was scored.")
    console.print(
        f"{progress.sessions} sessions, {progress.version} steps, {progress.seconds:.0f} seconds.",
        highlight=False,
    )
    for what, path in paths.items():
        console.print(f"{what:>8}  {path}", soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
