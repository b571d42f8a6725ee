"""The doctor's checks of what run.py itself needs.

Rule: each looks at one thing and says one thing; what keeps run.py from starting is raised, what
it can live with is a warning.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinker_claw.backends.sdk import SDK_VERSION
from tinker_claw.config import Settings
from tinker_claw.errors import BackendError, ConfigError, RequestError
from tinker_claw.files import open_to_others
from tinker_claw.judge import HttpEndpoint
from tinker_claw.ledger.figures import lost_of, newest_steps
from tinker_claw.ledger.reading import FILE, reading
from tinker_claw.methods import build, require, student_topk
from tinker_claw.openclaw_config.context import Context
from tinker_claw.render import Renderer
from tinker_claw.render.stream import BufferedStream
from tinker_claw.render.switches import switches
from tinker_claw.serve import arrange
from tinker_claw.serve.backend import check_backend, open_trainer
from tinker_claw.serve.costs import forecast, unknown
from tinker_claw.serve.model_files import DEMO, Source, source
from tinker_claw.spending import check_budget, price_in_force
from tinker_claw.story.board import lost
from tinker_claw.story.table import apart

_LOW_DISK_GB = 2.0
_LAST_STEPS = 16
_MANY_LOST = 0.05
"""Of all main turns. Each is one that nobody judges, so nothing is learned from it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check has to say. `-`: there was nothing to look at."""

    told: str
    state: Literal["ok", "warn", "-"] = "ok"


@dataclass(slots=True)
class Patient:
    """The settings, and what earlier checks have found."""

    settings: Settings
    stack: AsyncExitStack
    source: Source | None = None
    context: Context | None = None
    failed: list[str] = field(default_factory=list[str])
    """Names of the checks that failed, or stand on one that did."""

    @property
    def remote(self) -> bool:
        return self.settings.run.backend == "tinker"

    @property
    def ledger(self) -> Path:
        return self.settings.run.directory / FILE


Check = Callable[[Patient], Awaitable[Found]]


async def backend(patient: Patient) -> Found:
    await check_backend(patient.settings)
    if patient.remote:
        from tinker_claw.backends.tinker.access import address

        where = address(patient.settings.run.base_url)
        return Found(f"tinker {SDK_VERSION}; {where.base_url} takes the key and has the model")
    return Found("torch, peft and safetensors are installed")


async def memory(patient: Patient) -> Found:
    if patient.remote:
        return Found("the service's affair", "-")
    if patient.settings.run.model_name == DEMO:
        return Found("the demo's model takes next to none")
    arranged = arrange.arrange(patient.settings, only_reckon=True)
    told = arranged.layout.told()
    if arranged.fit is None or arranged.demand is None:
        return Found(told)
    table = "\n".join([f"{told}. {arranged.demand.told()}", *arranged.fit.lines()])
    if (wrong := arrange.why_not(arranged)) is not None:
        raise ConfigError(f"{table}\n{wrong}")
    return Found(table)


async def samplers(patient: Patient) -> Found:
    settings = patient.settings
    if patient.remote:
        return Found("the service samples", "-")
    if settings.local.urls:
        return Found("\n".join([await _served_at(url, settings) for url in settings.local.urls]))
    vllm = arrange.find_vllm(settings)
    arranged = arrange.arrange(settings, only_reckon=True)
    if not arranged.gpus:
        return Found("the gateway's process samples")
    if vllm is None:
        slow = "the gateway's process samples, many times slower, with a base of its own"
        return Found(f"no vLLM: {slow}. {arrange.GET_VLLM}", "warn")
    arrange.check_quantization(settings, vllm)
    return Found(f"{len(arranged.layout.serve)} of {vllm} will be started")


async def _served_at(url: str, settings: Settings) -> str:
    from local_gpu.servers.connect import connect
    from local_gpu.servers.server import NEVER_LOADED

    try:
        key = settings.local.sampler_api_key
        server = await connect(
            url, settings.local.sampler_kind, api_key=key.get_secret_value() if key else None
        )
        try:
            info = await server.info()
            await server.unload(NEVER_LOADED)
        finally:
            await server.aclose()
    except (BackendError, ConfigError) as error:
        raise ConfigError(f"--sampler-urls: {error}") from error
    return f"{url} serves {info.model}, context {info.context_tokens} tokens"


async def tokenizer(patient: Patient) -> Found:
    patient.source = source(patient.settings, weights=False)
    renderer = Renderer.load(patient.source.tokenizer, patient.source.family)
    prompt = renderer.prompt([{"role": "user", "content": "Hello"}], None, hint_message=0)
    buffered = isinstance(renderer.stream(prompt.tokens), BufferedStream)
    abilities = [
        f"chat format {renderer.family}, from {patient.source.tokenizer}",
        "thinking can be switched by the request"
        if _thinking_can_be_switched(renderer)
        else "thinking cannot be switched",
        "replies are parsed when they are complete, so agents see them late"
        if buffered
        else "text and tool calls are streamed",
    ]
    if prompt.hint_at is not None:
        return Found("; ".join([*abilities, "hints have their place"]))
    lost = "no place for a hint is known: hints teach nothing here, verdicts still do"
    wants = build(patient.settings.run.method).teaching is not None
    return Found("; ".join([*abilities, lost]), "warn" if wants else "ok")


def _thinking_can_be_switched(renderer: Renderer) -> bool:
    try:
        switches(renderer.config, {}, "none")
    except RequestError:
        return False
    return True


async def method(patient: Patient) -> Found:
    settings = patient.settings
    method = build(settings.run.method)
    if not patient.remote:
        return Found(f"the local backend can do all of {method.name}")
    assert patient.source is not None
    trainer = await patient.stack.enter_async_context(
        open_trainer(settings, patient.source.weights)
    )
    has = await trainer.capabilities()
    require(method, settings.training, has)
    patient.context = Context(has.context_tokens, "the service says so")
    from tinker_claw.backends.tinker import TinkerTrainer

    assert isinstance(trainer, TinkerTrainer)
    left = await trainer.rehearse(student_topk(method, settings.training))
    told = f"the service can do all of {settings.run.method}: saved, loaded, published, sampled"
    if left:
        return Found(f"{told}; it cannot delete what that left: {', '.join(left)}", "warn")
    return Found(told)


async def price(patient: Patient) -> Found:
    settings = patient.settings
    if not patient.remote:
        return Found("nothing is billed: it runs on this machine")
    found = price_in_force(settings)
    check_budget(settings, found)
    told = forecast(settings, found, None)
    if told.step_usd is None or told.serve_usd is None:
        return Found(unknown(settings, found) or "not known")
    return Found(
        f"about ${told.step_usd:.2f} a step, and ${told.serve_usd:.2f} to serve its turns: "
        f"{told.words} Prices as of {found.as_of}."
    )


async def judge(patient: Patient) -> Found:
    settings = patient.settings
    if settings.judge.judge_url is None:
        demo = settings.run.model_name == DEMO
        return Found("the rules that come with the demo judge" if demo else "the base model judges")
    async with HttpEndpoint(settings.judge.judge_url, settings.judge) as endpoint:
        await endpoint.answers([{"role": "user", "content": "Answer with the word yes."}], 1)
    return Found(f"{settings.judge.judge_url} answers")


async def data(patient: Patient) -> Found:
    directory = patient.settings.run.directory
    there = directory
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{directory} cannot be written; choose another --data-dir")
    free_gb = shutil.disk_usage(there).free / 1e9
    if free_gb < _LOW_DISK_GB:
        raise ConfigError(f"{there} has {free_gb:.1f} GB left; free some, or choose --data-dir")
    if bare := open_to_others(directory):
        return Found(
            f"others on this machine may read {len(bare)} of its files ({bare[0]}); the next start "
            f"closes them, or you do: chmod -R go= {directory}",
            "warn",
        )
    held = "holds a run to go on with" if patient.ledger.exists() else "is new"
    return Found(f"{directory} {held}; {free_gb:.0f} GB free")


async def answers(patient: Patient) -> Found:
    """Whether what users say finds the replies that they say it about."""
    if not patient.ledger.exists():
        return Found("no request came yet", "-")
    with reading(patient.ledger) as ledger, ledger.moment():
        causes, main = lost_of(ledger), ledger.one("SELECT COUNT(*) FROM turns WHERE kind = 'main'")
    if not causes:
        return Found("none was lost: what follows a reply is known to follow it")
    told = f"{lost(causes)}; of {main} main turns. `python run.py explain TURN` says more of each"
    return Found(told, "warn" if sum(causes.values()) >= _MANY_LOST * main else "ok")


async def agreement(patient: Patient) -> Found:
    """Of sampler and trainer, when a step last compared them."""
    if not patient.ledger.exists():
        return Found("no step was taken yet", "-")
    with reading(patient.ledger) as ledger, ledger.moment():
        steps = newest_steps(ledger, _LAST_STEPS)
    compared = [step for step in steps if step.metrics.get("agrees") is not None]
    if not compared:
        return Found(f"no step of the last {_LAST_STEPS} could compare sampler and trainer", "-")
    step = compared[-1]
    told = f"step {step.id}: sampler and trainer were {apart(step.metrics)} nats apart"
    if step.metrics["agrees"]:
        return Found(f"{told}, which is rounding")
    return Found(
        f"{told}, which is no rounding: `python run.py status` says what to look at", "warn"
    )
