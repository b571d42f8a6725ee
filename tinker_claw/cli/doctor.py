"""`tinker-claw doctor`: check what a start with these flags needs.

Rule: each check tests one thing and reports one result, and what to do where it fails: what keeps
the gateway from starting is raised, anything less is a warning. Checks that depend on a failed one
are skipped. Nothing is started or changed, and no secret is printed; Tinker bills about fifty
tokens.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinker_claw import plugins
from tinker_claw.app import orders
from tinker_claw.backends import local
from tinker_claw.backends.model_files import Source, check_images, local_file, source
from tinker_claw.backends.open import (
    Context,
    check_backend,
    check_packages,
    context_of,
    open_trainer,
)
from tinker_claw.backends.tinker_sdk import SDK_VERSION
from tinker_claw.backends.vllm import find_vllm, no_compiler
from tinker_claw.billing.estimate import (
    LONG_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    forecast,
    message,
)
from tinker_claw.billing.prices import check_budget, price_in_force, unknown
from tinker_claw.cli import openclaw
from tinker_claw.cli.common import Invocation, command, write
from tinker_claw.config.canaries import in_force
from tinker_claw.config.settings import Settings
from tinker_claw.connections import listen
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.formats import spoken
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.prompts import INCLUDED, Prompts, ask
from tinker_claw.ledger.database import FILE, open_read_only
from tinker_claw.ledger.ledger import holds_run
from tinker_claw.methods import build
from tinker_claw.methods.base import require
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.stream import BufferedStream
from tinker_claw.shipped import MODELS, SMALL
from tinker_claw.sinks.base import check_installed
from tinker_claw.types import NextState


@command("doctor", "Exit status: 0 it can start, 1 something is missing, 2 a flag is wrong.")
def doctor(invoked: Invocation) -> int:
    """Check what a start with these flags needs, and say what is missing and what to do.

    The gateway may be running. Nothing is started or changed; Tinker bills about fifty tokens.
    """
    try:
        run = invoked.settings.run
    except ConfigError as error:
        Finding(str(error), "FAIL").show("settings")
        return 1
    Finding(f"{run.method} on {run.model_name}, backend {run.backend}").show("settings")
    return 0 if asyncio.run(Checks(invoked.settings).examine()) else 1


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check, with a remedy where there is one. `-`: there was nothing to check."""

    text: str
    state: Literal["ok", "warn", "-", "FAIL"] = "ok"
    remedy: str | None = None

    def show(self, name: str) -> None:
        text = self.text if self.remedy is None else f"{self.text}: {self.remedy}"
        more = ("\n" + " " * 16).join(text.splitlines())
        write([f"{self.state:<5}{name:<11}{more}"])


_LOW_DISK_GB = 2.0
_CHECKS = {
    "plugins": (),
    "backend": (),
    "memory": (),
    "samplers": ("memory",),
    "tokenizer": (),
    "method": ("plugins", "backend", "tokenizer"),
    "price": (),
    "judge": (),
    "data": (),
    "port": (),
    "model": ("backend",),
}
"""Names of the checks in order, each with the checks that it depends on."""


@dataclass(slots=True)
class Checks:
    """The checks, one method each, with the findings of earlier ones. A check raises whatever keeps
    the gateway from starting."""

    settings: Settings
    source: Source | None = None
    sees: bool = False
    """Whether the tokenizer's folder says how images are read."""
    offers: Context | None = None
    """Context that the gateway offers."""
    failed: list[str] = field(default_factory=list[str])
    """Names of the checks that failed, or depend on one that did."""

    @property
    def remote(self) -> bool:
        return self.settings.run.backend == "tinker"

    @property
    def unfetched(self) -> bool:
        """The model is the small one, and not on this machine yet."""
        return self.settings.run.model_name == SMALL and not local_file(SMALL).exists()

    @property
    def ledger(self) -> Path:
        return self.settings.run.directory / FILE

    async def examine(self) -> bool:
        """Run all checks; return whether none failed."""
        for name, needs in _CHECKS.items():
            finding = await self._check(name, needs)
            finding.show(name)
        return not self.failed

    async def _check(self, name: str, needs: Sequence[str]) -> Finding:
        if missing := [other for other in needs if other in self.failed]:
            self.failed.append(name)
            return Finding(f"skipped: needs {missing[0]}", "-")
        try:
            return await getattr(self, name)()
        except ClawError as error:
            self.failed.append(name)
            return Finding(str(error), "FAIL")

    # What the gateway itself needs

    async def plugins(self) -> Finding:
        run = self.settings.run
        check_installed(run.sinks)
        build(run.method)
        spoken()
        added = {kind: plugins.added(kind) for kind in plugins.KINDS}
        summary = "; ".join(f"{kind} {', '.join(names)}" for kind, names in added.items() if names)
        return Finding(summary) if summary else Finding("none is installed", "-")

    async def backend(self) -> Finding:
        await check_backend(self.settings)
        if self.remote:
            from tinker_claw.backends.tinker.trainer import offered  # imports the SDK

            where, served = await offered(self.settings)
            summary = f"tinker {SDK_VERSION}; {where.base_url} takes the key"
            if not served.trainable:
                return Finding(f"{summary}, and does not train the model any more", "warn")
            return Finding(f"{summary} and has the model")
        return Finding("torch, peft and safetensors are installed")

    async def memory(self) -> Finding:
        if self.remote:
            return Finding("the service runs the model", "-")
        if self.settings.run.model_name in MODELS:
            return Finding("the shipped models need almost none")
        check_packages()
        if self.unfetched:
            from local_gpu.model.small import NEEDS, check_room, default_cache

            check_room(default_cache())
            return Finding(f"the first start fetches the model: {NEEDS}")
        arranged = local.arrange(self.settings, only_reckon=True)
        summary = arranged.layout.describe()
        if arranged.fit is None or arranged.demand is None:
            needs, cure = local.cpu_memory(self.settings)
            return Finding(f"{summary}: {needs}", "warn" if cure else "ok", cure)
        summary = "\n".join([f"{summary}. {arranged.demand.describe()}", *arranged.fit.lines()])
        if (wrong := local.why_not(arranged)) is not None:
            raise ConfigError(f"{summary}\n{wrong}")
        return Finding(summary)

    async def samplers(self) -> Finding:
        settings = self.settings
        if self.remote:
            return Finding("the service samples", "-")
        if settings.local.urls:
            served = [await local.served_at(url, settings) for url in settings.local.urls]
            return Finding("\n".join(served))
        vllm, arranged = find_vllm(), local.arrange(settings, only_reckon=True)
        if not arranged.gpus:
            return Finding("the gateway's process samples")
        if vllm is None:
            local.refuse_without_vllm(settings)
        if (missing := no_compiler()) is not None:
            return Finding(
                f"{missing} missing: on GPUs Triton and vLLM compile kernels with them",
                "warn",
                "on Ubuntu: sudo apt install gcc python3-dev, of the Python that is used",
            )
        return Finding(f"{len(arranged.layout.serve)} of {vllm} will be started")

    async def tokenizer(self) -> Finding:
        if self.unfetched:
            return Finding("it comes with the model", "-")
        self.source = source(self.settings, weights=False)
        renderer = Renderer.load(self.source.tokenizer, self.source.family)
        self.sees = renderer.eyes is not None
        prompt = renderer.prompt([{"role": "user", "content": "Hello"}], None, hint_message=0)
        facts = [f"chat format {renderer.family}, from {self.source.tokenizer}"]
        renderer.thinking.check(self.settings.gateway.thinking, self.settings.run.model_name)
        if isinstance(renderer.stream(prompt.tokens), BufferedStream):
            facts.append("replies are parsed when they are complete, so agents see them late")
        warns = prompt.hint_at is None and build(self.settings.run.method).teaching
        if warns:
            facts.append(
                "no place for a hint is known: hints teach nothing here, verdicts still do"
            )
        return Finding("; ".join([*facts, *renderer.refusals]), "warn" if warns else "ok")

    async def method(self) -> Finding:
        settings = self.settings
        method = build(settings.run.method)
        in_force(settings)  # reads the canaries
        if not self.remote:
            check_images(settings, settings.served_name, trains=self.sees)
            return Finding(f"the local backend can do all of {method.name}")
        assert self.source is not None
        async with open_trainer(settings, self.source.weights) as trainer:
            has = await trainer.capabilities()
            if has.ended is not None:
                return Finding(has.ended, "warn")
            require(method, settings.training, has)
            check_images(settings, has.model, trains=has.trains_images and self.sees)
            self.offers = Context(has.context_tokens, "the service says so")
        return Finding(f"the service can do all of {method.name}")

    async def price(self) -> Finding:
        settings = self.settings
        price = price_in_force(settings)
        check_budget(settings, price)
        if not self.remote:
            return Finding("nothing is billed: it runs on this machine")
        estimate = forecast(settings, price)
        if estimate.step_usd is None or estimate.serve_usd is None:
            return Finding(f"no dollars: {unknown(settings, price)}")
        short, long = (price.usd(message(settings, n)) or 0.0 for n in (PROMPT_TOKENS, LONG_TOKENS))
        return Finding(
            f"about ${estimate.step_usd:.2f} a step, and ${estimate.serve_usd:.2f} to serve its "
            f"turns: {estimate.words} A message to an agent that makes {REQUESTS} requests for it: "
            f"about ${short:.2f} at prompts of {PROMPT_TOKENS:,} tokens, ${long:.2f} at "
            f"{LONG_TOKENS:,}, learning included. Prices as of {price.as_of}."
        )

    async def judge(self) -> Finding:
        settings = self.settings
        asks = settings.judge
        if asks.judge_prompts:
            Prompts.read(asks.judge_prompts)
        if asks.judge_url:
            messages, schema = ask(INCLUDED, "hi", "Hello.", NextState("user", "Thanks."))
            async with HttpEndpoint(asks.judge_url, asks) as endpoint:
                await endpoint.answers(messages, 1, schema)
            return Finding(f"{asks.judge_url} answers")
        if settings.run.model_name in MODELS:
            return Finding("the rules that come with the shipped models judge")
        return Finding("the base model judges")

    async def data(self) -> Finding:
        directory = self.settings.run.directory
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(f"{directory} cannot be written; choose another --data-dir")
        free_gb = shutil.disk_usage(there).free / 1e9
        if free_gb < _LOW_DISK_GB:
            raise ConfigError(f"{there} has {free_gb:.1f} GB left; free some, or choose --data-dir")
        held = False
        if self.ledger.exists():
            with open_read_only(self.ledger) as rows:
                held = holds_run(rows, self.settings.bound)
        state = "holds a run, which continues" if held else "is new"
        return Finding(f"{directory} {state}; {free_gb:.0f} GB free")

    # What is around it

    async def port(self) -> Finding:
        gateway = self.settings.gateway
        try:
            with listen(gateway.host, gateway.port):
                return Finding(f"{gateway.host}:{gateway.port} is free")
        except ConfigError as error:
            directory = self.ledger.parent
            running = orders.address(directory)
            if running is None or running[1] != gateway.port:
                raise error from None
        health = await asyncio.to_thread(orders.health, directory) or {"status": "ended"}
        summary = f"the gateway of {directory} answers. It is {health['status']}"
        if health["status"] != "ok":
            return Finding(summary, "warn", "`tinker-claw status` says why")
        return Finding(f"{summary}. {health['meaning']}")

    async def model(self) -> Finding:
        if self.unfetched:
            return Finding("served as small; its context is known once it is here", "-")
        offers = self.offers or await context_of(self.settings)
        context = f"context {offers.tokens} tokens: {offers.source}"
        summary = f"served as {self.settings.served_name}; {context}"
        if (refusal := openclaw.too_small(offers.tokens)) is None:
            return Finding(summary)
        return Finding(f"{summary}. {refusal}", "warn")
