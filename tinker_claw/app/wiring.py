"""Samplers of explicitly named policy versions (`model@v8`), opened on demand."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI

from tinker_claw.app.server import in_background
from tinker_claw.backends.local import open_judge
from tinker_claw.backends.model_files import Source
from tinker_claw.backends.open import learning_rate, open_trainer
from tinker_claw.billing.budget import Budget, Spending
from tinker_claw.billing.estimate import forecast
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import DEMO, Settings
from tinker_claw.conversation.index import IDLE_S, ConversationIndex
from tinker_claw.formats.chat import Chat
from tinker_claw.gateway.app import create_app
from tinker_claw.gateway.fallback import lineage
from tinker_claw.gateway.limits import ComputeRounds
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.gateway.request import GatewayDeps
from tinker_claw.judge.endpoints import Endpoint, HttpEndpoint, SamplerEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging, JudgingDeps
from tinker_claw.learner.loop import Learner, LearnerDeps, Observing
from tinker_claw.learner.recovery import restore, restore_pin
from tinker_claw.learner.rollback import Rollback
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import build
from tinker_claw.methods.base import Method, Signal, require, student_topk
from tinker_claw.policy import PolicyHolder, Sampler, Trainer
from tinker_claw.privacy.redact import Redactor
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry, log

MOST_OPEN = 4
"""Each holds an engine with its own KV cache; the one unused longest is closed."""


class Versions:
    """Opens a version's sampler once, and keeps a few."""

    def __init__(self, ledger: Ledger, trainer: Trainer) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._open: OrderedDict[int, Sampler] = OrderedDict()
        self._opening = asyncio.Lock()

    async def open(self, version_id: int) -> Sampler:
        """The sampler of a version.

        Raises:
            KeyError: there is no such version.
            BackendError: its weights cannot be opened.
        """
        unused: Sampler | None = None
        async with self._opening:
            if version_id not in self._open:
                version = self._ledger.steps.version(version_id)
                if version is None:
                    raise KeyError(version_id)
                self._open[version_id] = await self._trainer.open(version.sampler_ref)
                if len(self._open) > MOST_OPEN:
                    _, unused = self._open.popitem(last=False)
            self._open.move_to_end(version_id)
            sampler = self._open[version_id]
        if unused is not None:
            await unused.aclose()  # when its last reply has ended; others open theirs meanwhile
        return sampler

    async def aclose(self) -> None:
        for sampler in self._open.values():
            await sampler.aclose()
        self._open.clear()


# Make every part of a running system and hand each what it needs. Nothing starts here.


UNKNOWN_FORMAT: Final = (
    "no chat format is known by this model's name: hints teach nothing, and replies come when they "
    "are complete; name the format with --renderer (qwen3, for example)"
)


@dataclass(frozen=True, slots=True)
class System:
    """What `serve` runs."""

    app: FastAPI
    judging: Judging
    learner: Learner
    health: Health
    policy: PolicyHolder
    undoing: Rollback


@dataclass(frozen=True, slots=True)
class _Parts:
    """What several parts share."""

    settings: Settings
    ledger: Ledger
    trainer: Trainer
    base: Sampler
    renderer: Renderer
    method: Method
    policy: PolicyHolder
    telemetry: Telemetry
    health: Health
    spending: Spending
    redactor: Redactor


async def wire(
    settings: Settings, model: Source, ledger: Ledger, price: Price, stack: AsyncExitStack
) -> System:
    """Open the backend, restore the run, and connect the parts.

    Raises:
        ClawError: the model, the judge or the run cannot be opened, or do not fit one another.
    """
    renderer = Renderer.load(model.tokenizer, model.family)
    if settings.run.renderer == "auto" and renderer.family == "default":
        log.warning("renderer.unknown", risk=UNKNOWN_FORMAT)
    health = Health()
    trainer = await stack.enter_async_context(
        open_trainer(settings, model.weights, health.servers_away)
    )
    capabilities = await trainer.capabilities()
    method = build(settings.run.method)
    require(method, settings.training, capabilities)
    telemetry = Telemetry(settings.run.directory / "metrics.jsonl")
    parts = _Parts(
        settings=settings,
        ledger=ledger,
        trainer=trainer,
        base=await trainer.base(),
        renderer=renderer,
        method=method,
        policy=PolicyHolder(await restore(ledger, trainer), await restore_pin(ledger, trainer)),
        telemetry=telemetry,
        health=health,
        spending=_spending(settings, ledger, price, telemetry),
        redactor=Redactor(settings.privacy.kinds),
    )
    rate = learning_rate(settings, model.weights)
    learner = _learner(parts, rate, price, score_fresh=capabilities.score_fresh)
    judging = _judging(parts, await _endpoint(parts, stack), learner)
    versions = Versions(ledger, trainer)
    stack.push_async_callback(versions.aclose)
    index = ConversationIndex(ledger.turns, IDLE_S)
    app = _gateway(parts, index, judging, versions, capabilities.context_tokens)

    def forget_session(session_id: int) -> None:
        index.forget(session_id)
        renderer.forget()

    undoing = Rollback(*(ledger, trainer, parts.policy, learner), forget_session, judging.wake)
    return System(app, judging, learner, parts.health, parts.policy, undoing)


def _spending(settings: Settings, ledger: Ledger, price: Price, telemetry: Telemetry) -> Spending:
    usd = settings.spend.budget_usd
    budget = Budget(usd, lambda: forecast(settings, price, ledger)) if usd is not None else None
    return Spending(price, ledger.spend, telemetry, budget)


def _learner(parts: _Parts, rate: float, price: Price, *, score_fresh: bool) -> Learner:
    training = parts.settings.training
    looking = Observing(
        parts.ledger.samples,
        training.batch_size,
        lambda: forecast(parts.settings, price, parts.ledger).step_usd,
    )
    return Learner(
        LearnerDeps(
            ledger=parts.ledger,
            trainer=parts.trainer,
            base=parts.base,
            method=parts.method,
            policy=parts.policy,
            telemetry=parts.telemetry,
            health=parts.health,
            spending=parts.spending,
            cfg=training,
            learning_rate=rate,
            observing=looking if training.observe else None,
            score_fresh=score_fresh,
        )
    )


def _judging(parts: _Parts, endpoint: Endpoint, learner: Learner) -> Judging:
    training, judge = parts.settings.training, parts.settings.judge
    if training.teacher == "policy":
        log.warning("teacher.policy", risk="a teacher that learns along collapsed when measured")
    candidates = training.hint_candidates if Signal.HINT in parts.method.needs else 0
    teacher = parts.base if training.teacher == "base" else None
    return Judging(
        JudgingDeps(
            ledger=parts.ledger,
            judge=Judge(endpoint, judge, hint_candidates=candidates),
            scorer=HintScorer(teacher, parts.renderer, parts.method, training),
            method=parts.method,
            policy=parts.policy,
            telemetry=parts.telemetry,
            health=parts.health,
            spending=parts.spending,
            on_sample=learner.wake,
            redact=parts.redactor.redact,
        )
    )


def _gateway(
    parts: _Parts,
    index: ConversationIndex,
    judging: Judging,
    versions: Versions,
    context_tokens: int,
) -> FastAPI:
    settings, policy = parts.settings, parts.policy
    compute = ComputeRounds()
    return create_app(
        GatewayDeps(
            settings=settings.gateway,
            served_name=settings.served_name,
            policy=policy,
            open_version=versions.open,
            turns=parts.ledger.turns,
            index=index,
            privacy=SessionPrivacy(parts.ledger.turns, parts.redactor, compute),
            compute=compute,
            spending=parts.spending,
            renderer=parts.renderer,
            context_tokens=context_tokens,
            student_topk=student_topk(parts.method, settings.training),
            on_next_state=judging.wake,
            health=lambda: parts.spending.shown_in(
                parts.health.snapshot(
                    version=policy.current.version.id,
                    waiting=parts.ledger.samples.waiting(),
                    batch_size=settings.training.batch_size,
                )
                | {
                    "pinned": policy.pinned is not None,
                    "data_dir": str(settings.run.directory.absolute()),
                }
            ),
            telemetry=parts.telemetry,
            outages=parts.health.backend,
            stand_ins=lineage(parts.ledger.steps.version, versions.open, parts.base),
            users=settings.users,
        ),
        [Chat()],
    )


async def _endpoint(parts: _Parts, stack: AsyncExitStack) -> Endpoint:
    """Who judges: a model on its own GPUs, the endpoint that was named, rules, or the base."""
    settings = parts.settings
    url = settings.judge.judge_url
    if settings.local.prm_gpus and settings.run.backend == "local":
        url = await stack.enter_async_context(open_judge(settings))
    if url is None and settings.run.model_name == DEMO:
        from local_gpu.demo.judge import create_app as create_rule_judge

        url = await stack.enter_async_context(in_background(create_rule_judge(settings.run.seed)))
        log.info("judge.rules", url=url)
    if url is None:
        return SamplerEndpoint(parts.base, parts.renderer, settings.judge)
    return await stack.enter_async_context(HttpEndpoint(url, settings.judge))
