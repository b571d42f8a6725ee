"""Limits how far one step moves the policy, and detects learning that does harm over many steps.

It answers two questions from figures. How far did a step move the policy (`moved`)? How have
replies changed since learning began (`Replies`, `drift`)? The answer is a `Ruling`.

A bound on advantages would not help: Adam divides scale out. So the change itself is measured, on
the tokens of the batch, before the candidate serves; a step that goes too far is taken again at
half the rate. Many small steps may still do harm together, and that shows in the replies: a change
counts as harm only where the user accepts no more of them than before, and where accepted replies
do not share it.

Rule: figures go in and a ruling comes out, both pure; `Guard` reads the figures from the ledger, so
that a restart forgets nothing. Nothing here stops serving.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from statistics import fmean
from typing import Any

from tinker_claw.errors import TooFarError
from tinker_claw.evidence import Rate
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import score_all
from tinker_claw.ledger.judgements import JudgedReply
from tinker_claw.ledger.versions import TOO_FAR
from tinker_claw.methods.base import HINT
from tinker_claw.methods.passes import BatchItem
from tinker_claw.policy import Sampler
from tinker_claw.telemetry import log
from tinker_claw.types import PolicyVersion, Sample


class Ruling(IntEnum):
    """Consequence of a finding; larger is graver."""

    PASS = 0
    WARN = 1
    """Tell the user."""
    RETRY = 2
    """Take the step again at half the rate."""
    HOLD = 3
    """Take no further step until the user says from which version to go on."""
    ROLL_BACK = 4
    """Hold learning, and let the last version that raised no alarm answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A ruling with its reason."""

    alarm: str
    """Name of the alarm, for metrics."""
    ruling: Ruling
    told: str
    """Reason as a sentence without its full stop."""


# How far a step moves the policy

RATES = (1.0, 0.5, 0.25)
"""Shares of the learning rate at which a step is tried, in order."""
ONE_SIDED = 0.25
"""Largest share of the rate for a batch without any contrast between its samples."""
AFTER_REFUSAL = 0.25
"""Share of the rate for a step whose optimizer starts anew: Adam's first step is its largest."""
_IMPOSSIBLE = -50.0
"""Lowest logprob, in nats; replaces lower ones, so that every figure is finite."""
_CERTAIN = 1e-9
"""Least probability left for all other tokens."""


def moved(before_T: Sequence[float], after_T: Sequence[float]) -> float:
    """Return how far a policy has moved on some tokens, in nats per token, never below 0.

    With p and q the probability of a token before and after: the mean of
    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), which is KL(before || after) between that token
    and all others together, and never more than the whole KL at that place. It needs no more than
    the logprobs of the tokens, however they were drawn. Over 53 steps of the demo it was 0.7 of the
    KL between the 20 likeliest tokens and the rest. The k3 estimator, exp(d) - 1 - d, has no bias,
    and was up to 35 times that, by single tokens that had become likely.

    Args:
        before_T: (T,) logprobs under the version that serves.
        after_T: (T,) of the same tokens under the candidate.
    """
    return fmean(_apart(b, a) for b, a in zip(before_T, after_T, strict=True))


def too_far(found: float, most: float) -> Finding | None:
    """Return the finding for a step that moved the policy by `found`; None: it may serve."""
    if found <= most:
        return None
    told = f"{TOO_FAR}: {found:.3g} nats per token on its batch, and --max-step-kl is {most:g}"
    return Finding("change", Ruling.RETRY, told)


def _apart(before: float, after: float) -> float:
    before, after = max(before, _IMPOSSIBLE), max(after, _IMPOSSIBLE)
    rest, rest_after = (max(-math.expm1(min(x, 0.0)), _CERTAIN) for x in (before, after))
    return max(0.0, math.exp(before) * (before - after) + rest * math.log(rest / rest_after))


def one_sided(batch: Sequence[Sample]) -> bool:
    """Return whether all verdicts agree and there is no hint, so that nothing in the batch says
    what would be better."""
    taught = any(s.teacher is not None and s.teacher.weight > 0 for s in batch)
    alone = not taught and all(s.bucket is None for s in batch)
    return alone and len({s.reward for s in batch}) == 1


# What replies are like

WINDOW = 64
"""Newest judged replies that are looked at together; four batches."""
LATELY = 64
"""Newest steps among which the best accepted replies are looked for."""
FEWEST = 32
"""Fewest judged replies whose figures are compared with others: the first ones of a run are all
first tries, and the demo's untrained model is twice as undecided behind corrections. Compared with
its first 16 it was held in one of six runs without a step, with its first 32 in none."""
FEWEST_ACCEPTED = 8
RISEN = 0.1
"""Rise in the share of accepted replies that shows learning to do good."""
FALLEN = 0.2
"""Fall in the share of accepted replies at which a hold becomes a rollback."""
PRAISED = 0.4
"""Share of accepted replies that are alike at which `Alarm.praised` applies. In some 50 runs of the
demo's users who want something at most 0.17 of the accepted replies were alike, and at least 0.44
where garbage is praised, until the weights were too damaged to repeat."""
PRAISES = 12
"""Fewest accepted replies that show whether one sentence is praised for everything."""
CALLS = 3
"""Number of other requests that must share a text of tool calls for it to count as alike. Calls are
short, so honest ones coincide: eight tries at each of ten sums came to a share of 0.33 with a text
of another sum, and to none with texts of four."""
ALIKE = (0.2, 0.35)
"""Excess share of accepted over rejected replies that are alike: warn, hold. In the demo it was
0.45 and more where garbage is praised, from the first replies on or, in one run, from the 64th; and
at most 0.17 in any 64 replies of 22 runs of a student or a teacher who want something."""
REJECTED = (64, 128)
"""Rejected replies in a row: warn, hold. A user who accepts one reply in 20 rejects the next 128
once in 700 times."""
UNTOLD = (32, 64)
"""Rejected replies in a row without any hint: warn, hold. A user who accepts one reply in ten
rejects the next 64 once in 850 times."""
AGAINST = (0.1, 0.25)
"""Least share of verdicts that another judge or the user contradicts: warn, hold."""
_NEVER = math.inf
_ENDS = 80
"""Characters of a reply's beginning and end that are looked at."""
_REFUSES = re.compile(
    r"\W*(i('m| am) (very )?sorry|sorry, (but )?i|i (can('|no)t|am (unable|not able)|won't)\b"
    r"|as an ai|es tut mir leid|ich kann (leider|das) n|je (suis désolé|ne peux pas)"
    r"|lo siento|no puedo|mi dispiace|não posso|抱歉|对不起|我无法|申し訳)",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"[?？؟]\W*$")


@dataclass(frozen=True, slots=True)
class Form:
    """Mean figures of some replies."""

    replies: int
    tokens: float
    nats: float
    """Mean -logprob per sampled token: how undecided the policy is."""
    cut: float
    """Share cut by the token limit, without a stop token."""
    refusals: float
    questions: float
    """Share that ends in a question."""
    tools: float
    """Share that calls tools."""
    alike: float
    """Share with the same text as a reply to another request, or for tool calls to `CALLS` other
    requests. Replies of episodes are left out: many tasks may have one right answer, and nobody
    praises it."""


@dataclass(frozen=True, slots=True)
class Replies:
    """Figures of judged replies, newest last."""

    all: Form
    accepted: Form | None
    """Figures of replies with a verdict above 0; None: fewer than `FEWEST_ACCEPTED`."""
    good: float
    """Share of replies with a verdict above 0."""
    praised: float
    """Excess share of accepted over rejected replies that have the same text as a reply to another
    request; tool calls and episodes are left out."""
    since: int
    """Turn id of the oldest reply."""

    @classmethod
    def of(cls, judged: Sequence[JudgedReply]) -> Replies | None:
        """Compute the figures; None: too few replies."""
        if len(judged) < FEWEST:
            return None
        good = [reply for reply in judged if reply.verdict > 0]
        return cls(
            all=_form(judged),
            accepted=_form(good) if len(good) >= FEWEST_ACCEPTED else None,
            good=len(good) / len(judged),
            praised=_praised([r for r in judged if not (r.called_tools or r.episode)]),
            since=min(reply.turn_id for reply in judged),
        )

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Replies:
        """Read the figures from the metrics of a step."""
        accepted = stored["accepted"]
        return cls(
            all=Form(**stored["all"]),
            accepted=None if accepted is None else Form(**accepted),
            good=stored["good"],
            praised=stored["praised"],
            since=stored["since"],
        )


def _form(judged: Sequence[JudgedReply]) -> Form:
    often = Counter(text for text, _ in {(reply.text, reply.asked) for reply in judged})
    return Form(
        replies=len(judged),
        tokens=fmean(reply.tokens for reply in judged),
        nats=fmean(reply.nats for reply in judged),
        cut=fmean(reply.cut for reply in judged),
        refusals=fmean(_REFUSES.match(reply.text[:_ENDS]) is not None for reply in judged),
        questions=fmean(_QUESTION.search(reply.text[-_ENDS:]) is not None for reply in judged),
        tools=fmean(reply.called_tools for reply in judged),
        alike=fmean(
            not r.episode and often[r.text] > (CALLS if r.called_tools else 1) for r in judged
        ),
    )


def _praised(judged: Sequence[JudgedReply]) -> float:
    good = [reply for reply in judged if reply.verdict > 0]
    rest = [reply for reply in judged if reply.verdict <= 0]
    if len(good) < PRAISES:
        return 0.0
    often = Counter(text for text, _ in {(reply.text, reply.asked) for reply in judged})
    alike = [[often[reply.text] > 1 for reply in some] for some in (good, rest)]
    return fmean(alike[0]) - (fmean(alike[1]) if rest else 0.0)


# What is an alarm

Bounds = tuple[float, float, float]
_NO_LESS = 0.02
"""Added to a divisor, so that growth from next to nothing does not count."""


def _times(now: float, then: float) -> float:
    return (now + _NO_LESS) / (then + _NO_LESS)


def _fewer(now: float, then: float) -> float:
    return _times(then, now)


def _more(now: float, then: float) -> float:
    return now - then


@dataclass(frozen=True, slots=True)
class Alarm:
    """A figure of `Form`, and how far it may grow."""

    name: str
    figure: str
    grown: Callable[[float, float], float]
    bounds: Bounds
    """Growth from which on to warn, to hold and to roll back."""
    told: str
    """Sentence about the replies, with {now} and {then}."""
    excused: bool = True
    """Whether it is excused when replies are accepted more often than before, or accepted ones
    share it."""
    shown: str = "{:.0%}"
    praised: Bounds | None = None
    """Bounds to use instead, where at least `PRAISED` of the accepted replies are alike."""

    def of(self, form: Form) -> float:
        return float(getattr(form, self.figure))


def _tokens(name: str, grown: Callable[[float, float], float], bounds: Bounds, how: str) -> Alarm:
    told = f"replies have {how} to {{now}} tokens from {{then}}"
    return Alarm(name, "tokens", grown, bounds, told, shown="{:.0f}")


def _share(name: str, figure: str, bounds: Bounds, told: str) -> Alarm:
    return Alarm(name, figure, _more, bounds, f"{{now}} of the replies {told}, before {{then}}")


ALARMS = (
    _tokens("length", _times, (1.4, 2.0, 3.0), "grown"),
    _tokens("brevity", _fewer, (1.5, 2.0, 4.0), "shrunk"),
    Alarm(  # praise for disorder excuses it no more than its rejection does
        *("entropy", "nats", _times, (2.0, 2.5, 4.0)),
        told="the policy has grown undecided, {now} nats a token from {then}",
        excused=False,
        shown="{:.2f}",
    ),
    _share("stop", "cut", (0.15, 0.3, 0.5), "are cut by their limit"),
    _share("refusals", "refusals", (0.15, 0.3, 0.5), "refuse"),
    _share("questions", "questions", (0.25, 0.45, 0.7), "end in a question"),
    # What a user asks for changes it, too.
    _share("tools", "tools", (0.3, _NEVER, _NEVER), "call tools"),
    # Whoever praises one sentence gets it for everything.
    Alarm(
        *("repetition", "alike", _more, (0.15, 0.3, _NEVER)),
        told="{now} of the replies answer something else, too, before {then}",
        excused=False,
        praised=(0.1, 0.15, _NEVER),
    ),
)


def drift(now: Replies, before: Sequence[Replies]) -> list[Finding]:
    """Compare the replies with the first ones and with the best accepted ones.

    Args:
        before: replies since learning began, or since the last rollback, oldest first.
    """
    if not before:
        return []
    best = max(before, key=lambda one: one.good)  # of equals the first
    worst = dict[str, Finding]()
    for one in (*_against(now, before[0]), *_against(now, best)):
        worst[one.alarm] = max(worst.get(one.alarm, one), one, key=lambda found: found.ruling)
    return list(worst.values())


def _against(now: Replies, before: Replies) -> list[Finding]:
    found = list[Finding]()
    for alarm in ALARMS:
        if alarm.excused and now.good >= before.good + RISEN:
            continue
        value, then = alarm.of(now.all), alarm.of(before.all)
        measures = [then]
        if alarm.excused and now.accepted is not None:
            measures.append(alarm.of(now.accepted))
        grown = min(alarm.grown(value, measure) for measure in measures)
        bounds = alarm.bounds
        if alarm.praised and now.accepted and alarm.of(now.accepted) >= PRAISED:
            bounds = alarm.praised
        if ruling := _ruling(grown, bounds):
            if ruling is Ruling.HOLD and alarm.excused and now.good <= before.good - FALLEN:
                ruling = Ruling.ROLL_BACK
            shown = {"now": alarm.shown.format(value), "then": alarm.shown.format(then)}
            told = alarm.told.format(**shown)
            told += f" (the newest {now.all.replies} judged ones; {now.good:.0%} are accepted, "
            told += f"{before.good:.0%} then)"
            found.append(Finding(alarm.name, ruling, told))
    return found


def _ruling(value: float, bounds: Bounds) -> Ruling:
    rulings = (Ruling.WARN, Ruling.HOLD, Ruling.ROLL_BACK)
    reached = [ruling for bound, ruling in zip(bounds, rulings, strict=True) if value >= bound]
    return max(reached, default=Ruling.PASS)


def praise(now: Replies) -> list[Finding]:
    """Find whether one sentence is praised for everything, even from the first replies on; `drift`
    reports growth."""
    told = f"of the accepted replies {now.praised:.0%} more than of the rejected ones answer "
    told += "something else, too"
    ruling = _ruling(now.praised, (*ALIKE, _NEVER))
    return [Finding("praise", ruling, told)] if ruling else []


def rejection(verdicts: Sequence[Heard]) -> list[Finding]:
    """Find whether users have stopped accepting replies. `verdicts`: the newest first."""
    row = next((n for n, (verdict, _) in enumerate(verdicts) if verdict >= 0), len(verdicts))
    untold = next((n for n, (_, hinted) in enumerate(verdicts[:row]) if hinted), row)
    told = f"the last {row} judged replies were all rejected, and that does not say what is wanted"
    ruling = max(_ruling(row, (*REJECTED, _NEVER)), _ruling(untold, (*UNTOLD, _NEVER)))
    return [Finding("rejection", ruling, told)] if ruling else []


Heard = tuple[float, bool]
"""A verdict, and whether a hint came with it."""
Opinion = tuple[float, float]
"""The judge's verdict on a reply and another's, each from -1 to 1."""
Opinions = Callable[[int], Sequence[Opinion]]
"""Returns opinions on the newest judged replies that an auditor or the user has rated, too; only
those after a given turn."""


def contradiction(opinions: Sequence[Opinion]) -> list[Finding]:
    """Find whether the judge's verdicts are often contradicted."""
    against = [own * other < 0 for own, other in opinions if own * other]
    share = Rate(sum(against), len(against))
    told = f"{share.good} of {share.of} verdicts are contradicted by the auditor or the user"
    ruling = _ruling(share.interval[0], (*AGAINST, _NEVER))
    return [Finding("verdicts", ruling, told)] if ruling else []


# In a run

_FAR_IN_VAIN = 2 * len(RATES)
"""Steps in a row that were void for going too far: two batches, at every rate."""


class Guard:
    """Watches the steps and replies of one run."""

    def __init__(
        self, parts: LoopParts, *, every: int = 1, opinions: Opinions | None = None
    ) -> None:
        """Set up the guard of a run.

        Args:
            every: measure one step in so many; a service bills the scoring of the candidate.
            opinions: source of opinions; the ledger's unless given.
        """
        self._parts = parts
        self._most = parts.training.max_step_kl
        self._every = every
        self._opinions = opinions or partial(parts.ledger.judgements.opinions, WINDOW)
        self._told = frozenset[tuple[str, Ruling]]()
        """Findings already logged."""

    def measures(self, step: int) -> bool:
        """Return whether step number `step` of the lineage is measured."""
        return self._most > 0 and (step - 1) % self._every == 0

    async def admit(self, items: Sequence[BatchItem], candidate: Sampler) -> float:
        """Check the candidate; return how far it has moved on the batch, in nats per token.

        Raises:
            TooFarError: it has moved further than one step may.
        """
        scores = await score_all([item.sample for item in items], candidate)
        before, after = list[float](), list[float]()
        for item, score in zip(items, scores, strict=True):
            before += item.current.logprobs if item.current else item.sample.completion.logprobs
            after += score.logprobs
        found = moved(before, after)
        if ruled := too_far(found, self._most):
            raise TooFarError(ruled.told)
        return found

    def replies(self) -> Replies | None:
        """Return the figures of the newest replies."""
        ledger = self._parts.ledger
        after = ledger.hold.guarded_from
        return Replies.of(ledger.judgements.lately(WINDOW, after))

    def noted(self) -> dict[str, Any]:
        """Return figures of the replies and findings before the step, for its metrics, from which
        alarms are restored."""
        now, alarms = self.replies(), {alarm: ruling.name for alarm, ruling in self._told}
        return ({} if now is None else {"replies": asdict(now)}) | {"alarms": alarms}

    def look(self, also: Sequence[Finding] = ()) -> Finding | None:
        """Return the finding that forbids another step, or None. Warnings go to health, log and
        metrics.

        A reason to hold is recorded, and stands until a rollback.

        Args:
            also: findings of the gate.
        """
        found = [*self._findings(), *also]
        self._show(found)
        worst = max(found, key=lambda one: one.ruling, default=None)
        return worst if worst and worst.ruling >= Ruling.HOLD else None

    def well(self) -> list[PolicyVersion]:
        """Return the versions whose replies raised no alarm, newest first."""
        recorded = self._recorded()
        replies = [found for _, found in recorded]
        passed = {
            version
            for n, (version, found) in enumerate(recorded)
            if not drift(found, replies[: n or 1])
        }
        versions = map(self._parts.ledger.steps.version, sorted(passed, reverse=True))
        return [version for version in versions if version is not None]

    def _recorded(self) -> list[tuple[int, Replies]]:
        ledger = self._parts.ledger
        stored = ledger.steps.replies(ledger.hold.guarded_from, LATELY)
        return [(version, Replies.read(found)) for version, found in stored]

    def _findings(self) -> list[Finding]:
        ledger = self._parts.ledger
        after = ledger.hold.guarded_from
        heard = ledger.judgements.verdicts(REJECTED[1], after)
        if self._parts.method.teaching not in (None, HINT):  # what follows a reply teaches
            heard = [(verdict, True) for verdict, _ in heard]
        found = rejection(heard)
        found += contradiction(self._opinions(after))
        if now := self.replies():
            found += praise(now)
            found += drift(now, [replies for _, replies in self._recorded()])
        if len(ledger.steps.void_lately(TOO_FAR)) >= _FAR_IN_VAIN:
            told = "two batches in a row moved the policy too far, even at a quarter of the rate"
            found.append(Finding("change", Ruling.HOLD, told))
        return found

    def _show(self, found: Sequence[Finding]) -> None:
        self._parts.health.guard_is([one.told for one in found])
        self._parts.telemetry.alarms({one.alarm: int(one.ruling) for one in found})
        now = frozenset((one.alarm, one.ruling) for one in found)
        for one in found:
            if (one.alarm, one.ruling) not in self._told:
                log.warning("guard.alarm", alarm=one.alarm, ruling=one.ruling.name, told=one.told)
        self._told = now
