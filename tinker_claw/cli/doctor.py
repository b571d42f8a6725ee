"""`run.py doctor`: is all there that this command line needs, and what came of the last requests?

Rule: each check looks at one thing and says one thing, and what to do where it fails: what keeps
run.py from starting is raised, what it can live with is a warning. Checks that stand on a failed
one are left out. Nothing is started or changed, and no secret is repeated; against Tinker about
fifty tokens are spent, and one state and one sampler are saved and deleted again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar, Literal
from urllib.error import HTTPError

from pydantic import Field

from tinker_claw.app.server import listen
from tinker_claw.backends import local
from tinker_claw.backends.model_files import Source, source
from tinker_claw.backends.open import check_backend, open_trainer
from tinker_claw.backends.tinker_sdk import SDK_VERSION
from tinker_claw.billing.budget import check_budget, price_in_force
from tinker_claw.billing.estimate import forecast, unknown
from tinker_claw.cli import common, openclaw, openclaw_file
from tinker_claw.cli.common import Column, Flags, printable, short, span, wrapped, write
from tinker_claw.cli.status import lost
from tinker_claw.config.settings import DEMO, Settings
from tinker_claw.errors import BackendError, ClawError, ConfigError, LedgerError, RequestError
from tinker_claw.files import open_to_others
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.figures import lost_of, newest_at, newest_steps
from tinker_claw.ledger.outcome import RunView, outcome
from tinker_claw.ledger.turns import SET_ASIDE
from tinker_claw.ledger.views import TurnView, read_turns
from tinker_claw.methods import build
from tinker_claw.methods.base import require, student_topk
from tinker_claw.render.format import switches
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.stream import BufferedStream
from tinker_claw.types import Kind

EXIT_WELL = 0
EXIT_FAILED = 1


class DoctorFlags(Flags):
    """Say what is there, what is missing and what to do, for the flags that you would give run.py;
    then what came of the last requests, also while the gateway runs.

    Nothing is started or changed; at Tinker about fifty tokens are spent, and a checkpoint is saved
    and deleted.
    """

    MORE: ClassVar[str] = (
        "Exit status: 0 nothing keeps run.py from starting, 1 something does, 2 a flag is wrong. "
        "All flags of run.py can be given, too."
    )

    last: int = Field(10, title="N", description="requests to show (default 10; 0 for none)", ge=0)
    reasons: bool = Field(
        False,
        description="with each request its session's name, why it was taken for main or side, and "
        "its outcome in a sentence",
    )
    no_checks: bool = Field(False, description="show the requests only; nothing is asked or spent")


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


@dataclass(slots=True)
class CheckContext:
    """The settings, and what earlier checks have found."""

    settings: Settings
    stack: AsyncExitStack
    source: Source | None = None
    offers: openclaw.Context | None = None
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


Check = Callable[[CheckContext], Awaitable[Finding]]
_CHECKS: list[tuple[str, Check, tuple[str, ...]]] = []
"""As they stand below, which is the order in which they are made."""


def check(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[Check], Check]:
    """Adds a check, which stands on others. What keeps run.py from starting, it raises."""

    def add(function: Check) -> Check:
        _CHECKS.append((name, function, needs))
        return function

    return add


def doctor(given: DoctorFlags) -> int:
    """Check the set-up that `run.py` with these flags would use; 0: all is well."""
    try:
        settings = given.settings
    except ConfigError as error:
        Finding(str(error), "FAIL").show("settings")
        return EXIT_FAILED
    run = settings.run
    Finding(f"{run.method} on {run.model_name}, backend {run.backend}").show("settings")
    well = True if given.no_checks else asyncio.run(_examine(settings))
    if given.last:
        _show_recent(settings, given.last, reasons=given.reasons)
    return EXIT_WELL if well else EXIT_FAILED


async def _examine(settings: Settings) -> bool:
    async with AsyncExitStack() as stack:
        seen = CheckContext(settings, stack)
        for name, function, needs in _CHECKS:
            try:
                if missing := [other for other in needs if other in seen.failed]:
                    seen.failed.append(name)
                    found = Finding(f"not looked at: first mend {missing[0]}", "-")
                else:
                    found = await function(seen)
            except ClawError as error:
                seen.failed.append(name)
                found = Finding(str(error), "FAIL")
            found.show(name)
    return not seen.failed


def _show_recent(settings: Settings, count: int, *, reasons: bool) -> None:
    ledger = settings.run.directory / FILE
    if not ledger.exists():
        told = f"none yet: {settings.run.directory} holds no ledger"
        return Finding(told, "-").show("requests")
    try:
        with reading(ledger) as rows, rows.moment():
            turns = read_turns(rows, count)
            run = common.read_run_view(rows, settings.training.batch_size)
    except LedgerError as error:
        return Finding(str(error), "warn").show("requests")
    if not turns:
        return Finding(f"none yet in {ledger}", "-").show("requests")
    write(["", f"The last requests in {ledger}:", ""])
    write(table(turns, run, time.time(), reasons=reasons))
    for sentence in advice(turns):
        write(["", *wrapped(sentence, width=WIDTH)])
    if not reasons:
        more = "--reasons shows why each was taken for main or side, and more of its outcome."
        write(["", more])


# What run.py itself needs

_LOW_DISK_GB = 2.0
_LAST_STEPS = 16
_MANY_LOST = 0.05
"""Of all main turns. Each is one that nobody judges, so nothing is learned from it."""


@check("backend")
async def backend(seen: CheckContext) -> Finding:
    await check_backend(seen.settings)
    if seen.remote:
        return Finding(f"tinker {SDK_VERSION}; {seen.service} takes the key and has the model")
    return Finding("torch, peft and safetensors are installed")


@check("memory", needs=("backend",))
async def memory(seen: CheckContext) -> Finding:
    if seen.remote:
        return Finding("the service's affair", "-")
    if seen.settings.run.model_name == DEMO:
        return Finding("the demo's model takes next to none")
    arranged = local.arrange(seen.settings, only_reckon=True)
    told = arranged.layout.told()
    if arranged.fit is None or arranged.demand is None:
        return Finding(told)
    table = "\n".join([f"{told}. {arranged.demand.told()}", *arranged.fit.lines()])
    if (wrong := local.why_not(arranged)) is not None:
        raise ConfigError(f"{table}\n{wrong}")
    return Finding(table)


@check("samplers", needs=("memory",))
async def samplers(seen: CheckContext) -> Finding:
    settings = seen.settings
    if seen.remote:
        return Finding("the service samples", "-")
    if settings.local.urls:
        return Finding("\n".join([await _served_at(url, settings) for url in settings.local.urls]))
    vllm = local.find_vllm()
    arranged = local.arrange(settings, only_reckon=True)
    if not arranged.gpus:
        return Finding("the gateway's process samples")
    if vllm is None:
        slow = "the gateway's process samples, many times slower, with a base of its own"
        return Finding(f"no vLLM, so {slow}", "warn", local.GET_VLLM)
    local.check_quantization(settings, vllm)
    return Finding(f"{len(arranged.layout.serve)} of {vllm} will be started")


async def _served_at(url: str, settings: Settings) -> str:
    from local_gpu.sample.connect import connect
    from local_gpu.sample.server import NEVER_LOADED

    try:
        key = settings.local.sampler_api_key
        server = await connect(url, "auto", api_key=key.get_secret_value() if key else None)
        try:
            info = await server.info()
            await server.unload(NEVER_LOADED)
        finally:
            await server.aclose()
    except (BackendError, ConfigError) as error:
        raise ConfigError(f"--sampler-urls: {error}") from error
    return f"{url} serves {info.model}, context {info.context_tokens} tokens"


@check("tokenizer")
async def tokenizer(seen: CheckContext) -> Finding:
    seen.source = source(seen.settings, weights=False)
    renderer = Renderer.load(seen.source.tokenizer, seen.source.family)
    prompt = renderer.prompt([{"role": "user", "content": "Hello"}], None, hint_message=0)
    told = f"chat format {renderer.family}, from {seen.source.tokenizer}"
    try:
        switches(renderer.config, {}, "none")
        told += "; thinking can be switched by the request"
    except RequestError:
        told += "; thinking cannot be switched"
    if isinstance(renderer.stream(prompt.tokens), BufferedStream):
        told += "; replies are parsed when they are complete, so agents see them late"
    elif renderer.family == "default":
        told += "; its own template was tried out, and text is streamed"
    else:
        told += "; text and tool calls are streamed"
    if prompt.hint_at is not None:
        return Finding("; ".join([told, "hints have their place", *renderer.refusals]))
    told += "; no place for a hint is known: hints teach nothing here, verdicts still do"
    told = "; ".join([told, *renderer.refusals])
    return Finding(told, "warn" if build(seen.settings.run.method).teaching else "ok")


@check("method", needs=("backend", "tokenizer"))
async def method(seen: CheckContext) -> Finding:
    settings = seen.settings
    method = build(settings.run.method)
    if not seen.remote:
        return Finding(f"the local backend can do all of {method.name}")
    assert seen.source is not None
    trainer = await seen.stack.enter_async_context(open_trainer(settings, seen.source.weights))
    has = await trainer.capabilities()
    require(method, settings.training, has)
    seen.offers = openclaw.Context(has.context_tokens, "the service says so")
    from tinker_claw.backends.tinker.trainer import TinkerTrainer

    assert isinstance(trainer, TinkerTrainer)
    left = await trainer.rehearse(student_topk(method, settings.training))
    told = f"the service can do all of {settings.run.method}: saved, loaded, published, sampled"
    if left:
        return Finding(f"{told}; it cannot delete what that left: {', '.join(left)}", "warn")
    return Finding(told)


@check("price")
async def price(seen: CheckContext) -> Finding:
    settings = seen.settings
    if not seen.remote:
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


@check("judge")
async def judge(seen: CheckContext) -> Finding:
    settings = seen.settings
    if settings.judge.judge_url is None:
        if settings.run.model_name == DEMO:
            return Finding("the rules that come with the demo judge")
        return Finding("the base model judges")
    async with HttpEndpoint(settings.judge.judge_url, settings.judge) as endpoint:
        await endpoint.answers([{"role": "user", "content": "Answer with the word yes."}], 1)
    return Finding(f"{settings.judge.judge_url} answers")


@check("data")
async def data(seen: CheckContext) -> Finding:
    directory = seen.settings.run.directory
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
    held = "holds a run to go on with" if seen.ledger.exists() else "is new"
    return Finding(f"{directory} {held}; {free_gb:.0f} GB free")


@check("answers", needs=("data",))
async def answers(seen: CheckContext) -> Finding:
    """Whether what users say finds the replies that they say it about."""
    if not seen.ledger.exists():
        return Finding("no request came yet", "-")
    with reading(seen.ledger) as ledger, ledger.moment():
        causes, main = lost_of(ledger), ledger.one("SELECT COUNT(*) FROM turns WHERE kind = 'main'")
    if not causes:
        return Finding("none was lost: what follows a reply is known to follow it")
    state = "warn" if sum(causes.values()) >= _MANY_LOST * main else "ok"
    more = "`python run.py explain TURN` says more of each"
    return Finding(f"{lost(causes)}; of {main} main turns", state, more)


@check("agreement", needs=("data",))
async def agreement(seen: CheckContext) -> Finding:
    """Of sampler and trainer, when a step last compared them."""
    if not seen.ledger.exists():
        return Finding("no step was taken yet", "-")
    with reading(seen.ledger) as ledger, ledger.moment():
        steps = newest_steps(ledger, _LAST_STEPS)
    compared = [step for step in steps if step.metrics.get("agrees") is not None]
    if not compared:
        return Finding(f"no step of the last {_LAST_STEPS} could compare sampler and trainer", "-")
    step = compared[-1]
    told = f"step {step.id}: sampler and trainer were {common.apart(step.metrics)} nats apart"
    if step.metrics["agrees"]:
        return Finding(f"{told}, which is rounding")
    look = "`python run.py status` says what to look at"
    return Finding(f"{told}, which is no rounding", "warn", look)


# What is around it

_CLOCK_WARNS_S = 10.0
_CLOCK_FAILS_S = 300.0
"""From about here on short-lived keys are refused, and certificates that are new."""
_PATIENCE_S = 5.0
_PRINTS = "`python run.py openclaw-config` with these flags prints what belongs there"


@check("port")
async def port(seen: CheckContext) -> Finding:
    gateway = seen.settings.gateway
    try:
        with listen(gateway.host, gateway.port):
            return Finding(f"{gateway.host}:{gateway.port} is free")
    except ConfigError as taken:
        url, key = common.url_of(seen.settings), common.key_of(seen.settings)
        try:
            health = await asyncio.to_thread(common.ask, url, key)
        except common.GatewayUnreachable:
            raise taken from None
    here = f"a gateway of this project answers at {url}"
    if "user" in health:  # not an admin's key: it tells no more than that
        return Finding(f"{here}. It is {health['status']}")
    if "policy_version" not in health:  # it tells strangers no more than whether all is well
        raise ConfigError(
            f"{here}, and takes another key than these flags give; give one of its keys, or choose "
            "another --port"
        )
    name = seen.settings.served_name
    served = await asyncio.to_thread(common.served_models, url, key)
    if served is not None and name not in served:
        raise ConfigError(
            f"{here}, but it serves {', '.join(served)}, not {name}; stop it, or choose another "
            "--port"
        )
    told = f"{here}. {health['meaning']}"
    its_own = Path(health["data_dir"])
    if its_own != seen.ledger.parent.absolute():
        told += f" It keeps its records elsewhere, in {its_own}"
        return Finding(told, "warn", "see --data-dir")
    if health["status"] != "ok":
        told += f" It is {health['status']}"
        return Finding(told, "warn", "`python run.py status` says why")
    return Finding(told)


@check("clock")
async def clock(seen: CheckContext) -> Finding:
    asked = [seen.service] if seen.remote and "backend" not in seen.failed else list[str]()
    if seen.settings.judge.judge_url is not None:
        asked.append(seen.settings.judge.judge_url)
    told, worst = list[str](), 0.0
    for url in asked:  # which run.py asks anyway
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
    try:
        with reading(seen.ledger) as rows, rows.moment():
            future = (newest_at(rows) or 0.0) - time.time()
    except LedgerError:
        future = 0.0
    if future >= _CLOCK_WARNS_S:
        worst = max(worst, future)
        told.append(
            f"was set back, or was wrong before: the newest row of {seen.ledger} will be "
            f"written in {span(future)}. Nothing is lost, rows are ordered by number; the times "
            "that are shown are wrong"
        )
    if not told:
        return Finding("no server to compare it with; no row of the ledger is from the future")
    return Finding("; ".join(told), "warn" if worst >= _CLOCK_WARNS_S else "ok")


def ahead_of(url: str) -> float | None:
    """By how many seconds this clock is ahead of the server's; None: the server does not tell."""
    anyone = ssl.create_default_context()
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(url, method="HEAD")
    asked = time.time()
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S, context=anyone) as answer:
            headers: Message[str, str] = answer.headers
    except HTTPError as error:  # a refusal has a date, too
        with error:
            headers = error.headers
    except (OSError, HTTPException, ValueError):
        return None
    middle = (asked + time.time()) / 2
    try:
        # Whole seconds, cut off: half a second more is the best guess.
        theirs = parsedate_to_datetime(headers.get("Date", "")).timestamp() + 0.5
    except (TypeError, ValueError):
        return None
    return middle - theirs


@check("model", needs=("backend",))
async def model(seen: CheckContext) -> Finding:
    offers = seen.offers = seen.offers or await openclaw.context_of(seen.settings)
    told = f"served as {seen.settings.served_name}; context {offers.tokens} tokens: {offers.source}"
    if offers.tokens >= openclaw.SMALLEST_CONTEXT:
        return Finding(told)
    return Finding(f"{told}. That is {openclaw.TOO_FEW}", "warn")


@check("openclaw", needs=("model",))
async def openclaw_points_here(seen: CheckContext) -> Finding:
    """Whether OpenClaw's configuration, where there is one, points here."""
    settings, path = seen.settings, openclaw_file.usual_path()
    try:
        found = openclaw_file.read(path)
    except ConfigError as error:  # OpenClaw's trouble, not the gateway's
        return Finding(str(error), "warn")
    if found is None:
        return Finding(f"no configuration at {path}", "-", _PRINTS)
    if settings.gateway.port == 0:
        return Finding("--port 0 lets the gateway choose: nothing can point at it yet", "-")
    mends = f"{_PRINTS}, --write puts it there"
    name = openclaw.provider_for(found.data, settings)
    if name is None:
        nobody = f"no provider in {path} points at {openclaw.base_url(settings)}"
        return Finding(nobody, "warn", mends)
    assert seen.offers is not None
    provider = f"the provider {name} in {path}"
    looked = openclaw.misfits(found.data, name, settings, seen.offers)
    if wrong := [misfit.said for misfit in looked if misfit.said]:
        mends += f" as {openclaw.PROVIDER}" if name != openclaw.PROVIDER else ""
        return Finding("\n".join([f"{provider}:", *wrong, mends]), "warn")
    used = openclaw.uses(found.data, settings)
    agents = [use for use in used if use.agent is not None]
    ours = [use.agent for use in agents if use.agent is not None and use.here]
    named = f"agents that use it: {', '.join(ours) or 'none'}"
    told = f"{provider} fits; {'agents use it' if len(ours) == len(agents) else named}"
    if other := [str(use) for use in used if not use.here]:
        note = "what is said elsewhere is neither recorded nor learned from:"
        told = "\n".join([told, note, *other])
    return Finding(told)


# The last requests as a table: what each was, what came of it, and why; no user's words

WIDTH = 110
_KEY_LENGTH = 14


def table(
    turns: Sequence[TurnView], run: RunView, now: float, *, reasons: bool = False
) -> list[str]:
    """The lines of the table, oldest turn first.

    Args:
        turns: at least one.
        now: seconds since 1970; turns of another day show it.
        reasons: further lines, for each turn its session's name, the reason of its kind, and its
            outcome in a sentence.
    """
    lines = common.table(list(_columns(turns, run, now)), turns, width=WIDTH)
    if reasons:
        lines += [line for turn in turns for line in _because(turn, run)]
    return lines


def verdict(turn: TurnView) -> str:
    """+1, 0 or -1, `none` where no vote was valid, and whether there is a hint."""
    if not turn.judged:
        return "-"
    return common.vote(turn.verdict) + (" hint" if turn.hints else "")


def _columns(turns: Sequence[TurnView], run: RunView, now: float) -> Iterator[Column]:
    def when(turn: TurnView) -> str:
        at, today = datetime.fromtimestamp(turn.created_at), datetime.fromtimestamp(now).date()
        return at.strftime("%H:%M:%S" if at.date() == today else "%m-%d %H:%M")

    def session(turn: TurnView) -> str:
        """The ledger's number, and the end of the client's name, which tells sessions apart."""
        key = printable(turn.session_key)
        end = key if len(key) <= _KEY_LENGTH else "…" + key[1 - _KEY_LENGTH :]
        return f"{turn.session_id}:{end}"

    def by(turn: TurnView) -> str:
        return f"v{turn.policy_version}" + ("*" if turn.fallback is not None else "")

    def tokens(turn: TurnView) -> str:
        return f"{turn.prompt_tokens}+{turn.completion_tokens}"

    yield Column("turn", lambda turn: str(turn.id), right=True)
    yield Column("when", when)
    if len({turn.user for turn in turns}) > 1:
        yield Column("user", lambda turn: short(turn.user, _KEY_LENGTH))
    yield Column("session", session)
    yield Column("kind", lambda turn: turn.kind)
    if any(turn.call for turn in turns):
        yield Column("for", lambda turn: short(turn.call, 16) or "-")
    yield Column("by", by)
    yield Column("tokens", tokens, right=True)
    yield Column("next", lambda turn: turn.next_role or "-")
    yield Column("verdict", verdict)
    yield Column("outcome", lambda turn: outcome(turn, run).word, least=24, wraps=True)


def _because(turn: TurnView, run: RunView) -> Iterator[str]:
    head = f"{turn.id}  session {turn.session_id} is {turn.session_key!r} of {turn.user!r}"
    yield from wrapped(head, width=WIDTH)
    told = [f"{turn.kind} because: {turn.kind_reason}"]
    if turn.fallback is not None:
        told.append(f"answered by another version because: {turn.fallback}")
    for sentence in (*told, outcome(turn, run).sentence):
        yield from wrapped(sentence, "   ", WIDTH)


# What they mean together

_MOST = 0.75
_FEWEST = 3
"""Fewer turns are no pattern."""


def advice(turns: Sequence[TurnView]) -> list[str]:
    """Sentences on these turns, oldest first; none where learning goes its way."""
    main = [turn for turn in turns if turn.kind is Kind.MAIN]
    return [*_sides(turns), *_followed(main), *_judging(main), *_sampling(turns, main)]


def _sides(turns: Sequence[TurnView]) -> Iterator[str]:
    side = [turn for turn in turns if turn.kind is Kind.SIDE]
    if not _most(side, turns):
        return
    reason, times = Counter(turn.kind_reason for turn in side).most_common(1)[0]
    yield (
        f"{len(side)} of {len(turns)} requests are side turns, which are never trained; the reason "
        f"of {times}: {printable(reason)}. Recaps, titles, compaction, heartbeat and cron are "
        "meant to be side turns. If these were your own messages, the client sends something that "
        "marks them: look for a header X-Turn-Type, for a model name with @v, and for another "
        "proxy in between; --reasons shows the reason of each."
    )
    if len(side) == len(turns):
        yield "There is no main turn among them: nothing can be learned from these requests."


def _followed(main: Sequence[TurnView]) -> Iterator[str]:
    if len(main) < _FEWEST or any(turn.next_role is not None for turn in main):
        return
    why = (
        "although sessions go on. The replies do not come back in the client's history as they "
        "were sent: something between rewrites or drops them."
    )
    if len({turn.session_id for turn in main}) == len(main):
        why = (
            "so there is nothing to judge: every one stands alone in its session. Go on in the "
            "same conversation; if you did, the client sends neither its earlier messages back nor "
            "a name for the session (X-Session-Id)."
        )
    yield f"None of the {len(main)} main turns has a next state, {why}"


def _judging(main: Sequence[TurnView]) -> Iterator[str]:
    aside = [turn for turn in main if turn.untrained_because == SET_ASIDE]
    if aside:
        yield (
            f"{len(aside)} of {len(main)} main turns were set aside: three times the judge gave "
            f"nothing that could be read. `run.py explain {aside[-1].id}` shows what it said; "
            "once that is mended, by --prm-max-tokens or another --judge-url, `run.py rejudge` "
            "takes them up again."
        )
    followed = [turn for turn in main if turn.next_role is not None]
    waiting = [turn for turn in followed if not turn.judged and turn.untrained_because is None]
    if _most(waiting, followed):
        yield (
            f"{len(waiting)} turns wait for the judge: `run.py status` says whether the judge "
            "fails, waits for the service, or is paused by the budget."
        )


def _sampling(turns: Sequence[TurnView], main: Sequence[TurnView]) -> Iterator[str]:
    unfit = [turn for turn in main if (turn.untrained_because or "").startswith("sampled at ")]
    if _most(unfit, main):
        yield (
            f"{len(unfit)} of {len(main)} main turns cannot be trained: "
            f"{unfit[-1].untrained_because}. The client sets it; take temperature, top_p and top_k "
            "out of its settings for this model."
        )
    if count := sum(turn.fallback is not None for turn in turns):
        yield (
            f"{count} of {len(turns)} replies (marked *) came from another version than the "
            "current one, because that one failed; --reasons says why."
        )


def _most(part: Sequence[TurnView], whole: Sequence[TurnView]) -> bool:
    return len(whole) >= _FEWEST and len(part) >= _MOST * len(whole)
