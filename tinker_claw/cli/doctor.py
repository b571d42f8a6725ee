"""`tinker-claw doctor`: is all there that these flags need, and what came of the last requests?

Rule: each check looks at one thing and says one thing, and what to do where it fails: what keeps
the gateway from starting is raised, what it can live with is a warning. Checks that stand on a
failed one are left out. Nothing is started or changed, and no secret is repeated; against Tinker
about fifty tokens are spent, and one state and one sampler are saved and deleted again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar, Literal
from urllib.error import HTTPError

from pydantic import Field

from tinker_claw.app.server import listen
from tinker_claw.backends import local
from tinker_claw.backends.model_files import Source, source
from tinker_claw.backends.open import Context, check_backend, context_of, open_trainer
from tinker_claw.backends.tinker_sdk import SDK_VERSION
from tinker_claw.billing.budget import check_budget, price_in_force
from tinker_claw.billing.estimate import forecast, unknown
from tinker_claw.cli import common, openclaw, openclaw_file
from tinker_claw.cli.common import Command, span, table, wrapped, write
from tinker_claw.cli.log import COLUMNS, read_log
from tinker_claw.config.settings import JudgeSettings, Settings
from tinker_claw.errors import ClawError, ConfigError, LedgerError, RequestError
from tinker_claw.files import open_to_others
from tinker_claw.insight import lost, read_run_view
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.prompts import Prompts
from tinker_claw.ledger.database import FILE, Rows, reading
from tinker_claw.ledger.figures import lost_of, newest_at
from tinker_claw.ledger.outcome import RunView, advice, outcome
from tinker_claw.ledger.views import Filter, TurnView, read, read_turns
from tinker_claw.methods import build
from tinker_claw.methods.base import require, student_topk
from tinker_claw.render.format import switches
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.stream import BufferedStream
from tinker_claw.shipped import MODELS


class Doctor(Command):
    """Say what is there, what is missing and what to do, for the flags of your start; then
    what came of the last requests, also while the gateway runs.

    Nothing is started or changed; at Tinker about fifty tokens are spent, and a checkpoint is saved
    and deleted.
    """

    MORE: ClassVar[str] = (
        "Exit status: 0 nothing keeps it from starting, 1 something does, 2 a flag is wrong."
    )

    last: int = Field(10, title="N", description="requests to show (default 10; 0 for none)", ge=0)
    reasons: bool = Field(
        False,
        description="with each request its session's name, why it was taken for main or side, and "
        "its outcome in a sentence",
    )
    no_checks: bool = Field(False, description="show the requests only; nothing is asked or spent")

    def run(self) -> int:
        try:
            settings = self.settings
        except ConfigError as error:
            Finding(str(error), "FAIL").show("settings")
            return 1
        run = settings.run
        Finding(f"{run.method} on {run.model_name}, backend {run.backend}").show("settings")
        well = self.no_checks or asyncio.run(Checks(settings).examine())
        if self.last:
            self._show_recent()
        return 0 if well else 1

    def _show_recent(self) -> None:
        settings, directory = self.settings, self.settings.run.directory
        if not (ledger := directory / FILE).exists():
            return Finding(f"none yet: {directory} holds no ledger", "-").show("requests")
        try:
            with reading(ledger) as rows, rows.moment():
                lines = recent(rows, self.last, settings.training.batch_size, reasons=self.reasons)
        except LedgerError as error:
            return Finding(str(error), "warn").show("requests")
        if not lines:
            return Finding(f"none yet in {ledger}", "-").show("requests")
        if not self.reasons:
            more = "--reasons shows why each was taken for main or side, and more of its outcome."
            lines += ["", more]
        write(["", f"The last requests in {ledger}:", "", *lines])


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has to say, and what to do. `-`: there was nothing to look at."""

    told: str
    state: Literal["ok", "warn", "-", "FAIL"] = "ok"
    remedy: str | None = None

    def show(self, name: str) -> None:
        told = self.told if self.remedy is None else f"{self.told}: {self.remedy}"
        more = ("\n" + " " * 16).join(told.splitlines())
        write([f"{self.state:<5}{name:<11}{more}"])


_LOW_DISK_GB = 2.0
_LAST_STEPS = 16
_MANY_LOST = 0.05
"""Of all main turns. Each is one that nobody judges, so nothing is learned from it."""
_CLOCK_WARNS_S = 10.0
_CLOCK_FAILS_S = 300.0
"""From about here on short-lived keys are refused, and certificates that are new."""
_PATIENCE_S = 5.0
_PRINTS = "`tinker-claw openclaw-config` with these flags prints what belongs there"
_CHECKS = {
    "backend": (),
    "memory": ("backend",),
    "samplers": ("memory",),
    "tokenizer": (),
    "method": ("backend", "tokenizer"),
    "price": (),
    "judge": (),
    "data": (),
    "answers": ("data",),
    "agreement": ("answers",),
    "port": (),
    "clock": ("answers",),
    "model": ("backend",),
    "openclaw": ("model",),
}
"""In their order, and on which others each stands."""


@dataclass(slots=True)
class Checks:
    """One method each, and what earlier ones have found. What keeps the gateway from starting, a
    check raises."""

    settings: Settings
    source: Source | None = None
    offers: Context | None = None
    """How many tokens."""
    failed: list[str] = field(default_factory=list[str])
    """Names of the checks that failed, or stand on one that did."""

    @property
    def remote(self) -> bool:
        return self.settings.run.backend == "tinker"

    @property
    def ledger(self) -> Path:
        return self.settings.run.directory / FILE

    @property
    def service(self) -> str:
        """Tinker's address."""
        from tinker_claw.backends.tinker.access import address  # imports the SDK

        return address(self.settings.run.base_url).base_url

    async def examine(self) -> bool:
        """Make all checks; True: none failed."""
        for name, needs in _CHECKS.items():
            if missing := [other for other in needs if other in self.failed]:
                self.failed.append(name)
                found = Finding(f"not looked at: first mend {missing[0]}", "-")
            else:
                try:
                    found: Finding = await getattr(self, name)()
                except ClawError as error:
                    self.failed.append(name)
                    found = Finding(str(error), "FAIL")
            found.show(name)
        return not self.failed

    # What the gateway itself needs

    async def backend(self) -> Finding:
        await check_backend(self.settings)
        if self.remote:
            return Finding(f"tinker {SDK_VERSION}; {self.service} takes the key and has the model")
        return Finding("torch, peft and safetensors are installed")

    async def memory(self) -> Finding:
        if self.remote:
            return Finding("the service's affair", "-")
        if self.settings.run.model_name in MODELS:
            return Finding("the shipped models take next to none")
        arranged = local.arrange(self.settings, only_reckon=True)
        told = arranged.layout.told()
        if arranged.fit is None or arranged.demand is None:
            return Finding(told)
        told = "\n".join([f"{told}. {arranged.demand.told()}", *arranged.fit.lines()])
        if (wrong := local.why_not(arranged)) is not None:
            raise ConfigError(f"{told}\n{wrong}")
        return Finding(told)

    async def samplers(self) -> Finding:
        settings = self.settings
        if self.remote:
            return Finding("the service samples", "-")
        if settings.local.urls:
            served = [await local.served_at(url, settings) for url in settings.local.urls]
            return Finding("\n".join(served))
        vllm, arranged = local.find_vllm(), local.arrange(settings, only_reckon=True)
        if not arranged.gpus:
            return Finding("the gateway's process samples")
        if vllm is None:
            slow = "the gateway's process samples, many times slower, with a base of its own"
            return Finding(f"no vLLM, so {slow}", "warn", local.GET_VLLM)
        local.check_quantization(settings, vllm)
        return Finding(f"{len(arranged.layout.serve)} of {vllm} will be started")

    async def tokenizer(self) -> Finding:
        self.source = source(self.settings, weights=False)
        renderer = Renderer.load(self.source.tokenizer, self.source.family)
        prompt = renderer.prompt([{"role": "user", "content": "Hello"}], None, hint_message=0)
        told = [f"chat format {renderer.family}, from {self.source.tokenizer}"]
        try:
            switches(renderer.config, {}, "none")
            told.append("thinking can be switched by the request")
        except RequestError:
            told.append("thinking cannot be switched")
        if isinstance(renderer.stream(prompt.tokens), BufferedStream):
            told.append("replies are parsed when they are complete, so agents see them late")
        elif renderer.family == "default":
            told.append("its own template was tried out, and text is streamed")
        else:
            told.append("text and tool calls are streamed")
        no_place = "no place for a hint is known: hints teach nothing here, verdicts still do"
        told.append(no_place if prompt.hint_at is None else "hints have their place")
        warns = prompt.hint_at is None and build(self.settings.run.method).teaching
        return Finding("; ".join([*told, *renderer.refusals]), "warn" if warns else "ok")

    async def method(self) -> Finding:
        settings = self.settings
        method = build(settings.run.method)
        if not self.remote:
            return Finding(f"the local backend can do all of {method.name}")
        assert self.source is not None
        from tinker_claw.backends.tinker.trainer import TinkerTrainer  # imports the SDK

        async with open_trainer(settings, self.source.weights) as trainer:
            has = await trainer.capabilities()
            require(method, settings.training, has)
            self.offers = Context(has.context_tokens, "the service says so")
            assert isinstance(trainer, TinkerTrainer)
            left = await trainer.rehearse(student_topk(method, settings.training))
        told = f"the service can do all of {settings.run.method}: saved, loaded, published, sampled"
        if left:
            return Finding(f"{told}; it cannot delete what that left: {', '.join(left)}", "warn")
        return Finding(told)

    async def price(self) -> Finding:
        settings = self.settings
        if not self.remote:
            return Finding("nothing is billed: it runs on this machine")
        found = price_in_force(settings)
        check_budget(settings, found)
        told = forecast(settings, found, None)
        if told.step_usd is None or told.serve_usd is None:
            return Finding(unknown(settings, found) or "not known")
        return Finding(
            f"about ${told.step_usd:.2f} a step, and ${told.serve_usd:.2f} to serve its turns: "
            f"{told.words} Prices as of {found.as_of}."
        )

    async def judge(self) -> Finding:
        settings = self.settings
        asks = settings.judge
        if asks.judge_prompts:
            Prompts.read(asks.judge_prompts)
        told = ["the base model judges"]
        if asks.judge_url:
            told = [await _answers(asks.judge_url, asks)]
        elif settings.run.model_name in MODELS:
            told = ["the rules that come with the shipped models judge"]
        if asks.second:
            answers = await _answers(asks.second.url, asks.of_second)
            told.append(f"{answers} as the {asks.second.role}")
        return Finding("; ".join(told))

    async def data(self) -> Finding:
        directory = self.settings.run.directory
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(f"{directory} cannot be written; choose another --data-dir")
        free_gb = shutil.disk_usage(there).free / 1e9
        if free_gb < _LOW_DISK_GB:
            raise ConfigError(f"{there} has {free_gb:.1f} GB left; free some, or choose --data-dir")
        if bare := open_to_others(directory):
            told = f"others on this machine may read {len(bare)} of its files ({bare[0]})"
            closes = f"the next start closes them, or you do: chmod -R go= {directory}"
            return Finding(told, "warn", closes)
        held = "holds a run to go on with" if self.ledger.exists() else "is new"
        return Finding(f"{directory} {held}; {free_gb:.0f} GB free")

    async def answers(self) -> Finding:
        """Whether what users say finds the replies that they say it about."""
        if not self.ledger.exists():
            return Finding("no request came yet", "-")
        with reading(self.ledger) as ledger, ledger.moment():
            main = ledger.one("SELECT COUNT(*) FROM turns WHERE kind = 'main'")
            causes = lost_of(ledger)
        if not causes:
            return Finding("none was lost: what follows a reply is known to follow it")
        state = "warn" if sum(causes.values()) >= _MANY_LOST * main else "ok"
        more = "`tinker-claw explain TURN` says more of each"
        return Finding(f"{lost(causes)}; of {main} main turns", state, more)

    async def agreement(self) -> Finding:
        """Of sampler and trainer, when a step last compared them."""
        if not self.ledger.exists():
            return Finding("no step was taken yet", "-")
        with reading(self.ledger) as ledger, ledger.moment():
            steps = read(ledger, "steps", Filter(), _LAST_STEPS)
        compared = [step for step in steps if step["metrics"].get("agrees") is not None]
        if not compared:
            none = f"no step of the last {_LAST_STEPS} could compare sampler and trainer"
            return Finding(none, "-")
        number, metrics = compared[-1]["id"], compared[-1]["metrics"]
        told = f"step {number}: sampler and trainer were {common.apart(metrics)} nats apart"
        if metrics["agrees"]:
            return Finding(f"{told}, which is rounding")
        looks = "`tinker-claw status` says what to look at"
        return Finding(f"{told}, which is no rounding", "warn", looks)

    # What is around it

    async def port(self) -> Finding:
        gateway = self.settings.gateway
        try:
            with listen(gateway.host, gateway.port):
                return Finding(f"{gateway.host}:{gateway.port} is free")
        except ConfigError as taken:
            try:
                health = await asyncio.to_thread(common.ask, self.settings)
            except common.GatewayUnreachable:
                raise taken from None
        here = f"a gateway of this project answers at {common.url_of(self.settings)}"
        state = f"It is {health['status']}"
        if "user" in health:  # not an admin's key: it tells no more than that
            return Finding(f"{here}. {state}")
        other = "choose another --port"
        if "policy_version" not in health:  # it tells strangers no more than whether all is well
            takes = "takes another key than these flags give; give one of its keys"
            raise ConfigError(f"{here}, and {takes}, or {other}")
        name = self.settings.served_name
        served = await asyncio.to_thread(common.served_models, self.settings)
        if served is not None and name not in served:
            serves = f"it serves {', '.join(served)}, not {name}; stop it"
            raise ConfigError(f"{here}, but {serves}, or {other}")
        told, its_own = f"{here}. {health['meaning']}", Path(health["data_dir"])
        if its_own != self.ledger.parent.absolute():
            elsewhere = f"{told} It keeps its records elsewhere, in {its_own}"
            return Finding(elsewhere, "warn", "see --data-dir")
        if health["status"] != "ok":
            return Finding(f"{told} {state}", "warn", "`tinker-claw status` says why")
        return Finding(told)

    async def clock(self) -> Finding:
        """Compared with servers that are asked anyway, and with the newest row of the ledger."""
        judge = self.settings.judge.judge_url
        service = self.service if self.remote and "backend" not in self.failed else None
        told, worst = list[str](), 0.0
        for url in filter(None, (service, judge)):
            if (ahead := await asyncio.to_thread(ahead_of, url)) is not None:
                worst = max(worst, abs(ahead))
                way = f"is {span(ahead)} {'ahead of' if ahead > 0 else 'behind'} that of"
                told.append(f"{'agrees with' if abs(ahead) < _CLOCK_WARNS_S else way} {url}")
        if worst >= _CLOCK_FAILS_S:
            why = "keys and certificates are refused with a wrong clock; set it (with NTP)"
            raise ConfigError(f"this machine's clock {', '.join(told)}: {why}")
        if self.ledger.exists():
            with reading(self.ledger) as rows, rows.moment():
                future = (newest_at(rows) or 0.0) - time.time()
            if future >= _CLOCK_WARNS_S:
                worst = future
                told.append(
                    f"was set back, or was wrong before: the newest row of {self.ledger} will be "
                    f"written in {span(future)}. Nothing is lost, rows are ordered by number; the "
                    "times that are shown are wrong"
                )
        if not told:
            return Finding("no server to compare it with; no row of the ledger is from the future")
        return Finding("; ".join(told), "warn" if worst >= _CLOCK_WARNS_S else "ok")

    async def model(self) -> Finding:
        offers = self.offers = self.offers or await context_of(self.settings)
        context = f"context {offers.tokens} tokens: {offers.source}"
        told = f"served as {self.settings.served_name}; {context}"
        if offers.tokens >= openclaw.SMALLEST_CONTEXT:
            return Finding(told)
        return Finding(f"{told}. That is {openclaw.TOO_FEW}", "warn")

    async def openclaw(self) -> Finding:
        """Whether OpenClaw's configuration, where there is one, points here."""
        settings, path = self.settings, openclaw_file.usual_path()
        try:
            found = openclaw_file.read(path)
        except ConfigError as error:  # OpenClaw's trouble, not the gateway's
            return Finding(str(error), "warn")
        if found.was is None:
            return Finding(f"no configuration at {path}", "-", _PRINTS)
        if settings.gateway.port == 0:
            return Finding("--port 0 lets the gateway choose: nothing can point at it yet", "-")
        mends = f"{_PRINTS}, --write puts it there"
        view = openclaw.ConfigView(found.data, settings)
        if (name := view.provider()) is None:
            nobody = f"no provider in {path} points at {common.url_of(settings)}/v1"
            return Finding(nobody, "warn", mends)
        assert self.offers is not None
        provider = f"the provider {name} in {path}"
        looked = view.misfits(name, self.offers)
        if wrong := [misfit.said for misfit in looked if misfit.said]:
            mends += f" as {openclaw.PROVIDER}" if name != openclaw.PROVIDER else ""
            return Finding("\n".join([f"{provider}:", *wrong, mends]), "warn")
        usual = view.usual_models()
        ours = [name for name, used in usual.items() if view.is_ours(used)]
        named = f"agents that use it: {', '.join(ours) or 'none'}"
        told = f"{provider} fits; {'agents use it' if len(ours) == len(usual) else named}"
        if other := [*view.elsewhere()]:
            note = "what is said elsewhere is neither recorded nor learned from:"
            told = "\n".join([told, note, *other])
        return Finding(told)


async def _answers(url: str, settings: JudgeSettings) -> str:
    async with HttpEndpoint(url, settings) as endpoint:
        await endpoint.answers([{"role": "user", "content": "Answer with the word yes."}], 1)
    return f"{url} answers"


def ahead_of(url: str) -> float | None:
    """By how many seconds this clock is ahead of the server's; None: the server does not tell."""
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    asked = time.time()
    try:
        request = urllib.request.Request(url, method="HEAD")
        try:
            answer = urllib.request.urlopen(request, timeout=_PATIENCE_S, context=anyone)
        except HTTPError as refusal:  # it has a date, too
            answer = refusal
        with answer:
            # Whole seconds, cut off: half a second more is the best guess.
            theirs = parsedate_to_datetime(answer.headers["Date"]).timestamp() + 0.5
    except (OSError, HTTPException, TypeError, ValueError):
        return None
    return (asked + time.time()) / 2 - theirs


# The last requests as a table: what each was, what came of it, and why; no user's words

WIDTH = 110


def recent(rows: Rows, count: int, batch_size: int, *, reasons: bool = False) -> list[str]:
    """The table of log, and what the requests mean together, oldest first; [] without any.

    Args:
        batch_size: samples of a step, where none was taken yet.
        reasons: further lines, for each turn its session's name, the reason of its kind, and its
            outcome in a sentence.
    """
    records = read_log(rows, "turns", Filter(), count, batch_size)
    if not records:
        return []
    turns, run = read_turns(rows, count), read_run_view(rows, batch_size)
    left_out = {"index"} if len({turn.user for turn in turns}) > 1 else {"index", "user"}
    columns = [column for column in COLUMNS["turns"] if column.name not in left_out]
    lines = table(columns, records, width=WIDTH)
    if reasons:
        lines += [line for turn in turns for line in _because(turn, run)]
    for sentence in advice(turns):
        lines += ["", *wrapped(sentence, width=WIDTH)]
    return lines


def _because(turn: TurnView, run: RunView) -> Iterator[str]:
    head = f"{turn.id}  session {turn.session_id} is {turn.session_key!r} of {turn.user!r}"
    yield from wrapped(head, width=WIDTH)
    told = [f"{turn.kind} because: {turn.kind_reason}"]
    if turn.fallback is not None:
        told.append(f"answered by another version because: {turn.fallback}")
    for sentence in (*told, outcome(turn, run).sentence):
        yield from wrapped(sentence, "   ", WIDTH)
