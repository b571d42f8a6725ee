"""Run the system: start, serve, stop, in order. Begin reading the program here.

`serve` does all of it. It makes the checks that cost nothing, and opens what the run needs
(`wiring` makes the parts). It serves until it is told to stop, and shuts down in an order in which
nothing is lost.

Rule: one TaskGroup holds everything that runs. The gateway decides when it ends; another part that
fails is recorded in the health and restarted, while the gateway goes on answering.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from socket import socket

from tinker_claw.app.reporting import report
from tinker_claw.app.server import (
    CLOSE_S,
    DRAIN_S,
    STEP_S,
    GatewayServer,
    Stop,
    spare_collector,
    url_of,
)
from tinker_claw.app.terminal import LONGEST, Terminal
from tinker_claw.app.wiring import System, wire
from tinker_claw.backends.local import check_fit
from tinker_claw.backends.model_files import absent, source
from tinker_claw.backends.open import check_backend
from tinker_claw.billing.estimate import announce
from tinker_claw.billing.prices import check_budget, price_in_force
from tinker_claw.config import own_key
from tinker_claw.config.settings import Keeping, Settings
from tinker_claw.connections import allow_open_files, listen
from tinker_claw.errors import ConfigError, LearningEndedError, LedgerError, first_cause
from tinker_claw.files import close_to_others, open_to_others
from tinker_claw.learner.health import PartHealth
from tinker_claw.ledger.database import in_use, is_locked
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.samples import read_queue, ready
from tinker_claw.methods import build
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import SECRETS
from tinker_claw.retry import Backoff
from tinker_claw.sinks.base import check_installed
from tinker_claw.telemetry import configure, log

RESTARTS = Backoff(first_s=1.0, longest_s=300.0)
"""Delays before a failed part is started again."""
RAN_WELL_S = 600.0
"""Time without a failure after which the next one counts as the first."""
UPKEEP_S = 600.0
"""Interval between deletions of expired records."""
DAY_S = 86_400.0


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or Ctrl-C.

    Raises:
        ClawError: it could not start; the sentence says why and what to do.
    """
    allow_open_files()
    redactor = Redactor([SECRETS])
    redactor.load()
    terminal = Terminal(quiet=settings.run.quiet)
    readable = terminal if settings.run.log == "auto" else None
    configure(redact=redactor.redact, terminal=readable)
    this, stop = asyncio.current_task(), Stop()
    assert this is not None
    try:
        async with AsyncExitStack() as stack:
            with stop.calls(this.cancel, within_s=CLOSE_S):
                settings, system, listening = await _start(settings, stack)
            ledger, size = system.parts.ledger, settings.training.batch_size
            terminal.opening = partial(ledger.turns.opening, most=2 * LONGEST)
            terminal.lesson = ledger.lessons.text
            terminal.waiting = lambda: (ready(read_queue(ledger.rows), size), size)
            await _serve(settings, system, listening, stop)
    except asyncio.CancelledError:
        if not stop.requested:
            raise
    log.info("stopped")


async def _start(settings: Settings, stack: AsyncExitStack) -> tuple[Settings, System, socket]:
    """Check the settings, cheapest checks first; then open what is needed.

    Returns the settings, with a key that was made, too.
    """
    run = settings.run
    build(run.method)  # before anything is written under a name that no method has
    check_installed(run.sinks)
    price = price_in_force(settings)
    check_budget(settings, price)
    await check_backend(settings)
    for name in absent(settings):
        log.info("model.download", model=name)
    arranged = check_fit(settings) if run.backend == "local" else None
    try:
        listening = stack.enter_context(listen(settings.gateway.host, settings.gateway.port))
    except ConfigError as error:
        if is_locked(run.directory):  # most likely the port, too, is that gateway's
            raise in_use(run.directory) from error
        raise
    model = source(settings)
    if (file := settings.key_file) is not None and settings.gateway.api_key is None:
        settings = own_key.make(settings, file)
        log.warning("key.created", file=str(file), because_of=own_key.others())
    ledger = Ledger(run.directory)
    stack.callback(ledger.close)
    ledger.bind(settings.bound)
    if closed := close_to_others(run.directory):
        log.warning("data_dir.closed", files=len(closed), first=str(closed[0]))
    if left := open_to_others(run.directory):
        log.warning("data_dir.open", files=len(left), first=str(left[0]), cure="chmod -R go= it")
    announce(settings, price, ledger)
    system = await wire(settings, model, arranged, ledger, price, stack)
    return settings, system, listening


async def _serve(settings: Settings, system: System, listening: socket, stop: Stop) -> None:
    """Run every part until the gateway ends; a step in progress may finish."""
    server, parts, health = GatewayServer(system.app), system.parts, system.parts.health
    trim = partial(upkeep, parts.ledger, settings.privacy)

    def end() -> None:
        server.should_exit = True
        health.outages.give_up()
        system.learner.finish()
        system.orders.end()

    with stop.calls(end, within_s=DRAIN_S + STEP_S + CLOSE_S):
        async with (
            asyncio.TaskGroup() as group,
            system.orders.announced(settings.run.directory, listening.getsockname()[:2]),
        ):
            judging = group.create_task(guarded("judging", system.judging.run, health.judge))
            learning = group.create_task(guarded("learning", system.learner.run, health.learner))
            publishing = group.create_task(
                guarded("publishing", system.learner.recovery.keep_published, health.publishing)
            )
            trimming = group.create_task(guarded("upkeep", trim, health.upkeep))
            run = settings.run
            reporting = [group.create_task(report(name, run.directory)) for name in run.sinks]
            log.info(
                "serving",
                url=url_of(listening),
                model=settings.served_name,
                method=settings.run.method,
                backend=settings.run.backend,
                version=parts.policy.current.version.id,
                data_dir=str(settings.run.directory),
                key_file=str(settings.key_file) if settings.key_file else None,
                key="yours" if settings.keys else "none is needed",
            )
            spare_collector()
            await server.serve(sockets=[listening])
            judging.cancel()
            publishing.cancel()
            trimming.cancel()
            if system.learner.stepping:
                await asyncio.wait({learning}, timeout=STEP_S)
            learning.cancel()
            for reporter in reporting:  # now: the step in progress is recorded
                reporter.cancel()


async def guarded(
    name: str, work: Callable[[], Awaitable[None]], part: PartHealth, restarts: Backoff = RESTARTS
) -> None:
    """Run a part of the loop whose failure must not end the others.

    A part that fails is restarted with growing delays; one that ends on purpose is not.
    """
    begins, accidents = part.state, 0
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception as error:  # the one broad except: whatever it is, the gateway goes on
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # Python 3.11's TaskGroup drops a cancellation that meets a child's failure.
                raise asyncio.CancelledError from error
            accidents = 1 if time.monotonic() - began > RAN_WELL_S else accidents + 1
            cause = first_cause(error)
            ended = isinstance(cause, LearningEndedError)
            wait_s = None if ended else restarts.after(accidents)
            part.enter("failed", f"{type(cause).__name__}: {cause}", next_try_s=wait_s)
            write = log.error if ended else log.exception  # what ended on purpose says why
            write("part.failed", part=name, error=part.error, starting_again_in_s=wait_s)
        if wait_s is None:
            return
        await asyncio.sleep(wait_s)
        part.enter(begins)


async def upkeep(ledger: Ledger, cfg: Keeping) -> None:
    """Keep the ledger within its limit of age, until cancelled.

    The gateway never waits for more than a few milliseconds of it; a ledger that cannot be written
    is retried at the next interval.
    """
    while True:
        try:
            await once(ledger, cfg)
            if not await ledger.empty_log():
                log.warning("ledger.log_grows", because="another program reads it without a pause")
        except LedgerError as error:
            log.warning("ledger.trim_failed", error=str(error))
        await asyncio.sleep(UPKEEP_S)


async def once(ledger: Ledger, cfg: Keeping) -> int:
    """Trim the ledger once; returns how many turns were emptied."""
    if cfg.keep_days is None:
        return 0
    dropped = await ledger.trim(time.time() - cfg.keep_days * DAY_S)
    if dropped:
        log.info("ledger.trimmed", turns=dropped, bytes=ledger.live_bytes())
    return dropped
