"""The doctor's checks of what is around the gateway: its port, the clock, OpenClaw.

Rule: as in `checks`; nobody's files are changed, and no secret is repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from tinker_claw import status
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.ledger.recent import read_recent
from tinker_claw.openclaw_config import SMALLEST_CONTEXT, file
from tinker_claw.openclaw_config.block import PROVIDER, base_url
from tinker_claw.openclaw_config.compare import Use, differences, provider_for, uses
from tinker_claw.openclaw_config.context import context_of
from tinker_claw.serve.checks import Found, Patient
from tinker_claw.serve.clock import ahead_of, span
from tinker_claw.serve.server import listen

_CLOCK_WARNS_S = 10.0
_CLOCK_FAILS_S = 300.0
"""From about here on short-lived keys are refused, and certificates that are new."""
_PRINTS = "`python run.py openclaw-config` with these flags prints what belongs there"


async def port(patient: Patient) -> Found:
    gateway = patient.settings.gateway
    try:
        with listen(gateway.host, gateway.port):
            return Found(f"{gateway.host}:{gateway.port} is free")
    except ConfigError as taken:
        url = status.url_of(gateway.host, gateway.port)
        key = status.key_of(patient.settings)
        try:
            health = await asyncio.to_thread(status.ask, url, key)
        except status.Unreachable:
            raise taken from None
    if "user" in health:  # not an admin's key: it tells no more than that
        return Found(f"a gateway of this project answers at {url}. It is {health['status']}")
    if "policy_version" not in health:  # it tells strangers no more than whether all is well
        raise ConfigError(
            f"a gateway of this project runs at {url}, and takes another key than these flags "
            "give; give one of its keys, or choose another --port"
        )
    name = patient.settings.served_name
    served = await asyncio.to_thread(status.served_models, url, key)
    if served is not None and name not in served:
        raise ConfigError(
            f"a gateway of this project runs at {url}, but it serves {', '.join(served)}, not "
            f"{name}; stop it, or choose another --port"
        )
    told = f"a gateway of this project answers at {url}. {health['meaning']}"
    its_own = Path(health["data_dir"])
    if its_own != patient.ledger.parent.absolute():
        elsewhere = f"It keeps its records elsewhere, in {its_own}; see --data-dir."
        return Found(f"{told} {elsewhere}", "warn")
    if health["status"] != "ok":
        return Found(f"{told} It is {health['status']}: `python run.py status` says why.", "warn")
    return Found(told)


async def model(patient: Patient) -> Found:
    context = patient.context = patient.context or await context_of(patient.settings)
    told = (
        f"served as {patient.settings.served_name}; context {context.tokens} tokens: "
        f"{context.source}"
    )
    if context.tokens >= SMALLEST_CONTEXT:
        return Found(told)
    return Found(f"{told}. OpenClaw's system prompt and tools alone take about 11,000", "warn")


async def openclaw(patient: Patient) -> Found:
    """Whether OpenClaw's configuration, where there is one, points here."""
    path = file.usual_path()
    try:
        found = file.read(path)
    except ConfigError as error:  # OpenClaw's trouble, not the gateway's
        return Found(str(error), "warn")
    if found is None:
        return Found(f"no configuration at {path}: {_PRINTS}", "-")
    if patient.settings.gateway.port == 0:
        return Found("--port 0 lets the gateway choose: nothing can point at it yet", "-")
    name = provider_for(found.data, patient.settings)
    if name is None:
        return Found(
            f"no provider in {path} points at {base_url(patient.settings)}: {_PRINTS}, --write "
            "puts it there",
            "warn",
        )
    assert patient.context is not None
    wrong = list(differences(found.data, name, patient.settings, patient.context))
    if wrong:
        mends = f"{_PRINTS}, --write puts it there" + (
            f" as {PROVIDER}" if name != PROVIDER else ""
        )
        return Found("\n".join([f"the provider {name} in {path}:", *wrong, mends]), "warn")
    used = uses(found.data, patient.settings)
    lines = [f"the provider {name} in {path} fits; {_users(used)}"]
    if other := [str(use) for use in used if not use.here]:
        lines += ["what is said elsewhere is neither recorded nor learned from:", *other]
    return Found("\n".join(lines))


def _users(used: list[Use]) -> str:
    """Which agents use the gateway's model, in words."""
    agents = [use.agent for use in used if use.agent is not None]
    ours = [use.agent for use in used if use.agent is not None and use.here]
    if len(ours) == len(agents):
        return "agents use it"
    return f"agents that use it: {', '.join(ours) or 'none'}"


async def clock(patient: Patient) -> Found:
    told, worst = list[str](), 0.0
    for url in _servers(patient):
        ahead = await asyncio.to_thread(ahead_of, url)
        if ahead is None:
            continue
        worst = max(worst, abs(ahead))
        way = "ahead of" if ahead > 0 else "behind"
        close = abs(ahead) < _CLOCK_WARNS_S
        told.append(f"agrees with {url}" if close else f"is {span(ahead)} {way} that of {url}")
    if worst >= _CLOCK_FAILS_S:
        raise ConfigError(
            f"this machine's clock {', '.join(told)}: keys and certificates are refused with a "
            "wrong clock; set it (with NTP)"
        )
    future = _from_the_future(patient.ledger)
    if future >= _CLOCK_WARNS_S:
        told.append(
            f"was set back, or was wrong before: the newest row of {patient.ledger} will be "
            f"written in {span(future)}. Nothing is lost, rows are ordered by number; the times "
            "that are shown are wrong"
        )
        return Found("; ".join(told), "warn")
    if not told:
        return Found("no server to compare it with; no row of the ledger is from the future")
    return Found("; ".join(told), "warn" if worst >= _CLOCK_WARNS_S else "ok")


def _servers(patient: Patient) -> Iterator[str]:
    """Servers that run.py asks anyway."""
    settings = patient.settings
    if patient.remote and "backend" not in patient.failed:
        from tinker_claw.backends.tinker.access import address

        yield address(settings.run.base_url).base_url
    if settings.judge.judge_url is not None:
        yield settings.judge.judge_url


def _from_the_future(ledger: Path) -> float:
    """By how many seconds the newest row is ahead of this clock; 0 where it is not."""
    try:
        newest = read_recent(ledger, 0).newest_at
    except LedgerError:
        return 0.0
    return max(0.0, (newest or 0.0) - time.time())
