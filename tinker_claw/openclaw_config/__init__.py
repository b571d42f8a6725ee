"""`run.py openclaw-config`: what OpenClaw needs to know of this gateway.

    block      the provider block, from the settings
    context    how large the model's context is, and who says so
    edit       values in JSON5 text, every other byte kept
    file       find, read and replace OpenClaw's configuration
    compare    what in it does not fit, and what would have to be set

Rule: it prints, and changes a file only where one is named with --write, and in it nothing but the
provider; which model an agent uses is changed only with --primary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tinker_claw import config
from tinker_claw.config import Settings, is_loopback
from tinker_claw.errors import ConfigError
from tinker_claw.openclaw_config import file
from tinker_claw.openclaw_config.block import (
    ANYWHERE,
    KEY_VARIABLE,
    PROVIDER,
    block,
    keys,
    primary,
    provider,
)
from tinker_claw.openclaw_config.compare import changes, primary_change, primary_of, uses
from tinker_claw.openclaw_config.context import Context, context_of
from tinker_claw.openclaw_config.edit import Where, set_values

SMALLEST_CONTEXT = 16_000
"""Below it OpenClaw's own system prompt and tools leave no room for a conversation."""


def main(arguments: Sequence[str]) -> int:
    """Print the block, or merge it into a file.

    Raises:
        ConfigError: a setting is wrong, or the file cannot be read, understood or written.
    """
    if {"-h", "--help", "--help-all"} & set(arguments):
        whole = "--help-all" in arguments
        sys.stdout.write(parser().format_help() + config.others_help(whole=whole))
        return 0
    given, rest = parser().parse_known_args(arguments)
    settings = config.load(rest)
    if settings.gateway.port == 0:
        raise ConfigError("--port 0 lets the gateway choose: give the port that it chose")
    key = _key(settings, given.user) if given.show_key else None
    context = asyncio.run(context_of(settings))
    if given.write is None:
        whole = block(settings, context.tokens, key)
        sys.stdout.write(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
        _explain(settings, context, key)
    else:
        _write(given, settings, context, key)
    return 0


def _key(settings: Settings, user: str | None) -> str | None:
    known = keys(settings)
    if not known and user is None:
        return None
    if user is None and len(known) == 1:
        return next(iter(known.values()))
    if user not in known:
        raise ConfigError(
            f"--show-key: name one of the users that have a key with --user: {', '.join(known)}"
            if known
            else f"--user {user}: this gateway has no keys"
        )
    return known[user]


def _write(
    given: argparse.Namespace, settings: Settings, context: Context, key: str | None
) -> None:
    found = file.read(given.write)
    _explain(settings, context, key)
    if found is None:
        whole = block(settings, context.tokens, key)
        if not given.primary:
            del whole["agents"]
        file.create(given.write, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
        _tell(f"{given.write}: made, with the provider {PROVIDER}.")
    else:
        _merge(found, settings, context, key, make_primary=given.primary)
    if not given.primary and (used := primary_of(found.data if found else {})) != primary(settings):
        _tell(
            f"agents.defaults.model.primary is {'left at ' + used if used else 'not set'}: "
            f"--primary sets it to {primary(settings)}, so that your agent uses this model."
        )
    now = file.read(given.write)
    for use in uses(now.data, settings) if given.primary and now else ():
        if use.agent and not use.here:
            _tell(f"{use}: it has a model of its own, which was left alone.")


def _merge(
    found: file.Found,
    settings: Settings,
    context: Context,
    key: str | None,
    *,
    make_primary: bool,
) -> None:
    wanted = provider(settings, context.tokens, key)
    keep = {"name"}
    if key is None:
        keep.add("apiKey")  # a secret that works is not replaced by a reference that may not
    if not context.certain:
        keep.add("contextWindow")
    wanted_changes: list[tuple[Where, object]] = changes(found.data, wanted, keep)
    if make_primary:
        wanted_changes += primary_change(found.data, settings)
    if not wanted_changes:
        _tell(f"{found.path}: nothing to change.")
        return
    backup = file.replace(found, set_values(found.text, wanted_changes))
    names = ", ".join(".".join(str(key) for key in path) for path, _ in wanted_changes)
    _tell(f"{found.path}: set {names}. As it was before: {backup}")


def _explain(settings: Settings, context: Context, key: str | None) -> None:
    """What a reader of the block should know, beside it."""
    gateway = settings.gateway
    _note(f"contextWindow {context.tokens}: {context.source}.")
    if context.tokens < SMALLEST_CONTEXT:
        _note(
            f"{context.tokens} tokens are too few for OpenClaw: its own system prompt and tools "
            "take about 11,000."
        )
    if gateway.host in ANYWHERE:
        _note(
            f"The gateway listens on all addresses; {ANYWHERE[gateway.host]} is right for an "
            "OpenClaw on this machine. On another one put this machine's name or address there."
        )
    elif not is_loopback(gateway.host):
        _note("Other machines reach it over plain HTTP: use a network that you trust.")
    if keys(settings) and key is None:
        _note(
            f"apiKey is a reference: give OpenClaw the key in the variable {KEY_VARIABLE} (a line "
            "in ~/.openclaw/.env will do), or use --show-key to have the key itself here."
        )


def _note(told: str) -> None:
    sys.stderr.write(f"tinker-claw: {told}\n")


def _tell(told: str) -> None:
    sys.stdout.write(f"{told}\n")


def parser() -> argparse.ArgumentParser:
    """The flags of this command; all others are those of run.py."""
    top = config.Flags(
        prog="run.py openclaw-config",
        description="Print the provider block that points OpenClaw at the gateway that run.py "
        "starts with the same flags. Nothing is changed without --write.",
        epilog="Exit status: 0 done, 2 a flag, a setting or the file is wrong. "
        "All flags of run.py can be given, too:",
        allow_abbrev=False,
    )
    top.add_argument(
        "--write",
        type=Path,
        metavar="PATH",
        help="merge the provider into this file instead, after a backup; OpenClaw's own is "
        "~/.openclaw/openclaw.json. Comments and everything else in it stay as they are",
    )
    top.add_argument(
        "--primary",
        action="store_true",
        help="with --write: also make this the model that your agents use "
        "(agents.defaults.model.primary)",
    )
    top.add_argument(
        "--show-key",
        action="store_true",
        help="show the gateway's key instead of a reference to a variable",
    )
    top.add_argument(
        "--user", metavar="NAME", help="with --show-key: whose key, where users have their own"
    )
    return top
