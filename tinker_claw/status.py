"""`run.py status`: ask a running gateway how it is, and tell it in a few lines.

Rule: what is wrong, since when, and what that means to the user, before any figures. The exit
status says it to scripts: 0 all is well, 1 something is wrong, 2 nobody was there to ask.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import httpx

from tinker_claw import config
from tinker_claw.errors import ConfigError

EXIT_WELL = 0
EXIT_WRONG = 1
EXIT_UNREACHABLE = 2
TIMEOUT_S = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a gateway that listens everywhere is asked from its own machine."""
_FINE = {
    "backend": ("ok",),
    "learner": ("waiting", "training", "finished", "paused"),
    "judge": ("ok", "paused"),
}


class _Unreachable(Exception):
    """Nobody to ask; says why."""


def main(arguments: Sequence[str]) -> int:
    """Print how the gateway is; the exit status says whether all is well.

    Raises:
        ConfigError: the settings file or the environment cannot be read.
    """
    given = parser().parse_args(arguments)
    settings = config.load(["--config", str(given.config)] if given.config else [])
    port: int = settings.gateway.port if given.port is None else given.port
    url = _url(given.host or settings.gateway.host, port)
    try:
        health = _ask(url)
    except _Unreachable as error:
        told = (
            f"No gateway answers at {url} ({error}). Start one with `python run.py`, or name the "
            "port of the one that runs with --port (its event `serving` says which)."
        )
        if given.json:
            sys.stdout.write(json.dumps({"status": "unreachable", "error": told}) + "\n")
        else:
            sys.stderr.write(f"tinker-claw: {told}\n")
        return EXIT_UNREACHABLE
    lines = [json.dumps(health)] if given.json else describe(health, url, time.time())
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_WELL if health["status"] == "ok" else EXIT_WRONG


def describe(health: Mapping[str, Any], url: str, now: float) -> list[str]:
    """The lines for a terminal. `now`: seconds since 1970."""
    return [
        f"tinker-claw at {url}: {health['status']}",
        *_wrong(health, now),
        *([health["meaning"]] if health.get("meaning") else []),
        ", ".join(_figures(health)),
    ]


def _wrong(health: Mapping[str, Any], now: float) -> Iterator[str]:
    for part, fine in _FINE.items():
        state = health.get(part, fine[0])
        if state in fine:
            continue
        line = f"  {part}: {state} since {_when(health[f'{part}_since'], now)}"
        wait_s = health.get("learner_next_try_s")
        if part == "learner" and state == "stalled":
            times = health["learner_attempts"]
            line += f", after {times} attempt{'s' if times > 1 else ''}"
            line += f"; next try in {wait_s:.0f} s" if wait_s is not None else "; trying now"
        yield line
        error = health.get(f"{part}_error")
        # What the backend's outage says, the parts that wait for it need not say again.
        if error and (part == "backend" or state != "stalled"):
            yield f"    {error}"
    if paused := health.get("spending_paused"):
        yield f"  spending: paused since {_when(health['learner_since'], now)}"
        yield f"    {paused}"


def _figures(health: Mapping[str, Any]) -> Iterator[str]:
    yield f"policy v{health['policy_version']}"
    yield f"{health['samples_waiting']}/{health['batch_size']} samples waiting"
    spent, budget = health.get("spent_usd"), health.get("budget_usd")
    if spent:
        yield f"${spent:.4f} spent" + (f" of ${budget:g}" if budget else "")


def _when(since: float, now: float) -> str:
    """Local time, with the day where it was another one, and how long ago."""
    began, today = datetime.fromtimestamp(since), datetime.fromtimestamp(now).date()
    shown = began.strftime("%H:%M:%S" if began.date() == today else "%Y-%m-%d %H:%M:%S")
    ago = max(0, int(now - since))
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if ago >= 2 * seconds:
            return f"{shown} ({ago // seconds} {unit} ago)"
    return f"{shown} ({ago} s ago)"


def _ask(url: str) -> dict[str, Any]:
    try:
        # Plain HTTP to a machine that was named: no proxy, and no certificates to load.
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
            health = client.get(f"{url}/healthz").json()
    except httpx.TimeoutException as error:
        raise _Unreachable(f"nothing came back within {TIMEOUT_S:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise _Unreachable(str(error) or type(error).__name__) from error
    except ValueError as error:
        raise _Unreachable("what answers there is no tinker-claw") from error
    if not isinstance(health, dict) or not {"status", "policy_version"} <= health.keys():
        raise _Unreachable("what answers there is no tinker-claw")
    return cast("dict[str, Any]", health)


def _url(host: str, port: int) -> str:
    if port == 0:
        raise ConfigError("--port 0 lets the gateway choose: give the port that it chose")
    host = _ANYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="run.py status",
        description="Say how a running gateway is: what is wrong, since when, what it means.",
        epilog="Exit status: 0 all is well, 1 something is wrong, 2 no gateway answers.",
        allow_abbrev=False,
    )
    top.add_argument("--config", type=Path, metavar="FILE", help="the gateway's settings file")
    top.add_argument("--host", help="its address (default: the setting, 127.0.0.1)")
    top.add_argument("--port", type=int, help="its port (default: the setting, 30000)")
    top.add_argument("--json", action="store_true", help="print what /healthz says, as JSON")
    return top
