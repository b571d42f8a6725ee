"""Turn a next state into a sample: judge, then score, then queue.

Rule: the ledger has the queue, the failed tries of each turn and when its next one is due, so a
restart picks up where this stopped. No verdict is made up; if the teacher fails, the sample keeps
its reward and records why.

Two kinds of failures are kept apart. Those of a service as a whole (it is away, slow, refuses, or
most of what the judge answers cannot be read) blame no turn: until it answers again one turn asks
at a time. Those of a turn, which fails although others went well since, are counted: after three
tries, with growing rests between them, it is set aside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tinker_claw.conversation.outright import denied
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ClawError,
    ForgottenError,
    GoneError,
    JudgeError,
    LedgerError,
    OutageError,
    RequestError,
)
from tinker_claw.judge.judge import Judge, Judgement
from tinker_claw.learner.breaker import Breaker, UnreadError
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import HintScorer, ends_apart
from tinker_claw.ledger.jobs import TRIES, JudgingJob
from tinker_claw.ledger.lessons import Lesson
from tinker_claw.methods.base import Evidence, Signal, episode_step_reward, reward_of
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import HintScores, NextState, Turn, Verdict

WAITS = Backoff(first_s=5.0, longest_s=60.0, jitter=0.25)
"""Waits of all turns together while a service is away or the ledger refuses."""
RESTS = Backoff(first_s=60.0, longest_s=3600.0)
"""Waits between the tries of a turn whose answers cannot be read."""
CONCURRENCY = 8
"""Turns judged at the same time: the samplers that judge also answer users."""
SILENT_S = 600.0
"""Seconds after which a judge that has not answered a question is failing. It is waited for."""
_NONE = Verdict(votes=(), value=None)
"""Verdict of a reply that nobody has rated."""


class Judging:
    """Judges turns and queues samples, between gateway and learner."""

    def __init__(
        self,
        parts: LoopParts,
        judge: Judge,
        scorer: HintScorer,
        wake_learner: Callable[[], None],
        *,
        concurrency: int = CONCURRENCY,
        redact: Callable[[str], str] = str,
        waits: Backoff = WAITS,
        rests: Backoff = RESTS,
        silent_s: float = SILENT_S,
    ) -> None:
        """Set up judging for a run.

        Args:
            wake_learner: called when a sample has been queued or held, or a turn was refused.
            redact: removes secrets from a text for the judge and for storage; older turns were
                stored unredacted.
        """
        self._parts = parts
        self._ledger = parts.ledger
        self._judge = judge
        self._scorer = scorer
        self._wake_learner = wake_learner
        self._redact = redact
        self._by_outcome = parts.training.episode_reward == "outcome"
        """Whether episodes are rewarded by their outcome alone, so that the judge is not asked."""
        self._rests = rests
        self._silent_s = silent_s
        self._concurrency = concurrency
        self.judge_breaker = Breaker(waits)
        self.teacher_breaker = Breaker(waits)
        self.ledger_breaker = Breaker(waits)
        self._breakers = self.judge_breaker, self.teacher_breaker, self.ledger_breaker
        self._busy: dict[int, Breaker | None] = {}
        """Turns in hand, and what each asks; None: neither judge nor teacher yet."""
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Look for work: a next state or a rating has come in, or a turn is taken up again."""
        self._changed.set()

    async def run(self) -> None:
        """Judge all turns that can be judged, until cancelled. May be called again after an
        unexpected end."""
        self._busy.clear()  # a task cancelled before it began has not removed itself
        self._show()
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                now = time.time()
                jobs = self._waiting(now)
                for job in jobs:
                    if self._may_start(job, now):
                        self._busy[job.turn_id] = self._breaker_of(job)
                        group.create_task(self._try(job))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_s(jobs, now)):
                        await self._changed.wait()

    def _waiting(self, now: float) -> list[JudgingJob]:
        """Read the queue; [] while the ledger cannot be read."""
        outages = self._parts.health.outages
        try:
            jobs = self._ledger.jobs.due()
        except LedgerError as error:
            self.ledger_breaker.failed(error, now)
            self._show()
            return []
        ended = not jobs and self.ledger_breaker.end_outage()
        if not any(job.due_at for job in jobs):  # no turn waits for the service any more
            outages.over("judging")
            outages.over("teaching")
            ended |= self.judge_breaker.end_outage() | self.teacher_breaker.end_outage()
        if ended:
            self._show()
        if not jobs:  # an outcome may have come though nothing is left to judge
            self._wake_learner()
        return jobs

    def _breaker_of(self, job: JudgingJob) -> Breaker | None:
        """Return what a turn waits for: the judge's verdict, or the teacher that was away."""
        if not job.judged and not (job.episode and self._by_outcome):
            return self.judge_breaker
        return self.teacher_breaker if job.due_at else None

    def _may_start(self, job: JudgingJob, now: float) -> bool:
        """Return whether a turn may be advanced beside those in hand."""
        busy, asks = self._busy, self._breaker_of(job)
        if job.turn_id in busy or len(busy) >= self._concurrency or job.due_at > now:
            return False
        needs_none = self._parts.health.learner.ended and self._parts.training.lessons == "off"
        if asks is self.judge_breaker and needs_none:  # no verdict would be used
            return False
        others = sum(other is asks for other in busy.values())
        return self.ledger_breaker.lets(now, len(busy)) and (asks is None or asks.lets(now, others))

    def _wait_s(self, jobs: Sequence[JudgingJob], now: float) -> float | None:
        """Return the seconds until something is due that waits for time alone; None: nothing is."""
        due = [*(job.due_at for job in jobs), *(breaker.asks_at for breaker in self._breakers)]
        return min((at - now for at in due if at > now), default=None)

    async def _try(self, job: JudgingJob) -> None:
        """Advance one turn, and record it if that fails."""
        try:
            await self._advance(job.turn_id)
        except ForgottenError:
            pass
        except LedgerError as error:
            self.ledger_breaker.failed(error, time.time())
        except (OutageError, JudgeError) as error:
            self._postpone(job, error)
        except Exception as error:  # unexpected: this part ends, and starts again
            self._postpone(job, error)
            raise
        else:
            self.ledger_breaker.answered()
        finally:
            self._busy.pop(job.turn_id, None)
            self._show()
            self.wake()  # another one may begin now

    def _postpone(self, job: JudgingJob, error: Exception) -> None:
        """Record a failed try and when the next one is due, or set the turn aside after its last.
        A turn that is not to blame is due at once, behind those that wait; its breaker holds it."""
        now = time.time()
        breaker = self._busy[job.turn_id] or self.judge_breaker
        blamed = breaker.failed(error, now)
        tries = job.tries + blamed
        rests = blamed or breaker.trouble is None
        due_at = now + self._rests.after(max(1, tries)) if rests else now
        message = str(error) if isinstance(error, ClawError) else f"{type(error).__name__}: {error}"
        try:
            if breaker is self.judge_breaker and self._ledger.judgements.verdict(job.turn_id):
                return  # it was rated meanwhile
            error_text = self._redact(message)
            postponed = self._ledger.jobs.postpone(job.turn_id, tries, due_at, error_text)
        except LedgerError as refused:
            self.ledger_breaker.failed(refused, now)
            return
        if postponed and blamed:
            log.warning("turn.unjudged", turn=job.turn_id, tries=tries, of=TRIES)
        if postponed and tries >= TRIES:
            self._parts.telemetry.sample("set_aside", turn=job.turn_id)

    def _show(self) -> None:
        """Report the judge's state to health."""
        failing = next((breaker for breaker in self._breakers if breaker.trouble), None)
        if failing is None:
            self._parts.health.judge_is("ok")
        else:
            away = isinstance(failing.error, OutageError)
            self._parts.health.judge_is("stalled" if away else "failing", failing.trouble)

    async def _advance(self, turn_id: int) -> None:
        """Advance one turn as far as possible: to a sample, or to the reason why it is none."""
        ledger, judgements = self._ledger, self._ledger.judgements
        self._check_open(turn_id)
        turn = ledger.turns.get(turn_id)
        verdict = self._verdict(turn)
        if verdict is None:
            verdict = await self._judge_turn(turn)
        hints = judgements.hints(turn_id)
        if verdict.value == 1:
            self._show_to_corrected(turn_id)
        texts = self._teacher_texts(turn, verdict, hints)
        refuses = partial(self._parts.method.refuses, verdict, cut=turn.cut, episode=turn.episode)
        if reason := refuses(texts):
            self._refuse(turn_id, TurnRefusal(reason))
            return
        scored = await self._taught(turn, texts)
        self._check_open(turn_id)
        now = self._verdict(turn) or _NONE, judgements.hints(turn_id)
        if (verdict, hints) != now:
            self.wake()  # feedback has changed them meanwhile
            return
        teacher = scored if isinstance(scored, HintScores) else None
        untaught = scored if isinstance(scored, TurnRefusal) else None
        if teacher is None and (reason := refuses(())):
            self._refuse(turn_id, untaught or TurnRefusal(reason))
            return
        reward = episode_step_reward(verdict) if turn.episode else reward_of(verdict)
        taught, rated = teacher is not None, verdict.score is not None
        method, cfg = self._parts.method, self._parts.training
        lacks = method.lacks(reward, cfg, taught=taught, cut=turn.cut, rated=rated)
        ledger.samples.add(turn_id, reward, teacher, untaught, None if turn.episode else lacks)
        self._parts.telemetry.sample("held" if turn.episode else "queued", turn=turn_id)
        self._wake_learner()

    def _verdict(self, turn: Turn) -> Verdict | None:
        """Return the verdict that counts, or None where the judge has to be asked."""
        if turn.episode and self._by_outcome:  # whatever the step's own score
            return _NONE
        return self._ledger.judgements.verdict(turn.id)

    async def _judge_turn(self, turn: Turn) -> Verdict:
        state = self._ledger.turns.next_state(turn.id)
        if state is None:  # an episode's last step; its outcome is enough
            return _NONE
        # By the form of the session's own harness: no judge is asked.
        if (vote := denied(state, turn.client)) is not None:
            verdict = Verdict(votes=(), value=vote)
            self._record(turn.id, Judgement(verdict), ())
            return verdict
        await self._parts.spending.room()
        if (verdict := self._ledger.judgements.verdict(turn.id)) is not None:
            return verdict  # by feedback, while waiting for budget
        self._check_open(turn.id)  # forgotten while waiting for budget?
        tells = self._parts.training.lessons != "off" and not turn.episode
        lessons = self._ledger.lessons.for_judge(turn.id) if tells else []
        redact = self._redact
        silent = asyncio.get_running_loop().call_later(self._silent_s, self._is_silent)
        try:
            with (
                self._parts.health.outages.watching("judging"),
                self._parts.spending.paying("judge", turn_id=turn.id) as account,
            ):
                judgement = await self._judge.judge(
                    redact(turn.request_text),
                    redact(turn.reply_text),
                    replace(
                        state,
                        text=redact(state.text),
                        beside=tuple((writer, redact(text)) for writer, text in state.beside),
                    ),
                    asked_by=turn.asked_by,
                    images=turn.images,
                    lessons=[lesson.text for lesson in lessons],
                    charge=account.add,
                )
        finally:
            silent.cancel()
        verdict, read = judgement.verdict, sum(v is not None for v in judgement.verdict.votes)
        if not read:
            raise UnreadError(judgement.answers[0])
        self._record(turn.id, judgement, lessons)
        self.judge_breaker.answered(read / len(verdict.votes))
        # Explicit feedback that came meanwhile takes precedence.
        return self._ledger.judgements.verdict(turn.id) or verdict

    def _is_silent(self) -> None:
        """Report that the judge has not answered for long; an answer reports that it is back."""
        message = f"the judge has not answered for {self._silent_s:g} s; its answer is waited for"
        self._parts.health.judge_is("failing", message)

    def _teacher_texts(
        self, turn: Turn, verdict: Verdict, hints: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the texts that the teacher can be told; () where its prompt has no place for
        them."""
        parts = self._parts
        if parts.method.teaching is None or turn.hint_at is None:
            return ()
        state, demonstration = parts.ledger.turns.next_state(turn.id), None
        if Signal.DEMONSTRATION in parts.method.needs:
            demonstration = parts.ledger.judgements.demonstration(turn.id)
        if hints and verdict.source != "judge":  # an explicit reason says more than what followed
            state = NextState("user", hints[0])
        evidence = Evidence(verdict, hints, state, demonstration)
        # A text may be empty: a tool's result, or one that was forgotten.
        texts = parts.method.teaching.tells(evidence)
        return tuple(self._redact(text) for text in texts if text)

    def _show_to_corrected(self, turn_id: int) -> None:
        """Take up turns that were refused because they lacked this reply as their example."""
        method, judgements = self._parts.method, self._ledger.judgements
        if Signal.DEMONSTRATION not in method.needs:
            return
        lacking = method.refuses(Verdict(votes=(), value=-1), ())
        if lacking and judgements.take_up_corrected(turn_id, lacking):
            self.wake()

    def _record(self, turn_id: int, judgement: Judgement, lessons: Sequence[Lesson]) -> None:
        self._check_open(turn_id)
        verdict, wish, redact = judgement.verdict, judgement.wish, self._redact
        ids = [None, *(lesson.id for lesson in lessons)]
        candidate = self._ledger.judgements.add(
            turn_id,
            value=verdict.value,
            weight=verdict.weight,
            ballots=[*zip(map(redact, judgement.answers), verdict.votes, strict=True)],
            hints=[*map(redact, judgement.hints)],
            prompt=judgement.prompt,
            wish=wish if wish and redact(wish.text) == wish.text else None,
            repeats=ids[judgement.repeats],
            contradicts=ids[judgement.contradicts],
        )
        if candidate is not None:
            log.info("lesson.candidate", lesson=candidate)
        value, votes, hints = verdict.value, verdict.votes, len(judgement.hints)
        self._parts.telemetry.verdict(turn=turn_id, value=value, votes=votes, hints=hints)

    async def _taught(self, turn: Turn, texts: tuple[str, ...]) -> HintScores | TurnRefusal | None:
        """Return the teacher's scores, or why there are none; None: there is nothing to tell it. A
        failure leaves the reward."""
        if not texts:
            return None
        spending, method = self._parts.spending, self._parts.method
        paper = self._parts.training.recipe == "paper"
        hinted = not paper and Signal.HINT in method.needs
        if hinted and not self._ledger.judgements.follows_hints(turn.id):
            return TurnRefusal(Reason.UNFOLLOWED_HINTS)
        writes = method.writes(self._parts.training)
        if writes and turn.secret:
            return TurnRefusal(Reason.HOLDS, "in the prompt, which the teacher might repeat")
        await spending.room()
        self._check_open(turn.id)  # forgotten while waiting for budget?
        fitting = self._scorer.fitting(turn, texts)
        if isinstance(fitting, TurnRefusal):
            return fitting
        self._busy[turn.id] = self.teacher_breaker
        try:
            with (
                self._parts.health.outages.watching("teaching"),
                spending.paying("teacher", turn_id=turn.id) as account,
            ):
                try:
                    scores = await self._scorer.teach(turn, fitting, account.add)
                except GoneError as error:  # no reply is to blame
                    raise OutageError(str(error)) from error
        except OutageError:
            raise
        except (AlignmentError, BackendError, RequestError) as error:
            return TurnRefusal(Reason.UNSCORED, str(error))
        self.teacher_breaker.answered()
        if scores is None or (not (writes or paper) and ends_apart(turn.completion, scores)):
            return TurnRefusal(Reason.ENDLESS_HINT)
        if self._redact(scores.text) != scores.text:
            return TurnRefusal(Reason.HOLDS, "in what the teacher wrote")
        return scores

    def _check_open(self, turn_id: int) -> None:
        """Raise where the turn was forgotten, refused or made a sample meanwhile."""
        if not self._ledger.turns.is_open(turn_id):
            raise ForgottenError

    def _refuse(self, turn_id: int, refusal: TurnRefusal) -> None:
        self._check_open(turn_id)
        self._ledger.turns.refuse(turn_id, refusal)
        self._parts.telemetry.sample("refused", turn=turn_id, reason=str(refusal))
        self._wake_learner()  # an episode may be complete without it
