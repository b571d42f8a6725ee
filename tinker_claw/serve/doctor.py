"""`tinker-claw doctor`: is all there that this command line needs, and what came of the last
requests?

Rule: each check says one thing, in a line, and what to do where it fails. Checks that stand on a
failed one are left out. Nothing is started or changed; against Tinker about fifty tokens are
spent, and one state and one sampler are saved and deleted again, as a start would save them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from tinker_claw import config
from tinker_claw.errors import ClawError, ConfigError, LedgerError
from tinker_claw.ledger.reading import FILE
from tinker_claw.ledger.recent import read_recent
from tinker_claw.serve import checks, surroundings
from tinker_claw.serve.advice import advice
from tinker_claw.serve.checks import Check, Patient
from tinker_claw.serve.recent import WIDTH, table

EXIT_WELL = 0
EXIT_FAILED = 1
_INDENT = 16


def main(arguments: Sequence[str]) -> int:
    """Check the set-up that `run.py` with these flags would use; 0: all is well."""
    if {"-h", "--help", "--help-all"} & set(arguments):
        whole = "--help-all" in arguments
        sys.stdout.write(parser().format_help() + config.others_help(whole=whole))
        return EXIT_WELL
    given, rest = parser().parse_known_args(arguments)
    if given.last < 0:
        raise ConfigError(f"--last {given.last}: give a number of requests, or 0 for none")
    try:
        settings = config.load(rest)
    except ConfigError as error:
        _line("FAIL", "settings", str(error))
        return EXIT_FAILED
    run = settings.run
    _line("ok", "settings", f"{run.method} on {run.model_name}, backend {run.backend}")
    well = True if given.no_checks else asyncio.run(_examine(settings))
    if given.last:
        _show_recent(settings, given.last, reasons=given.reasons)
    return EXIT_WELL if well else EXIT_FAILED


async def _examine(settings: config.Settings) -> bool:
    async with AsyncExitStack() as stack:
        patient = Patient(settings, stack)
        for name, check, needs in _CHECKS:
            if any(other in patient.failed for other in needs):
                patient.failed.append(name)
                first = next(other for other in needs if other in patient.failed)
                _line("-", name, f"not looked at: first mend {first}")
                continue
            try:
                found = await check(patient)
                _line(found.state, name, found.told)
            except ClawError as error:
                patient.failed.append(name)
                _line("FAIL", name, str(error))
    return not patient.failed


def _line(state: str, name: str, told: str) -> None:
    more = ("\n" + " " * _INDENT).join(told.splitlines())
    sys.stdout.write(f"{state:<5}{name:<11}{more}\n")
    sys.stdout.flush()


def _show_recent(settings: config.Settings, count: int, *, reasons: bool) -> None:
    ledger = settings.run.directory / FILE
    if not ledger.exists():
        _line("-", "requests", f"none yet: {settings.run.directory} holds no ledger")
        return
    try:
        turns = read_recent(ledger, count).turns
    except LedgerError as error:
        _line("warn", "requests", str(error))
        return
    if not turns:
        _line("-", "requests", f"none yet in {ledger}")
        return
    lines = ["", f"The last requests in {ledger}:", ""]
    lines += table(turns, time.time(), reasons=reasons)
    for sentence in advice(turns):
        lines += ["", *textwrap.wrap(sentence, WIDTH)]
    if not reasons:
        lines += ["", "--reasons shows why each was taken for main or side."]
    sys.stdout.write("\n".join(lines) + "\n")


def parser() -> argparse.ArgumentParser:
    """The flags of this command; all others are those of run.py."""
    top = config.Flags(
        prog="run.py doctor",
        description="Say what is there, what is missing and what to do, for the flags that you "
        "would give run.py; then what came of the last requests, also while the gateway runs. "
        "Nothing is started or changed; at Tinker about fifty tokens are spent, and a checkpoint "
        "is saved and deleted.",
        epilog="Exit status: 0 nothing keeps run.py from starting, 1 something does, 2 a flag is "
        "wrong. All flags of run.py can be given, too:",
        allow_abbrev=False,
    )
    top.add_argument(
        "--last", type=int, default=10, metavar="N", help="requests to show (default 10; 0: none)"
    )
    top.add_argument(
        "--reasons",
        action="store_true",
        help="with each request its session's name, and why it was taken for main or side",
    )
    top.add_argument(
        "--no-checks", action="store_true", help="show the requests only; nothing is asked or spent"
    )
    return top


_CHECKS: tuple[tuple[str, Check, tuple[str, ...]], ...] = (
    ("backend", checks.backend, ()),
    ("memory", checks.memory, ("backend",)),
    ("samplers", checks.samplers, ("memory",)),
    ("tokenizer", checks.tokenizer, ()),
    ("method", checks.method, ("backend", "tokenizer")),
    ("price", checks.price, ()),
    ("judge", checks.judge, ()),
    ("data", checks.data, ()),
    ("answers", checks.answers, ("data",)),
    ("agreement", checks.agreement, ("data",)),
    ("port", surroundings.port, ()),
    ("clock", surroundings.clock, ()),
    ("model", surroundings.model, ("backend",)),
    ("openclaw", surroundings.openclaw, ("model",)),
)
