"""Create and connect the parts of a running system. Nothing starts here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from runpy import run_path
from weakref import WeakValueDictionary

from cachetools import LRUCache
from fastapi import FastAPI

from tinker_claw.app.admin import Orders
from tinker_claw.app.healthz import healthz
from tinker_claw.app.server import in_background
from tinker_claw.backends.local import Arrangement
from tinker_claw.backends.model_files import Source, check_images
from tinker_claw.backends.open import learning_rate, open_trainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.canaries import Canary, in_force
from tinker_claw.config.settings import Settings
from tinker_claw.formats import spoken
from tinker_claw.gateway.app import create_app
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.fallback import ServingDeps, lineage
from tinker_claw.gateway.feedback import record
from tinker_claw.gateway.index import IDLE_S, ConversationIndex
from tinker_claw.gateway.lessons import LessonChooser
from tinker_claw.gateway.owners import Owners
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.gateway.rounds import ComputeRounds
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.judge.endpoints import Endpoint, HttpEndpoint, SamplerEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import INCLUDED, Prompts
from tinker_claw.learner.gate import FEWEST, Gate, canary_questions
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.lesson_replies import LessonReplies
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.practice import Practice
from tinker_claw.learner.recovery import restore, restore_pin
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import build
from tinker_claw.methods.base import require, student_topk
from tinker_claw.origin import is_loopback
from tinker_claw.page.routes import PageDeps, create_page
from tinker_claw.policy import PolicyHolder, Sampler, Trainer
from tinker_claw.privacy.redact import Redactor
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.switches import Decides
from tinker_claw.shipped import DEMO_JUDGE, MODELS
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Capabilities

MOST_OPEN = 4
"""Most named versions open. Each has an engine with its own KV cache; the least recently used one
is closed."""


@dataclass(frozen=True, slots=True)
class System:
    """The parts that `serve` runs."""

    app: FastAPI
    parts: LoopParts
    judging: Judging
    learner: Learner
    orders: Orders


@dataclass(frozen=True, slots=True)
class _Common:
    """Objects that the learner, judging and the gateway share."""

    settings: Settings
    parts: LoopParts
    can: Capabilities
    renderer: Renderer
    redactor: Redactor
    keys: Keys


async def wire(
    settings: Settings,
    model: Source,
    arranged: Arrangement | None,
    ledger: Ledger,
    price: Price,
    stack: AsyncExitStack,
) -> System:
    """Open the backend, restore the run, and connect the parts.

    Args:
        arranged: layout of this machine's GPUs; None where a service trains and samples.

    Raises:
        ClawError: the model, the judge or the run cannot be opened, or do not fit one another.
    """
    asks, canaries = settings.judge.judge_prompts, in_force(settings)
    renderer = Renderer.load(model.tokenizer, model.family)
    renderer.thinking.check(settings.gateway.thinking, settings.run.model_name)
    for refusal in renderer.refusals:
        log.warning("renderer.refuses", of=refusal)
    prompts = Prompts.read(asks) if asks else INCLUDED
    health = Health()
    ledger.watch(health.records_are)
    trainer = await stack.enter_async_context(
        open_trainer(settings, model.weights, arranged, away=health.servers_away)
    )
    can = await trainer.capabilities()
    if can.ended is None:
        require(build(settings.run.method), settings.training, can)
        check_images(settings, can.model, trains=can.trains_images and renderer.eyes is not None)
    telemetry = Telemetry(settings.run.directory / "metrics.jsonl")
    keys = Keys(settings.gateway.api_key, settings.users, settings.key_file)
    parts = await _parts(settings, trainer, can, ledger, price, health, telemetry)
    common = _Common(settings, parts, can, renderer, Redactor(settings.privacy.kinds), keys)
    gate = _gate(parts, canaries, renderer, settings.gateway.thinking)
    learner = Learner(
        parts,
        learning_rate=learning_rate(settings, model.weights),
        gate=gate,
        practice=_practice(common, gate),
        score_fresh=can.score_fresh,
        ended=can.ended,
    )
    judging = await _judging(common, prompts, learner.wake, stack)
    versions = VersionSamplers(ledger, trainer)
    stack.push_async_callback(versions.aclose)
    index, formats = ConversationIndex(ledger.turns, IDLE_S), spoken()
    deps = _deps(common, index, versions, judging.wake)
    health_body = partial(healthz, deps, health, settings.training.batch_size)
    app = create_app(deps, formats, health_body)

    def forget_session(session_id: int) -> None:
        index.forget(session_id)
        renderer.forget()
        for wire_format in formats:
            wire_format.forget()

    rollback = RollbackOperations(parts, learner, forget_session, judging.wake)
    local = is_loopback(settings.gateway.host) and not keys.needed
    orders = Orders(rollback, health_body, local=local)
    app.router.routes.extend(orders.routes())
    if settings.gateway.page:
        page = PageDeps(
            ledger=ledger.path,
            training=settings.training,
            keys=keys,
            local=local,
            health=health_body,
            decode=renderer.decode,
            say=partial(record, deps),
            undo=rollback,
            redact=common.redactor.redact,
        )
        app.router.routes.extend(create_page(page))
    return System(app, parts, judging, learner, orders)


async def _parts(
    settings: Settings,
    trainer: Trainer,
    can: Capabilities,
    ledger: Ledger,
    price: Price,
    health: Health,
    telemetry: Telemetry,
) -> LoopParts:
    """Build the parts that judging and the learner share; restore the versions that answered."""
    spend = settings.spend
    policy = PolicyHolder(
        await restore(ledger, trainer, learns=can.ended is None),
        await restore_pin(ledger, trainer),
    )
    telemetry.serves(lambda: policy.current.version.id)
    return LoopParts(
        ledger=ledger,
        trainer=trainer,
        base=await trainer.base(),
        method=build(settings.run.method),
        policy=policy,
        telemetry=telemetry,
        health=health,
        spending=Spending(
            price,
            ledger.spend,
            telemetry,
            budget=spend.budget,
            stops_serving=spend.budget_serving == "stops",
        ),
        training=settings.training,
        reply_tokens=settings.gateway.max_reply_tokens,
    )


def _gate(
    parts: LoopParts, canaries: Sequence[Canary], renderer: Renderer, thinking: Decides
) -> Gate | None:
    if parts.training.gate == "off":
        return None
    if len(canaries) < FEWEST:
        log.info("gate.idle", canaries=len(canaries), fewest=FEWEST)
    return Gate(parts, canary_questions(canaries, renderer, thinking))


def _practice(common: _Common, gate: Gate | None) -> Practice | None:
    parts, can = common.parts, common.can
    if parts.training.practice == "off":
        return None
    writer = SamplerEndpoint(parts.base, common.renderer, can.context_tokens)
    replies = LessonReplies(
        parts,
        common.renderer,
        writer,
        context_tokens=can.context_tokens,
        soft=can.two_d_targets and can.student_topk,
    )
    return Practice(parts, replies, gate)


async def _judging(
    common: _Common,
    prompts: Prompts,
    wake_learner: Callable[[], None],
    stack: AsyncExitStack,
) -> Judging:
    """Build the judge, the teacher, and the part of the loop that asks them."""
    settings, parts = common.settings, common.parts
    judge = Judge(
        await _endpoint(common, stack),
        settings.judge,
        most_hints=settings.training.hints_scored,
        wishes=settings.training.lessons != "off",
        prompts=prompts,
    )
    scorer = HintScorer(parts, common.renderer, context_tokens=common.can.context_tokens)
    return Judging(parts, judge, scorer, wake_learner, redact=common.redactor.redact)


async def _endpoint(common: _Common, stack: AsyncExitStack) -> Endpoint:
    """Open the judge: the endpoint that was named, rules, or the base."""
    settings = common.settings
    judge, url = settings.judge, settings.judge.judge_url
    if url is None and settings.run.model_name in MODELS:
        url = await stack.enter_async_context(in_background(_rule_judge(settings.run.seed)))
        log.info("judge.rules", url=url)
    if url is None:
        base, context = common.parts.base, common.can.context_tokens
        return SamplerEndpoint(base, common.renderer, context, thinks=judge.judge_thinking)
    return await stack.enter_async_context(HttpEndpoint(url, judge))


def _rule_judge(seed: int) -> FastAPI:
    """Load the demo's judge: it is shipped beside its model, and not a part of the package."""
    return run_path(str(DEMO_JUDGE), run_name="demo_judge")["create_app"](seed)


def _deps(
    common: _Common,
    index: ConversationIndex,
    versions: VersionSamplers,
    wake_judging: Callable[[], None],
) -> GatewayDeps:
    """Build the gateway's dependencies, some of them shared with the loop."""
    settings, parts, compute = common.settings, common.parts, ComputeRounds()
    secrets = SecretSearch(common.redactor, compute)
    return GatewayDeps(
        settings=settings.gateway,
        keys=common.keys,
        served_name=settings.served_name,
        renderer=common.renderer,
        can=common.can,
        student_topk=student_topk(parts.method, settings.training),
        policy=parts.policy,
        serving=ServingDeps(
            versions.open,
            parts.health.outages,
            lineage(parts.ledger.versions.get, versions.open, parts.base),
        ),
        ledger=parts.ledger,
        index=index,
        secrets=secrets,
        privacy=SessionPrivacy(parts.ledger, secrets),
        owners=Owners(
            parts.ledger.turns,
            settings.gateway.chats.owners,
            listed_only=settings.gateway.agents == "listed",
        ),
        compute=compute,
        spending=parts.spending,
        telemetry=parts.telemetry,
        wake_judging=wake_judging,
        lessons=None
        if settings.training.lessons == "off"
        else LessonChooser(
            parts.ledger.lessons, partial(common.renderer.hint_tokens, words="{hint}")
        ),
    )


class VersionSamplers:
    """Samplers of explicitly named policy versions (`model@v8`): opened on demand, a few kept."""

    def __init__(self, ledger: Ledger, trainer: Trainer) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._open = LRUCache[int, Sampler](MOST_OPEN)
        self._opening = WeakValueDictionary[int, asyncio.Lock]()
        self._closing = set[asyncio.Task[None]]()

    async def open(self, version_id: int) -> Sampler:
        """Return the sampler of a version.

        Raises:
            KeyError: there is no such version.
            BackendError: its weights cannot be opened.
        """
        # One lock per version: a version that is slow to open blocks no other.
        async with self._opening.setdefault(version_id, asyncio.Lock()):
            version = self._ledger.versions.get(version_id)
            if version is None:
                raise KeyError(version_id)
            opened = self._open.get(version_id)
            if opened is not None and opened.ref != version.sampler_ref:  # it was published anew
                self._close(self._open.pop(version_id))
            if version_id not in self._open:
                sampler = await self._trainer.open(version.sampler_ref)
                if len(self._open) == MOST_OPEN:
                    self._close(self._open.popitem()[1])
                self._open[version_id] = sampler
            return self._open[version_id]

    def _close(self, unused: Sampler) -> None:
        """Close a sampler once its last reply has ended."""
        closing = asyncio.create_task(unused.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        await asyncio.gather(*self._closing, *(sampler.aclose() for sampler in self._open.values()))
        self._open.clear()
