"""The command line: settings in, exit status out. Without a command it serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from tinker_claw import config
from tinker_claw.errors import ClawError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or the gateway until it is told to stop; an error is one sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, _ = COMMANDS.get(given[0], (None, "")) if given else (None, "")
    try:
        if command is not None:
            return command(given[1:])
        if {"-h", "--help"} & set(given):
            sys.stdout.write(_commands())
        settings = config.load(given)
        from tinker_claw.serve import serve  # takes seconds: --help and wrong flags need none of it

        asyncio.run(serve(settings))
    except ClawError as error:
        sys.stderr.write(f"tinker-claw: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:  # before serving; from then on Ctrl-C is a signal that serve handles
        return EXIT_INTERRUPTED
    return 0


def _status(arguments: Sequence[str]) -> int:
    from tinker_claw.status import main as status

    return status(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from tinker_claw.serve.doctor import main as doctor

    return doctor(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "doctor": (_doctor, "whether everything is there that run.py with the same flags needs"),
    "status": (_status, "how the gateway that runs is: what is wrong, and what that means"),
}
"""Commands by name: each imports what it needs when it is called, takes what follows its name, and
returns the exit status."""


def _commands() -> str:
    lines = [f"  {name:<10}{told}\n" for name, (_, told) in COMMANDS.items()]
    heading = "commands (run.py COMMAND --help says more); without one, run.py serves:\n"
    return "".join([heading, *lines, "\n"])
