"""From a next state to a sample: judge, then score, then queue.

Rule: what there is to do comes from the ledger, so a restart picks up where this stopped. A judge
or a ledger that fails leaves the turn to be tried again, and no verdict is made up; a teacher that
fails drops the sample, and says why. While the service behind either is away, the turn waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    JudgeError,
    LedgerError,
    OutageError,
    RequestError,
)
from tinker_claw.judge import Judge, Judgement
from tinker_claw.judge.parsing import parse_vote
from tinker_claw.learner.health import Health
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger import Ballot, Ledger
from tinker_claw.methods import Method, reward_of
from tinker_claw.policy import PolicyHolder
from tinker_claw.spending import Spending, teacher_usage
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import HintScores, Turn, Verdict

RETRY_S = 5.0
"""How long a turn rests that got no answer; doubled with every further failure."""
LONGEST_REST_S = 600.0


@dataclass(frozen=True, slots=True)
class JudgingDeps:
    """What judging needs."""

    ledger: Ledger
    judge: Judge
    scorer: HintScorer
    method: Method
    policy: PolicyHolder
    telemetry: Telemetry
    health: Health
    spending: Spending
    on_sample: Callable[[], None]
    concurrency: int
    redact: Callable[[str], str] = str
    """A text as a judge may see it, and as it may be kept; older turns were kept as they came."""


class Judging:
    """The part of the loop between the gateway and the learner."""

    def __init__(self, deps: JudgingDeps) -> None:
        self._deps = deps
        self._slots = asyncio.Semaphore(deps.concurrency)
        self._in_hand: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._wake = asyncio.Event()
        self._wake.set()

    def wake(self) -> None:
        """A next state has come in."""
        self._wake.set()

    async def run(self) -> None:
        """Judge whatever the ledger has to judge, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for turn_id in self._deps.ledger.turns.judgeable():
                    if turn_id not in self._in_hand:
                        self._in_hand.add(turn_id)
                        group.create_task(self._one(turn_id))

    async def _one(self, turn_id: int) -> None:
        """Advance one turn. One that gets no answer rests, and does not hold up the others."""
        try:
            async with self._slots:
                await self._advance(turn_id)
            self._deps.health.judge_works()
            del self._failures[turn_id]
        except _ForgottenError:
            del self._failures[turn_id]
        except (JudgeError, OutageError, LedgerError) as error:
            await self._rest(turn_id, error)
            self._wake.set()
        finally:
            self._in_hand.discard(turn_id)

    async def _rest(self, turn_id: int, error: JudgeError | OutageError | LedgerError) -> None:
        health = self._deps.health
        health.judge_fails(error)
        rest_s = min(RETRY_S * 2 ** self._failures[turn_id], LONGEST_REST_S)
        self._failures[turn_id] += 1
        if isinstance(error, OutageError):  # what is left to do shows who did not answer
            judged = self._deps.ledger.judgements.verdict(turn_id) is not None
            await health.backend.rest("teaching" if judged else "judging", rest_s)
        else:
            await asyncio.sleep(rest_s)

    async def _advance(self, turn_id: int) -> None:
        """Take one turn as far as it goes: to a sample, or to the reason why it is none."""
        ledger = self._deps.ledger
        self._check(turn_id)
        turn = ledger.turns.get(turn_id)
        verdict = ledger.judgements.verdict(turn_id) or await self._ask(turn)
        # Without a place for it in the prompt a hint cannot be scored; the reward still counts.
        usable = self._deps.method.wants_hints and turn.hint_at is not None
        hints = ledger.judgements.hints(turn_id) if usable else ()
        if reason := self._deps.method.refuses(verdict, hints):
            self._refuse(turn_id, reason)
            return
        try:
            teacher = await self._score(turn, hints)
        except OutageError:
            raise
        except (AlignmentError, BackendError, RequestError) as error:
            self._refuse(turn_id, f"the teacher could not score it: {error}")
            return
        self._check(turn_id)
        ledger.samples.add(turn_id, reward_of(verdict), teacher)
        self._deps.telemetry.sample("queued", turn=turn_id)
        self._deps.on_sample()

    async def _ask(self, turn: Turn) -> Verdict:
        state = self._deps.ledger.turns.next_state(turn.id)
        if state is None:
            raise LookupError(f"turn {turn.id} has no next state")
        spending = self._deps.spending
        async with spending.room_to_judge():
            with (
                self._deps.health.backend.watching("judging"),
                spending.paying("judge", turn_id=turn.id),
            ):
                redact = self._deps.redact
                judgement = await self._deps.judge.judge(
                    redact(turn.request_text),
                    redact(turn.reply_text),
                    replace(state, text=redact(state.text)),
                )
        self._record(turn.id, judgement)
        return judgement.verdict

    def _record(self, turn_id: int, judgement: Judgement) -> None:
        self._check(turn_id)
        verdict, redact = judgement.verdict, self._deps.redact
        self._deps.ledger.judgements.add(
            turn_id,
            value=verdict.value,
            verdict_ballots=_ballots(judgement.verdict_answers, redact),
            hint_ballots=_ballots(judgement.hint_answers, redact),
            hints=[redact(hint) for hint in judgement.hints],
        )
        self._deps.telemetry.verdict(
            turn=turn_id, value=verdict.value, votes=verdict.votes, hints=len(judgement.hints)
        )

    async def _score(self, turn: Turn, hints: tuple[str, ...]) -> HintScores | None:
        if not hints:
            return None
        spending = self._deps.spending
        tokens = len(turn.prompt) + len(turn.completion.tokens)
        async with spending.room_to_teach(teacher_usage(tokens, len(hints))):
            with (
                self._deps.health.backend.watching("teaching"),
                spending.paying("teacher", turn_id=turn.id),
            ):
                return await self._deps.scorer.score(turn, hints, self._deps.policy.current)

    def _check(self, turn_id: int) -> None:
        """Raises where the turn was forgotten while somebody was asked about it."""
        if not self._deps.ledger.turns.is_open(turn_id):
            raise _ForgottenError

    def _refuse(self, turn_id: int, reason: str) -> None:
        self._check(turn_id)
        self._deps.ledger.turns.refuse(turn_id, reason)
        self._deps.telemetry.sample("refused", turn=turn_id, reason=reason)


class _ForgottenError(Exception):
    """There is nothing left to judge."""


def _ballots(answers: tuple[str, ...], redact: Callable[[str], str]) -> list[Ballot]:
    return [Ballot(answer=redact(answer), value=parse_vote(answer)) for answer in answers]
