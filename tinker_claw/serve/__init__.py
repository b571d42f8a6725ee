"""Run the system: start, serve, stop in order.

Rule: one TaskGroup holds everything that runs. The gateway decides when it ends; a failure of the
learner or of judging is recorded in the health and leaves the gateway answering.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.learner.health import Part
from tinker_claw.ledger import Ledger
from tinker_claw.serve.backend import check_backend, source
from tinker_claw.serve.costs import announce
from tinker_claw.serve.server import Server, listen, stop_on_signals, url_of
from tinker_claw.serve.wiring import wire
from tinker_claw.spending import check_budget, price_in_force
from tinker_claw.telemetry import configure, log


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or Ctrl-C.

    Raises:
        ClawError: it could not start; the sentence says why and what to do.
    """
    configure(settings.run.log_format)
    price = price_in_force(settings)
    check_budget(settings, price)
    await check_backend(settings)
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(listen(settings.gateway.host, settings.gateway.port))
        model = source(settings)
        ledger = _open_ledger(settings)
        stack.callback(ledger.close)
        announce(settings, price, ledger)
        system = await wire(settings, model, ledger, price, stack)
        server = Server(system.app)
        stop_on_signals(server, system.health.backend.give_up)
        async with asyncio.TaskGroup() as group:
            background = (
                group.create_task(guarded(system.judging.run(), system.health.judge)),
                group.create_task(guarded(system.learner.run(), system.health.learner)),
            )
            log.info(
                "serving",
                url=url_of(listening),
                model=settings.served_name,
                method=settings.run.method,
                backend=settings.run.backend,
                version=system.policy.current.version.id,
                data_dir=str(settings.run.directory),
            )
            await server.serve(sockets=[listening])
            for task in background:
                task.cancel()
    log.info("stopped")


async def guarded(work: Awaitable[None], part: Part) -> None:
    """Run a part of the loop whose failure must not end the others."""
    try:
        await work
    except Exception as error:  # the one broad except: whatever it is, the gateway goes on
        cause = _first_cause(error)
        part.enter("failed", f"{type(cause).__name__}: {cause}")
        log.exception("part.failed", error=part.error)


def _first_cause(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _open_ledger(settings: Settings) -> Ledger:
    ledger = Ledger(settings.run.directory)
    try:
        held = ledger.bind(
            {
                "model": settings.run.model_name,
                "method": settings.run.method,
                "backend": settings.run.backend,
            }
        )
        if held and not settings.run.resume:
            raise ConfigError(
                f"{settings.run.directory} holds a run already; choose another --data-dir, or "
                "leave --no-resume out to go on with it"
            )
    except BaseException:
        ledger.close()
        raise
    return ledger
