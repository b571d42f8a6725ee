"""`run.py status`: how the gateway that runs is, and how the run goes, from its ledger.

Rule: what is wrong, since when, and what that means to the user, before any figures. The exit
status says it to scripts: 0 all is well, 1 something is wrong, 2 nobody was there to ask. The
ledger is read all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from tinker_claw import config
from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.story.board import board
from tinker_claw.story.command import until_left, write
from tinker_claw.story.health import describe
from tinker_claw.story.overview import Overview, as_json, read_overview

EXIT_WELL = 0
EXIT_WRONG = 1
EXIT_UNREACHABLE = 2
TIMEOUT_S = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a gateway that listens everywhere is asked from its own machine."""


class Unreachable(Exception):
    """Nobody to ask; says why."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What there is to see at one moment."""

    url: str
    health: Mapping[str, Any] | None
    """None: no gateway answers."""
    overview: Overview | None
    """None: no ledger was found."""
    notes: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        if self.health is None:
            return EXIT_UNREACHABLE
        return EXIT_WELL if self.health["status"] == "ok" else EXIT_WRONG


def main(arguments: Sequence[str]) -> int:
    """Print how the gateway is, and what its ledger tells; the exit status says whether all is
    well.

    Raises:
        ConfigError: a setting is wrong.
    """
    given, rest = parser().parse_known_args(arguments)
    settings = config.load(rest)
    port: int = settings.gateway.port if given.port is None else given.port
    url = url_of(given.host or settings.gateway.host, port)
    if given.live:
        from tinker_claw.story.live import watch

        with until_left():
            watch(lambda: _glance(_look(url, settings)))
        return EXIT_WELL
    look = _look(url, settings)
    with until_left():
        if given.json:
            write([json.dumps(_as_json(look))])
        else:
            sys.stderr.writelines(f"tinker-claw: {note}\n" for note in look.notes)
            write(_lines(look))
    return look.exit_status


def _look(url: str, settings: Settings) -> _Look:
    health, notes = None, list[str]()
    try:
        health = ask(url, key_of(settings))
    except Unreachable as error:
        notes.append(
            f"No gateway answers at {url} ({error}). Start one with `python run.py`, or name the "
            "port of the one that runs with --port (its event `serving` says which)."
        )
    overview = None
    if (directory := _directory(settings, health)) is not None:
        try:
            batch_size = (health or {}).get("batch_size", settings.training.batch_size)
            overview = read_overview(directory, batch_size)
        except LedgerError as error:
            notes.append(f"No figures of the ledger: {error}.")
        else:
            notes += _elsewhere(directory, health)
    return _Look(url, health, overview, tuple(notes))


def _directory(settings: Settings, health: Mapping[str, Any] | None) -> Path | None:
    """Where the ledger lies: as was asked for, else where the gateway keeps it."""
    if settings.run.data_dir is not None or health is None:
        return settings.run.directory
    return Path(health["data_dir"]) if "data_dir" in health else None


def data_directory(settings: Settings) -> Path | None:
    """Where the gateway that runs with these settings keeps its records, if that is here.

    Raises:
        ConfigError: the port is not known.
    """
    url = url_of(settings.gateway.host, settings.gateway.port)
    try:
        health = ask(url, key_of(settings))
    except Unreachable:
        return None
    named = health.get("data_dir")
    return Path(named) if isinstance(named, str) and Path(named).is_dir() else None


def _elsewhere(directory: Path, health: Mapping[str, Any] | None) -> Iterator[str]:
    its_own = (health or {}).get("data_dir")
    if its_own is not None and Path(its_own) != directory.absolute():
        yield f"The gateway keeps its records in {its_own}; the figures are those of {directory}."


def _lines(look: _Look) -> list[str]:
    said = [] if look.health is None else describe(look.health, look.url, time.time())
    if look.overview is None:
        return said
    return [*said, *([""] if said else []), *board(look.overview)]


def _glance(look: _Look) -> tuple[bool, Sequence[str], Overview | None]:
    said = [] if look.health is None else describe(look.health, look.url, time.time())
    return look.exit_status == EXIT_WELL, [*said, *look.notes], look.overview


def _as_json(look: _Look) -> dict[str, Any]:
    told = as_json(look.overview) if look.overview else None
    if look.health is None:
        return {"status": "unreachable", "error": " ".join(look.notes), "ledger": told}
    return {**look.health, "ledger": told}


def ask(url: str, key: str | None = None) -> dict[str, Any]:
    """What the gateway at `url` (without /v1) says of itself; to strangers, `status` alone.

    Raises:
        Unreachable: there is none.
    """
    try:
        # Plain HTTP to a machine that was named: no proxy, and no certificates to load.
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
            headers = {"authorization": f"Bearer {key}"} if key else None
            health = client.get(f"{url}/healthz", headers=headers).json()
    except httpx.TimeoutException as error:
        raise Unreachable(f"nothing came back within {TIMEOUT_S:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Unreachable(str(error) or type(error).__name__) from error
    except ValueError as error:
        raise Unreachable("what answers there is no tinker-claw") from error
    if not isinstance(health, dict) or "status" not in health:
        raise Unreachable("what answers there is no tinker-claw")
    return cast("dict[str, Any]", health)


def key_of(settings: Settings) -> str | None:
    """One that the gateway takes, an admin's where there is one."""
    admins_first = sorted(settings.users, key=lambda user: user.role != "admin")
    keys = [settings.gateway.api_key, *(user.key for user in admins_first)]
    return next((key.get_secret_value() for key in keys if key is not None), None)


def served_models(url: str, key: str | None) -> list[str] | None:
    """The names under which a gateway offers its models; None: it does not tell us."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
            answer = client.get(f"{url}/v1/models", headers=headers)
        return [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def url_of(host: str, port: int) -> str:
    """Where a gateway is asked from its own machine.

    Raises:
        ConfigError: the port is not known.
    """
    if port == 0:
        raise ConfigError("--port 0 lets the gateway choose: give the port that it chose")
    host = _ANYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def parser() -> argparse.ArgumentParser:
    top = config.Flags(
        prog="run.py status",
        description="Say how the gateway that runs is: what is wrong, since when, what it means; "
        "and from its ledger how the run goes, and whether it helps.",
        epilog="Exit status: 0 all is well, 1 something is wrong, 2 no gateway answers (its "
        "ledger is shown all the same). The data directory is that of --data-dir, else the one "
        "that the gateway names; without a gateway the one that run.py would use with the same "
        "flags, all of which can be given.",
        allow_abbrev=False,
    )
    top.add_argument("--host", help="its address (default: the setting, 127.0.0.1)")
    top.add_argument("--port", type=int, help="its port (default: the setting, 30000)")
    top.add_argument(
        "--json", action="store_true", help="what /healthz says, and the ledger, as JSON"
    )
    top.add_argument("--live", action="store_true", help="a view that keeps itself up to date")
    return top
