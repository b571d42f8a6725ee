"""What a step will cost, in tokens and dollars. Pure functions, but for the file of the canaries.

Rule: they count as the Tinker adapter bills. Sampling: the prompt once, cached for every further
completion, and what was sampled. Scoring L given tokens: L of prefill and one sampled token. A
datum of L tokens: L - 1 trained. What a cache may save when serving or scoring is measured, never
assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tinker_claw.billing.prices import Price
from tinker_claw.config.canaries import Canary, in_force
from tinker_claw.config.settings import Settings, Training
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Means
from tinker_claw.methods import build
from tinker_claw.methods.base import Method, Signal
from tinker_claw.methods.teachability import EVERY
from tinker_claw.shipped import MODELS
from tinker_claw.telemetry import log
from tinker_claw.types import Sample, Usage

PROMPT_TOKENS = 11_000
"""Of a fresh session's first turn in stock OpenClaw (11.3 k measured; webchat 12.4 k)."""
REPLY_TOKENS = 300
JUDGE_PROMPT_TOKENS = 1_100
"""Instructions, request, reply and next state of one question to the judge."""
VOTE_TOKENS = 500
"""Of one answer of the judge, thinking included."""
UNACCEPTED = 0.5
"""Share of judged turns whose verdict is not +1, of which alone a hint is asked: between the 0.77
that the demo's user rejects at first, and the 0.30 over a whole run of theirs."""
MEASURED_EVERY = 4
"""Where a service bills it, of so many steps one is measured (`learner.guard`)."""
GATE_TURNS = 12
"""Beginnings of sessions that the gate asks a version, at most (`learner.gate`)."""
GATE_TOKENS = 150_000
"""Of the prompts that it asks a version, at most."""
GATE_REPLY = 256
"""Tokens of a fresh reply to it, at most."""
_BYTES, _MARKS = 4, 8
"""UTF-8 bytes of a token, and what a chat format adds to a message: there is no tokenizer yet."""
STALE = 0.5
"""Share of samples that were sampled by an older version, and are scored again."""


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """What turns are like: assumed before there are any, measured later."""

    prompt_tokens: float
    reply_tokens: float
    serve: Usage
    """Of serving one main turn."""
    judge: Usage
    """Of judging one turn."""
    teacher: Usage
    """Of scoring one turn that the teacher is told something of, and of measuring now and then how
    well that teaches."""
    unaccepted: float
    """Share of judged turns whose verdict is not +1; 0: the method asks for no hints."""
    admitted: float
    """Samples per judged turn."""
    hinted: float
    """Share of the samples that a teacher scores."""
    stale: float
    turns: int
    """Turns that the lengths rest on; 0: assumed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One step of a full batch, with the turns that lead to it."""

    judge_turn: Usage
    """Judging one turn."""
    judge: Usage
    teacher: Usage
    train: Usage
    serve: Usage
    """Serving those turns: it would be billed without any learning as well."""
    judge_usd: float | None
    teacher_usd: float | None
    train_usd: float | None
    serve_usd: float | None
    step_usd: float | None
    """Judge, teacher and training; None: a price is not known."""
    words: str
    """What the figures rest on."""


def assumed(
    settings: Settings, *, base_judges: bool, unaccepted: float = UNACCEPTED
) -> TrafficProfile:
    """What the first turns will be like.

    Args:
        base_judges: the service's base model is the judge.
        unaccepted: share of judged turns whose verdict is not +1.
    """
    prompt, reply = PROMPT_TOKENS, REPLY_TOKENS
    method, m = build(settings.run.method), settings.judge.prm_m
    hints = Signal.HINT in method.needs
    texts = settings.training.hint_candidates if hints else 1
    unaccepted = unaccepted if hints else 0.0
    question = Usage(
        prefill=JUDGE_PROMPT_TOKENS,
        cached=(m - 1) * JUDGE_PROMPT_TOKENS,
        sampled=m * VOTE_TOKENS,
    )
    judge = _times(question, 1 + unaccepted)
    return TrafficProfile(
        prompt_tokens=prompt,
        reply_tokens=reply,
        serve=Usage(prefill=prompt, sampled=reply),
        judge=judge if base_judges else Usage(),
        teacher=teacher_usage(method, prompt + reply, texts)
        + _times(teacher_usage(method, prompt + reply, texts + 2), 1 if texts > 1 else 1 / EVERY),
        unaccepted=unaccepted,
        admitted=method.admitted,
        hinted=method.taught,
        stale=STALE,
        turns=0,
    )


def measured(means: Means, otherwise: TrafficProfile, *, base_judges: bool) -> TrafficProfile:
    """What turns were like in this ledger; `otherwise` where nothing was counted."""
    return replace(
        otherwise,
        prompt_tokens=_or(means.prompt_tokens, otherwise.prompt_tokens),
        reply_tokens=_or(means.reply_tokens, otherwise.reply_tokens),
        serve=means.serve or otherwise.serve,
        judge=(means.judge or otherwise.judge) if base_judges else Usage(),
        teacher=means.teacher or otherwise.teacher,
        admitted=means.admitted or otherwise.admitted,
        hinted=_or(means.hinted, otherwise.hinted),
        stale=_or(means.stale, otherwise.stale),
        turns=means.turns,
    )


def estimate(settings: Settings, price: Price, habits: TrafficProfile) -> Estimate:
    """Tokens and dollars per step of `batch_size` samples, and of serving the turns behind it."""
    batch, cfg = settings.training.batch_size, settings.training
    method = build(settings.run.method)
    judged = batch / habits.admitted
    length = round(habits.prompt_tokens + habits.reply_tokens)
    train = Usage()
    for hinted, share in ((True, habits.hinted), (False, 1 - habits.hinted)):
        datums = _datums(method, cfg, rewarded=True, hinted=hinted)
        train += _times(Usage(trained=length - 1), batch * share * datums)
    again = habits.stale + (1 if cfg.kl_beta > 0 else 0)
    again += 1 / measured_every(settings) if cfg.max_step_kl > 0 else 0
    train += _times(_score(length), batch * again)
    train += _gate(in_force(settings), length) if cfg.gate != "off" else Usage()
    judge = _times(habits.judge, judged)
    teacher = _times(habits.teacher, batch * habits.hinted)
    serve = _times(habits.serve, judged)
    return Estimate(
        judge_turn=habits.judge,
        judge=judge,
        teacher=teacher,
        train=train,
        serve=serve,
        judge_usd=price.usd(judge),
        teacher_usd=price.usd(teacher),
        train_usd=price.usd(train),
        serve_usd=price.usd(serve),
        step_usd=price.usd(judge + teacher + train),
        words=_words(settings, price, habits, judged),
    )


def _gate(canaries: Sequence[Canary], length: int) -> Usage:
    """Of asking a version, once there are enough beginnings of sessions: right replies are scored,
    and a fresh one is sampled."""
    each = Usage(prefill=2 * length, sampled=1 + GATE_REPLY)
    return sum(map(_canary, canaries), _times(each, _gate_turns(length)))


def _canary(canary: Canary) -> Usage:
    """About what asking it is billed; `learner.gate` has the exact figure."""
    prompt = sum(_tokens(text) + _MARKS for text in canary.messages) + _MARKS
    replies = [_tokens(text) + 1 for text in canary.replies]
    return Usage(
        prefill=(1 + len(replies)) * prompt + sum(replies),
        sampled=len(replies) + min(GATE_REPLY, 2 * max(replies)),
    )


def _tokens(text: str) -> int:
    return math.ceil(len(text.encode()) / _BYTES)


def _gate_turns(length: int) -> int:
    return min(GATE_TURNS, GATE_TOKENS // max(1, 2 * length))


def measured_every(settings: Settings) -> int:
    """Of so many steps one scores its candidate."""
    return MEASURED_EVERY if settings.run.backend == "tinker" else 1


def step_usage(
    samples: Sequence[Sample], version: int, method: Method, cfg: Training, *, measured: bool
) -> Usage:
    """What one step over these samples will be billed, from policy version `version` on.

    Args:
        measured: the candidate that it makes scores them.
    """
    usage = Usage()
    for sample in samples:
        length = len(sample.prompt) + len(sample.completion.tokens)
        taught = sample.teacher is not None and sample.teacher.weight > 0
        datums = _datums(method, cfg, rewarded=sample.reward is not None, hinted=taught)
        usage += Usage(trained=datums * (length - 1))
        if sample.policy_version != version:
            usage += _score(length)
        usage += _times(_score(length), (cfg.kl_beta > 0) + measured)
    return usage


def teacher_usage(method: Method, tokens: int, texts: int) -> Usage:
    """Of scoring a turn of so many tokens under so many texts that the teacher is told."""
    if method.teaching is None:
        return Usage()
    return _times(_score(tokens + method.teaching.tokens), texts)


def _datums(method: Method, cfg: Training, *, rewarded: bool, hinted: bool) -> int:
    """How many passes a sample goes through (methods/passes.py)."""
    distilled = method.distill > 0 and hinted
    topk = cfg.opd_mode == "topk"
    reward = rewarded and method.reward > 0
    return int(reward or (distilled and not topk) or cfg.kl_beta > 0) + int(distilled and topk)


def _score(tokens: int) -> Usage:
    return Usage(prefill=tokens, sampled=1)


def _times(usage: Usage, factor: float) -> Usage:
    return Usage(
        prefill=round(usage.prefill * factor),
        cached=round(usage.cached * factor),
        sampled=round(usage.sampled * factor),
        trained=round(usage.trained * factor),
    )


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _words(settings: Settings, price: Price, habits: TrafficProfile, judged: float) -> str:
    basis = (
        f"means of the newest {habits.turns} turns in this ledger"
        if habits.turns
        else "assumed, because nothing has been measured yet"
    )
    judge = "a judge that is not billed"
    if habits.judge.sampled:
        judge = f"{settings.judge.prm_m} votes on each verdict"
        asked = f", and on a hint for at most {habits.unaccepted:.0%} of the turns"
        judge += asked if habits.unaccepted else ""
    gate = ""
    if settings.training.gate != "off":
        turns = _gate_turns(round(habits.prompt_tokens + habits.reply_tokens))
        canaries = len(in_force(settings))
        gate = f"; the gate asks {canaries} canaries and up to {turns} first turns"
    kept = f" (${price.storage:g} per GB and month)" if price.storage is not None else ""
    return (
        f"{settings.training.batch_size} samples from {judged:.0f} judged turns; prompts of "
        f"{habits.prompt_tokens:,.0f} tokens, replies of {habits.reply_tokens:,.0f}; {judge}; "
        f"{habits.hinted:.0%} of the samples taught; {habits.stale:.0%} scored again because an "
        f"older version sampled them ({basis}){gate}. Checkpoints in storage are not counted{kept}."
    )


def forecast(settings: Settings, price: Price, ledger: Ledger | None) -> Estimate:
    """A step's cost, from this ledger's means; None: nothing has been measured."""
    base_judges = settings.judge.judge_url is None and settings.run.model_name not in MODELS
    if ledger is None:
        return estimate(settings, price, assumed(settings, base_judges=base_judges))
    means = ledger.means()
    known = _or(means.unaccepted, UNACCEPTED)
    first = assumed(settings, base_judges=base_judges, unaccepted=known)
    return estimate(settings, price, measured(means, first, base_judges=base_judges))


def unknown(settings: Settings, price: Price) -> str | None:
    """The sentence where dollars cannot be told; None: they can."""
    if not price.missing:
        return None
    return (
        f"No dollars: of {settings.run.model_name} the price is not known "
        f"({', '.join(price.missing)}). A table of your own is given with --prices FILE, in the "
        "form of configs/prices.toml; a server of your own needs none."
    )


def announce(settings: Settings, price: Price, ledger: Ledger) -> None:
    """One event at start. A local backend bills nothing and says nothing."""
    if settings.run.backend == "local":
        return
    told = forecast(settings, price, ledger)
    log.info(
        "spend.estimate",
        step_usd=told.step_usd,
        judge_usd=told.judge_usd,
        teacher_usd=told.teacher_usd,
        train_usd=told.train_usd,
        serving_usd=told.serve_usd,
        step_tokens=asdict(told.judge + told.teacher + told.train),
        serving_tokens=asdict(told.serve),
        budget_usd=settings.spend.budget_usd,
        prices_of=price.as_of.isoformat() if price.as_of else None,
        per=told.words,
        note=unknown(settings, price),
    )
