"""`tinker-claw doctor`: is everything there that this command line needs?

Rule: each check says one thing, in a line, and what to do where it fails. Checks that stand on a
failed one are left out. Nothing is started; against Tinker about forty tokens are spent, to see
what the service can do.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tinker_claw import config
from tinker_claw.backends.sdk import SDK_VERSION
from tinker_claw.config import Settings
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.judge import HttpEndpoint
from tinker_claw.methods import build, require
from tinker_claw.render import Renderer
from tinker_claw.serve.backend import DEMO, Source, check_backend, open_trainer, source
from tinker_claw.serve.costs import forecast, unknown
from tinker_claw.serve.server import listen
from tinker_claw.spending import check_budget, price_in_force

EXIT_WELL = 0
EXIT_FAILED = 1
_LOW_DISK_GB = 2.0


@dataclass(slots=True)
class _Patient:
    """What the checks have found so far."""

    settings: Settings
    stack: AsyncExitStack
    source: Source | None = None
    failed: list[str] = field(default_factory=list[str])

    @property
    def remote(self) -> bool:
        return self.settings.run.backend == "tinker"


Check = Callable[[_Patient], Awaitable[str]]


def main(arguments: Sequence[str]) -> int:
    """Check the set-up that `run.py` with these flags would use; 0: all is well."""
    return asyncio.run(_examine(arguments))


async def _examine(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(
            "doctor: give it the flags that you would give run.py; it says what is there, what is "
            "missing, and what to do. These are the flags:\n\n"
        )
    try:
        settings = config.load(arguments)
    except ConfigError as error:
        _line("FAIL", "settings", str(error))
        return EXIT_FAILED
    run = settings.run
    _line("ok", "settings", f"{run.method} on {run.model_name}, backend {run.backend}")
    async with AsyncExitStack() as stack:
        patient = _Patient(settings, stack)
        for name, check, needs in _CHECKS:
            if any(other in patient.failed for other in needs):
                patient.failed.append(name)
                _line("-", name, f"not looked at: first mend {needs[0]}")
                continue
            try:
                _line("ok", name, await check(patient))
            except ClawError as error:
                patient.failed.append(name)
                _line("FAIL", name, str(error))
    return EXIT_FAILED if patient.failed else EXIT_WELL


def _line(state: str, name: str, told: str) -> None:
    sys.stdout.write(f"{state:<5}{name:<11}{told}\n")
    sys.stdout.flush()


async def _backend(patient: _Patient) -> str:
    await check_backend(patient.settings)
    if patient.remote:
        from tinker_claw.backends.tinker.access import address

        where = address(patient.settings.run.base_url)
        return f"tinker {SDK_VERSION}; {where.base_url} takes the key and has the model"
    return "torch, peft and safetensors are installed"


async def _tokenizer(patient: _Patient) -> str:
    patient.source = source(patient.settings)
    renderer = Renderer.load(patient.source.folder, patient.source.family)
    return f"chat format {renderer.family}, from {patient.source.folder}"


async def _method(patient: _Patient) -> str:
    settings = patient.settings
    if not patient.remote:
        return f"the local backend can do all of {settings.run.method}"
    assert patient.source is not None
    trainer = await patient.stack.enter_async_context(open_trainer(settings, patient.source.folder))
    has = await trainer.capabilities()
    require(build(settings.run.method), settings.training, has)
    return f"the service can do all of {settings.run.method}; context {has.context_tokens} tokens"


async def _price(patient: _Patient) -> str:
    settings = patient.settings
    if not patient.remote:
        return "nothing is billed: it runs on this machine"
    price = price_in_force(settings)
    check_budget(settings, price)
    told = forecast(settings, price, None)
    if told.step_usd is None or told.serve_usd is None:
        return unknown(settings, price) or "not known"
    return (
        f"about ${told.step_usd:.2f} a step, and ${told.serve_usd:.2f} to serve its turns: "
        f"{told.words} Prices as of {price.as_of}."
    )


async def _data(patient: _Patient) -> str:
    directory = patient.settings.run.directory
    there = directory
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{directory} cannot be written; choose another --data-dir")
    free_gb = shutil.disk_usage(there).free / 1e9
    if free_gb < _LOW_DISK_GB:
        raise ConfigError(f"{there} has {free_gb:.1f} GB left; free some, or choose --data-dir")
    held = "holds a run to go on with" if (directory / "ledger.sqlite3").exists() else "is new"
    return f"{directory} {held}; {free_gb:.0f} GB free"


async def _port(patient: _Patient) -> str:
    gateway = patient.settings.gateway
    with listen(gateway.host, gateway.port):
        return f"{gateway.host}:{gateway.port} is free"


async def _judge(patient: _Patient) -> str:
    settings = patient.settings
    if settings.judge.judge_url is None:
        demo = settings.run.model_name == DEMO
        return "the rules that come with the demo judge" if demo else "the base model judges"
    async with HttpEndpoint(settings.judge.judge_url, settings.judge) as endpoint:
        await endpoint.answers([{"role": "user", "content": "Answer with the word yes."}], 1)
    return f"{settings.judge.judge_url} answers"


_CHECKS: tuple[tuple[str, Check, tuple[str, ...]], ...] = (
    ("backend", _backend, ()),
    ("tokenizer", _tokenizer, ()),
    ("method", _method, ("backend", "tokenizer")),
    ("price", _price, ()),
    ("judge", _judge, ()),
    ("data", _data, ()),
    ("port", _port, ()),
)
