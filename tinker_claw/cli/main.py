"""The command line: settings in, exit status out. Without a command it serves."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable, Sequence

from tinker_claw.config.load import brief_help, load, load_known
from tinker_claw.errors import ClawError
from tinker_claw.files import for_owner_only

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""As the shell tells SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or the gateway until it is told to stop; an error is one sentence."""
    for_owner_only()
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, _ = COMMANDS.get(given[0], (None, "")) if given else (None, "")
    try:
        if command is not None:
            placed = _placed(given[1:]) if given[0] in OF_A_LEDGER else given[1:]
            return command(placed)
        if {"-h", "--help"} & set(given):
            sys.stdout.write(f"{brief_help()}\n{_brief_commands()}")
            return 0
        if "--help-all" in given:
            sys.stdout.write(_commands())
        settings = load(given)
        from tinker_claw.app.main import (
            serve,  # takes seconds: --help and wrong flags need none of it
        )

        # The alarm of a stop is for what hangs, not for Python's own slow goodbye behind it.
        atexit.register(signal.alarm, 0)
        asyncio.run(serve(settings))
    except ClawError as error:
        sys.stderr.write(f"tinker-claw: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:  # before serving; from then on Ctrl-C is a signal that serve handles
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has left
        # Else Python writes the rest once more at its end, and says that it could not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    return 0


def _status(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.status import main as status

    return status(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.doctor import main as doctor

    return doctor(arguments)


def _openclaw_config(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.openclaw import main as openclaw_config

    return openclaw_config(arguments)


def _log(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.log import main as log

    return log(arguments)


def _explain(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.explain import main as explain

    return explain(arguments)


def _versions(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.versions import main as versions

    return versions(arguments)


def _pin(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.versions import pin

    return pin(arguments)


def _unpin(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.versions import unpin

    return unpin(arguments)


def _rejudge(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.rejudge import main as rejudge

    return rejudge(arguments)


def _rollback(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.versions import rollback

    return rollback(arguments)


def _forget(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.forget import main as forget

    return forget(arguments)


def _export(arguments: Sequence[str]) -> int:
    from tinker_claw.cli.export import main as export

    return export(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "doctor": (_doctor, "whether all is there, and what came of the last requests"),
    "explain": (_explain, "a turn in words: what came of it, and why"),
    "export": (_export, "turns, an adapter or a merged model, to take along"),
    "forget": (_forget, "a session or a turn, out of the ledger for good"),
    "log": (_log, "turns, verdicts, samples, steps or versions, also as they come"),
    "openclaw-config": (_openclaw_config, "what to tell OpenClaw of the gateway, or tell it"),
    "pin": (_pin, "one version answers from now on, whatever is learned"),
    "rejudge": (_rejudge, "turns that were set aside, to be judged again"),
    "rollback": (_rollback, "an earlier version answers, and learning goes on from it"),
    "status": (_status, "how the gateway that runs is: what is wrong, and what that means"),
    "unpin": (_unpin, "the newest version answers again"),
    "versions": (_versions, "the policy versions, and which of them are still there"),
}
"""Commands by name: each imports what it needs when it is called, takes what follows its name, and
returns the exit status."""


OF_A_LEDGER = (
    *("explain", "export", "forget", "log", "pin", "rejudge", "rollback", "unpin", "versions"),
)
"""Commands about one data directory."""


def _placed(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the data directory of the gateway that runs where none is named.

    As `status` finds it: flags that the gateway was started with need not be given again.
    """
    given = list(arguments)
    if {"-h", "--help"} & set(given):
        return given
    settings, _ = load_known(given)
    if settings.run.data_dir is not None or settings.gateway.port == 0:
        return given
    from tinker_claw.cli import status

    found = status.data_directory(settings)
    if found is None or found == settings.run.directory.absolute():
        return given
    sys.stderr.write(f"tinker-claw: of the gateway that runs, in {found} (else name --data-dir).\n")
    return [*given, "--data-dir", str(found)]


def _brief_commands() -> str:
    groups = {
        "set up": ("doctor", "openclaw-config"),
        "look": ("status", "log", "explain", "versions"),
        "undo": ("pin", "unpin", "rollback", "forget", "rejudge"),
        "take home": ("export",),
    }
    lines = [f"  {group:<12}{', '.join(names)}\n" for group, names in groups.items()]
    heading = "commands (run.py COMMAND --help says more); without one, run.py serves:\n"
    return "".join(
        [heading, *lines, "\n--help-all shows every flag, and what each command is for.\n"]
    )


def _commands() -> str:
    lines = [f"  {name:<17}{told}\n" for name, (_, told) in COMMANDS.items()]
    heading = "commands (run.py COMMAND --help says more); without one, run.py serves:\n"
    return "".join([heading, *lines, "\n"])
