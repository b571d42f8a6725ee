"""Wiring: settings to a running system, and its orderly end.

Rule: one TaskGroup holds everything that runs. The gateway decides when it ends; a failure of the
learner or of judging is recorded in the health and leaves the gateway answering.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import FastAPI

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.gateway import GatewayDeps, create_app
from tinker_claw.judge import Endpoint, HttpEndpoint, Judge, SamplerEndpoint
from tinker_claw.learner import (
    Health,
    HintScorer,
    Judging,
    JudgingDeps,
    Learner,
    LearnerDeps,
    restore,
)
from tinker_claw.learner.health import Part
from tinker_claw.ledger import Ledger
from tinker_claw.methods import build, require, student_topk
from tinker_claw.policy import PolicyHolder, Trainer
from tinker_claw.render import Renderer
from tinker_claw.serve.backend import DEMO, check_backend, learning_rate, open_trainer, source
from tinker_claw.serve.server import Server, in_background, listen, stop_on_signals, url_of
from tinker_claw.serve.versions import Versions
from tinker_claw.telemetry import Telemetry, configure, log


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or Ctrl-C.

    Raises:
        ClawError: it could not start; the sentence says why and what to do.
    """
    configure(settings.run.log_format)
    check_backend(settings)
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(listen(settings.gateway.host, settings.gateway.port))
        ledger = _open_ledger(settings)
        stack.callback(ledger.close)
        system = await _wire(settings, ledger, stack)
        server = Server(system.app)
        stop_on_signals(server)
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


@dataclass(frozen=True, slots=True)
class _System:
    app: FastAPI
    judging: Judging
    learner: Learner
    health: Health


def _open_ledger(settings: Settings) -> Ledger:
    ledger = Ledger(settings.run.directory)
    try:
        held = ledger.bind({"model": settings.run.model_name, "method": settings.run.method})
        if held and not settings.run.resume:
            raise ConfigError(
                f"{settings.run.directory} holds a run already; choose another --data-dir, or "
                "leave --no-resume out to go on with it"
            )
    except BaseException:
        ledger.close()
        raise
    return ledger


async def _wire(settings: Settings, ledger: Ledger, stack: AsyncExitStack) -> _System:
    """Make every part and hand each what it needs."""
    model = source(settings)
    renderer = Renderer.load(model.path, model.renderer)
    trainer = await stack.enter_async_context(open_trainer(settings, model.path))
    capabilities = await trainer.capabilities()
    method = build(settings.run.method)
    require(method, settings.training, capabilities)
    policy = PolicyHolder(await restore(ledger, trainer))
    versions = Versions(ledger, trainer)
    stack.push_async_callback(versions.aclose)
    telemetry = Telemetry(settings.run.directory / "metrics.jsonl")
    health = Health()
    base = await trainer.base()
    learner = Learner(
        LearnerDeps(
            ledger=ledger,
            trainer=trainer,
            base=base,
            method=method,
            policy=policy,
            telemetry=telemetry,
            health=health,
            cfg=settings.training,
            learning_rate=learning_rate(settings, model.path),
        )
    )
    hints = settings.training.hint_candidates if method.wants_hints else 0
    endpoint = await _judge_endpoint(settings, trainer, renderer, stack)
    teacher = base if settings.training.teacher == "base" else None
    judging = Judging(
        JudgingDeps(
            ledger=ledger,
            judge=Judge(endpoint, settings.judge, hint_candidates=hints),
            scorer=HintScorer(teacher, renderer, settings.training),
            method=method,
            policy=policy,
            telemetry=telemetry,
            health=health,
            on_sample=learner.wake,
            concurrency=settings.judge.judge_concurrency,
        )
    )
    app = create_app(
        GatewayDeps(
            settings=settings.gateway,
            served_name=settings.served_name,
            policy=policy,
            open_version=versions.open,
            turns=ledger.turns,
            renderer=renderer,
            context_tokens=capabilities.context_tokens,
            student_topk=student_topk(method, settings.training),
            on_next_state=judging.wake,
            health=lambda: health.snapshot(
                version=policy.current.version.id,
                waiting=ledger.samples.waiting(),
                batch_size=settings.training.batch_size,
            ),
            metrics=telemetry.exposition,
            observer=telemetry,
        )
    )
    return _System(app, judging, learner, health)


async def _judge_endpoint(
    settings: Settings, trainer: Trainer, renderer: Renderer, stack: AsyncExitStack
) -> Endpoint:
    """Who judges: the endpoint that was named, the demo's rules, or the base model."""
    url = settings.judge.judge_url
    if url is None and settings.run.model_name == DEMO:
        from local_gpu.demo.judge import create_app as create_rule_judge

        url = await stack.enter_async_context(in_background(create_rule_judge(settings.run.seed)))
        log.info("judge", rules=url)
    if url is None:
        return SamplerEndpoint(await trainer.base(), renderer, settings.judge)
    return await stack.enter_async_context(HttpEndpoint(url, settings.judge))
