"""Command-line entry point. Without a command it runs the gateway.

Rule: a command is a class, imported when it is called; its fields are its flags, beside those of
tinker-claw.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import getdoc
from typing import Any

import click
from click.shell_completion import shell_complete

from tinker_claw import __version__
from tinker_claw.cli import start
from tinker_claw.cli.common import Command, note
from tinker_claw.config.flags import parameters
from tinker_claw.config.load import CONFIG, ELSEWHERE, flags, load_given, names_run, settings_file
from tinker_claw.errors import ClawError
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
"""Settings that most users set: --help shows these, --help-all every flag."""
_COMPLETES = "_TINKER_CLAW_COMPLETE"
"""Variable by which a shell asks for completions, as click has it."""
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""Exit status that the shell reports for SIGPIPE."""


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
"""Group of each command, and the module with the class of that name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or the gateway until it is told to stop; an error is one sentence."""
    for_owner_only()
    program = Program()
    if shell := os.environ.get(_COMPLETES):
        return shell_complete(program, {}, "tinker-claw", _COMPLETES, shell)
    try:
        typed = list(sys.argv[1:] if arguments is None else arguments)
        with program.make_context("tinker-claw", typed) as context:
            return program.invoke(context)
    except click.exceptions.Exit as end:  # of --help
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tinker-claw"
        message = " ".join(error.format_message().split())  # choices stand on lines of their own
        note(f"{message} ({path} --help says more)")
    except ClawError as error:
        note(str(error))
    except (KeyboardInterrupt, click.Abort):  # of a command
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has left
        # Else Python writes the rest once more at exit, and reports that it could not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
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


class _Helped(click.Command):
    """Command that also takes tinker-claw's flags, of which --help shows few and --help-all all."""

    brief: Sequence[str | None]
    """Names of the parameters that --help shows."""

    def __init__(self, name: str, own: Sequence[click.Parameter] = (), **options: Any) -> None:
        own_flags = {flag for parameter in own for flag in parameter.opts}
        every = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=self._help_all,
            help="show every flag, those of tinker-claw, too",
        )
        self.brief = [*(parameter.name for parameter in own), every.name]
        super().__init__(
            name,
            params=[
                *own,
                *(parameter for parameter in flags() if not own_flags & {*parameter.opts}),
                every,
            ],
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **options,
        )

    def _help_all(self, context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            self.brief = [parameter.name for parameter in self.get_params(context)]
            click.echo(f"{self.get_help(context)}\n\n{ELSEWHERE}")
            context.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        visible = [p for p in self.get_params(ctx) if p.name in self.brief]
        rows = [p.get_help_record(ctx) for p in visible if isinstance(p, click.Option)]
        with formatter.section("flags (--help-all shows every one)"):
            formatter.write_dl([row for row in rows if row])


class _Named(_Helped):
    """A command of COMMANDS."""

    def __init__(self, name: str) -> None:
        module = import_module(f"tinker_claw.cli.{COMMANDS[name][1]}")
        self._command: type[Command] = getattr(module, name.title().replace("-", ""))
        help_text = getdoc(self._command) or ""
        super().__init__(name, parameters(self._command), help=help_text, epilog=self._command.MORE)

    def invoke(self, ctx: click.Context) -> int:
        parsed = dict(ctx.parent.params) if ctx.parent else {}
        parsed |= {name: value for name, value in ctx.params.items() if value is not None}
        return self._command.of(parsed).run()


class Program(_Helped, click.Group):
    """tinker-claw: serves, or runs a command."""

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
        self.brief = (*COMMON, "version")  # with more, the help would not fit a screen

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
        if cmd_name == "demo":  # its flags are its own, --help among them
            return click.Command(
                "demo",
                params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
                callback=start.demo,
                help="See the shipped tiny model learn from a simulated user; no GPU, no key.",
                add_help_option=False,
                context_settings={"ignore_unknown_options": True},
            )
        return _Named(cmd_name) if cmd_name in COMMANDS else None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by group, too."""
        super().format_options(ctx, formatter)
        groups = dict.fromkeys(group for group, _ in COMMANDS.values())
        rows = [(g, ", ".join(n for n, (of, _) in COMMANDS.items() if of == g)) for g in groups]
        with formatter.section("commands (COMMAND --help says more; without one it serves)"):
            formatter.write_dl(rows)
