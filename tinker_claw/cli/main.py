"""Command-line entry point. Without a command it runs the gateway.

Rule: a command is a function of its name, imported when it is called; it takes its own flags and
those of tinker-claw.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from tinker_claw import __version__
from tinker_claw.cli import start
from tinker_claw.cli.common import FlagsCommand, note
from tinker_claw.config.load import CONFIG, load_given, names_run, settings_file
from tinker_claw.errors import EXIT_INTERRUPTED, ClawError
from tinker_claw.files import for_owner_only

PURPOSE = "Serve a model to your agent, and let it learn from how the agent is used."
COMMON = (
    "__config",
    "run__model_name",
    "run__backend",
    "run__method",
    "gateway__port",
    "spend__budget_usd",
)
"""Settings that most users set: with more, the help would not fit a screen."""
EXIT_USAGE = 2


COMMANDS = {
    "demo": ("set up", "start"),
    "doctor": ("set up", "doctor"),
    "openclaw-config": ("set up", "openclaw"),
    "carry": ("set up", "carry"),
    "status": ("look", "status"),
    "log": ("look", "log"),
    "explain": ("look", "explain"),
    "lessons": ("look", "lessons"),
    "versions": ("look", "versions"),
    "pin": ("undo", "versions"),
    "unpin": ("undo", "versions"),
    "rollback": ("undo", "versions"),
    "accept": ("undo", "versions"),
    "forget": ("undo", "forget"),
    "rejudge": ("undo", "forget"),
    "export": ("take home", "export"),
}
"""Group of each command, and the module with the function of that name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or the gateway until it is told to stop; an error is one sentence."""
    for_owner_only()
    try:
        return Program().main(arguments, "tinker-claw", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tinker-claw"
        message = " ".join(error.format_message().split())  # choices stand on lines of their own
        note(f"{message} ({path} --help says more)")
    except ClawError as error:
        note(str(error))
    except (KeyboardInterrupt, click.Abort):  # of a command
        return EXIT_INTERRUPTED
    return EXIT_USAGE


def end_at_once() -> None:
    """End the process at Ctrl-C or SIGTERM, until `Stop` of app/server.py takes over.

    Nothing is open yet. A KeyboardInterrupt could be lost: libraries swallow one that comes while
    they are imported, and Python one that comes in a destructor.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))


def serve(parsed: Mapping[str, Any]) -> int:
    """Run the gateway; this is tinker-claw without a command."""
    end_at_once()
    settings = load_given(parsed)
    import asyncio
    import atexit  # takes seconds with what follows: --help and wrong flags need none of it

    from tinker_claw.app.main import serve

    # The alarm of a stop is for what hangs, not for Python's own slow exit after it.
    atexit.register(signal.alarm, 0)
    asyncio.run(serve(settings))
    return 0


# tinker-claw and its commands, as click has them


class Program(FlagsCommand, click.Group):
    """tinker-claw: serves, or runs a command."""

    visible_flags = COMMON

    def __init__(self) -> None:
        super().__init__(
            "tinker-claw",
            help=PURPOSE,
            options_metavar="[flags]",
            subcommand_metavar="[COMMAND]",
            invoke_without_command=True,
            callback=self._without_command,
        )
        click.version_option(__version__, message="%(prog)s %(version)s")(self)

    def invoke(self, ctx: click.Context) -> int:
        return click.Group.invoke(self, ctx)

    def _without_command(self, **parsed: Any) -> int:
        if click.get_current_context().invoked_subcommand is not None:
            return 0
        file = settings_file(parsed)
        if file is None and start.can_ask() and not names_run(parsed):
            return start.begin(lambda: serve(parsed))
        if file is not None and not parsed.get(CONFIG):
            note(f"the settings are those of {file} (delete it to be asked again).")
        return serve(parsed)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"tinker_claw.cli.{COMMANDS[cmd_name][1]}")
        return getattr(module, cmd_name.replace("-", "_"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = dict.fromkeys(group for group, _ in COMMANDS.values())
        rows = [(g, ", ".join(n for n, (of, _) in COMMANDS.items() if of == g)) for g in groups]
        with formatter.section("commands (COMMAND --help says more; without one it serves)"):
            formatter.write_dl(rows)
