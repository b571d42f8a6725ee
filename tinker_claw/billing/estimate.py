"""Estimate of a step's cost: from the bills of the newest steps, else from assumptions.

Rule: it counts as the Tinker adapter bills. Sampling: the prompt once, cached for every further
completion, and what was sampled. Scoring L given tokens: L of prefill and one sampled token. A
datum of L tokens: L - 1 trained. What a cache may save when serving or scoring is measured, never
assumed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tinker_claw.billing.prices import Price, unknown
from tinker_claw.config.settings import Settings, Training
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import build
from tinker_claw.methods.base import Method, Signal
from tinker_claw.shipped import MODELS
from tinker_claw.telemetry import log
from tinker_claw.types import Usage

PROMPT_TOKENS = 11_000
"""Prompt tokens of a session's first turn in stock OpenClaw (11.3 k measured; webchat 12.4 k)."""
REPLY_TOKENS = 300
JUDGE_PROMPT_TOKENS = 2_750
"""Instructions, examples, request, reply and next state of the question to the judge; the first
1,800 are the same in each."""
VOTE_TOKENS = 100
"""Tokens of one answer of the judge (a model of 1.5B: 70 to 130)."""
THINKING_VOTE_TOKENS = 500
"""Tokens of one answer of a judge that thinks (assumed)."""
STALE = 0.5
"""Share of samples that were sampled by an older version, and are scored again."""
CANARIES = Usage(prefill=3_300, sampled=72)
"""Asking a version the shipped canaries (`learner.gate`), measured in the format of Qwen3."""
GATE_TOKENS = 150_000
"""Most prompt tokens that the gate sends to a version."""
NEWEST = 8
"""Steps whose bills the estimate rests on."""
REQUESTS = 10
"""Requests that an agent makes for one message of a person: a tool call each, and the reply."""
LONG_TOKENS = 30_000
"""Prompt tokens of a session that has gone on for a while, shortly before it is compacted."""
OWN_SHARE = 0.5
"""Share of a batch that the person judged, one turn a message; the rest are turns with tools."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One step of a full batch, with the turns that lead to it."""

    price: Price
    step: Usage
    """Judging, the teacher and training."""
    serve: Usage
    """Serving those turns: it would be billed without any learning as well."""
    words: str
    """Explanation of how the figures were obtained."""

    @property
    def step_usd(self) -> float | None:
        """Cost of the step in US dollars; None: a price is not known."""
        return self.price.usd(self.step)

    @property
    def serve_usd(self) -> float | None:
        return self.price.usd(self.serve)


def forecast(settings: Settings, price: Price, ledger: Ledger | None = None) -> Estimate:
    """Estimate a step from this ledger's newest bills, else from assumptions."""
    batch = settings.training.batch_size
    if ledger is not None:
        samples, step, serve = ledger.spend.of_newest_steps(NEWEST)
        if step.trained:
            words = f"{batch} samples, as the {samples} of the newest steps were billed"
            share = batch / samples
            return Estimate(price, _times(step, share), _times(serve, share), words)
    return _assumed(settings, price)


def _assumed(settings: Settings, price: Price) -> Estimate:
    method, batch = build(settings.run.method), settings.training.batch_size
    judged = batch / method.admitted
    votes, judge = _question(settings)
    step = _times(votes, judged) + _learning(settings, PROMPT_TOKENS)
    words = (
        f"{batch} samples from {judged:.0f} judged turns; prompts of {PROMPT_TOKENS:,} tokens, "
        f"replies of {REPLY_TOKENS:,}; {judge}; {method.taught:.0%} of the samples taught; "
        f"{STALE:.0%} scored again because an older version sampled them (assumed, because no step "
        "has been billed yet). Checkpoints in storage are not counted."
    )
    return Estimate(price, step, _times(_served(PROMPT_TOKENS), judged), words)


def message(settings: Settings, prompt_tokens: int) -> Usage:
    """Estimate one message of a person to an agent with tools: its requests served, each judged,
    and its share of a step. Assumed, whatever the ledger says."""
    votes, _ = _question(settings)
    share = 1 / (settings.training.batch_size * OWN_SHARE)
    return (
        _times(_served(prompt_tokens), REQUESTS)
        + _times(votes, REQUESTS)
        + _times(_learning(settings, prompt_tokens), share)
    )


def _question(settings: Settings) -> tuple[Usage, str]:
    """Tokens of one question to the judge, and words on the judge."""
    m, thinks = settings.judge.prm_m, settings.judge.judge_thinking
    if settings.judge.judge_url is not None or settings.run.model_name in MODELS:
        return Usage(), "a judge that is not billed"
    votes = Usage(
        prefill=JUDGE_PROMPT_TOKENS,
        cached=(m - 1) * JUDGE_PROMPT_TOKENS,
        sampled=m * (THINKING_VOTE_TOKENS if thinks else VOTE_TOKENS),
    )
    return votes, f"{m} votes on each turn"


def _learning(settings: Settings, prompt_tokens: int) -> Usage:
    """Tokens of a step of a full batch, without judging: teacher, training, rescoring, gate."""
    cfg, method = settings.training, build(settings.run.method)
    batch, length = cfg.batch_size, prompt_tokens + REPLY_TOKENS
    taught = batch * method.taught
    topk = method.distill_weight > 0 and cfg.opd_mode == "topk"
    datums = batch if method.reward_weight > 0 or not topk else taught
    trained = _times(Usage(trained=length - 1), datums)
    canaries = CANARIES if cfg.gate != "off" else Usage()
    hinted = _times(_hinted(cfg, method, prompt_tokens), taught)
    return _scored(length, batch * STALE) + hinted + trained + canaries


def _hinted(cfg: Training, method: Method, prompt_tokens: int) -> Usage:
    """Tokens of the teacher's work on one reply."""
    if method.teaching is None:
        return Usage()
    with_hint = prompt_tokens + method.teaching.tokens
    if method.writes(cfg):
        return _served(with_hint)
    return _scored(with_hint + REPLY_TOKENS, cfg.hints_scored if Signal.HINT in method.needs else 1)


def _served(prompt_tokens: int) -> Usage:
    return Usage(prefill=prompt_tokens, sampled=REPLY_TOKENS)


def _scored(tokens: int, times: float) -> Usage:
    return _times(Usage(prefill=tokens, sampled=1), times)


def _times(usage: Usage, factor: float) -> Usage:
    return Usage(**{name: round(tokens * factor) for name, tokens in asdict(usage).items()})


def announce(settings: Settings, price: Price, ledger: Ledger) -> None:
    """Log the estimate at the start; nothing for a local backend, which bills nothing."""
    if settings.run.backend == "local":
        return
    estimate = forecast(settings, price, ledger)
    log.info(
        "spend.estimate",
        step_usd=estimate.step_usd,
        serving_usd=estimate.serve_usd,
        message_usd=price.usd(message(settings, PROMPT_TOKENS)),
        long_message_usd=price.usd(message(settings, LONG_TOKENS)),
        step_tokens=asdict(estimate.step),
        serving_tokens=asdict(estimate.serve),
        budget_usd=settings.spend.budget_usd,
        prices_of=price.as_of.isoformat() if price.as_of else None,
        per=estimate.words,
        note=unknown(settings, price),
    )
