"""Turn a next state into a sample: judge, then score, then queue.

Rule: the work is one queue, which comes from the ledger, so a restart picks up where this stopped.
No verdict is made up; if the teacher fails, the sample keeps its reward and records why.

Two kinds of failures are kept apart. Those of the judge (it is away, slow, refuses, or most of what
it answers cannot be read) blame no turn: until it answers again one turn asks at a time. Those of a
turn, which fails although others went well since, are counted: after three tries, with growing
rests between them, it is set aside.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from tinker_claw.conversation.outright import denied
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ForgottenError,
    GoneError,
    JudgeError,
    LedgerError,
    OutageError,
    RequestError,
)
from tinker_claw.judge.judge import Judge, Judgement
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import HintScorer, ends_apart
from tinker_claw.ledger.judgements import TRIES, Ballot
from tinker_claw.ledger.lessons import Lesson
from tinker_claw.methods.base import Evidence, Signal, reward_of, step_reward
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import HintScores, NextState, Turn, Verdict, Wish

WAITS = Backoff(first_s=5.0, longest_s=600.0, jitter=0.25)
"""Waits between attempts while the judge fails, the service is away, or the ledger refuses."""
RESTS = Backoff(first_s=60.0, longest_s=3600.0)
"""Waits between the tries of a turn whose answers cannot be read."""
CONCURRENCY = 8
"""Turns judged at the same time: the samplers that judge also answer users."""
LATELY = 8
"""Number of latest tries that show whether the judge works."""
SILENT_S = 600.0
"""Seconds after which a judge that has not answered a question is failing. It is waited for."""

_NONE = Verdict(votes=(), value=None)
"""Verdict of a reply that nobody has rated."""


class _Unread(JudgeError):
    """Raised when the judge answered, and nothing can be read."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """A turn's wait for its next try."""

    until: float
    """Time of the event loop."""
    because: Literal["judge", "teacher", "ledger", "turn"]
    """What failed. Once the judge or the teacher answers again, the rest is over."""


class _RecentAnswers:
    """The judge's latest answers."""

    def __init__(self) -> None:
        self._last = deque[tuple[int, int]](maxlen=LATELY)
        """Readable answers and all answers of each try."""
        self.well = False
        """Whether the last try succeeded."""
        self.away: OutageError | JudgeError | None = None
        """Why the last try got no answers, unless the turn was at fault."""

    @property
    def trouble(self) -> str | None:
        """Reason why the judge fails as a whole; None: it works, as far as known."""
        return str(self.away) if self.away else self._mostly_lost()

    def note(self, read: int, of: int) -> None:
        self._last.append((read, of))
        self.well, self.away = read > 0, None

    def blames(self) -> bool:
        """Record that a turn's try failed; return whether the turn is to blame: the judge works,
        and another has succeeded since the last failure."""
        well, self.well = self.well, False
        return well and self._mostly_lost() is None

    def _mostly_lost(self) -> str | None:
        if sum(read / of for read, of in self._last) >= len(self._last) / 2:
            return None
        read, of = (sum(some) for some in zip(*self._last, strict=True))
        return (
            f"{of - read} of the judge's last {of} answers could not be read: it does not answer "
            "in the form it is asked for, refuses, or is cut off"
        )


class Judging:
    """Judges turns and queues samples, between gateway and learner."""

    def __init__(
        self,
        parts: LoopParts,
        judge: Judge,
        scorer: HintScorer,
        on_sample: Callable[[], None],
        *,
        concurrency: int = CONCURRENCY,
        redact: Callable[[str], str] = str,
        waits: Backoff = WAITS,
        rests: Backoff = RESTS,
        silent_s: float = SILENT_S,
    ) -> None:
        """Set up judging for a run.

        Args:
            on_sample: called when a sample has been queued or held, or a turn was refused.
            redact: removes secrets from a text for the judge and for storage; older turns were
                stored unredacted.
        """
        self._parts = parts
        self._judge = judge
        self._scorer = scorer
        self._on_sample = on_sample
        self._redact = redact
        self._by_outcome = parts.training.episode_reward == "outcome"
        """Whether episodes are rewarded by their outcome alone, so that the judge is not asked."""
        hinted = Signal.HINT in parts.method.needs
        self._doubts_hints = hinted and parts.training.recipe != "paper"
        """Whether hints are only taught while the model does what they ask."""
        self._waits = waits
        self._rests = rests
        self._silent_s = silent_s
        self._concurrency = concurrency
        self._queue: dict[int, bool] = {}
        """Turns to advance, oldest first, and whether each has a verdict."""
        self._in_hand: set[int] = set()
        self._asking: set[int] = set()
        """Turns in hand that wait for the judge."""
        self._resting: dict[int, _Rest] = {}
        self._failed = Counter[int]()
        """Failures in a row of each turn."""
        self._recent = _RecentAnswers()
        self._probe_at = 0.0
        """Time of the event loop from which one turn may ask a judge that fails."""
        self._look, self._look_at, self._refused = True, 0.0, 0
        """Whether to look for work in the ledger; from when on; and how often it refused."""
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Look for work: a next state or a rating has come in, or a turn is taken up again."""
        self._look = True
        self._changed.set()

    async def run(self) -> None:
        """Judge all turns that can be judged, until cancelled. May be called again after an
        unexpected end: the state of turns and judge is kept."""
        self._in_hand.clear()  # a task cancelled before it began has not removed itself
        self._asking.clear()
        self._show()
        self.wake()
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                now = asyncio.get_running_loop().time()
                if self._look and now >= self._look_at:
                    self._look_for_work(now)
                for turn_id in self._next(now):
                    self._in_hand.add(turn_id)
                    group.create_task(self._handle(turn_id))
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._due_after(now)):
                        await self._changed.wait()

    def _look_for_work(self, now: float) -> None:
        """Read the queue from the ledger. A rating ends the rest of its turn."""
        try:
            turn_ids = self._parts.ledger.turns.judgeable()
            rated = {*self._parts.ledger.judgements.judged(turn_ids)}
        except LedgerError as error:
            self._refused += 1
            self._look_at = now + self._waits.after(self._refused)
            self._parts.health.judge_is("failing", str(error))
            return
        self._look, self._refused = False, 0
        self._queue = {turn_id: turn_id in rated for turn_id in turn_ids}
        for turn_id, rest in [*self._resting.items()]:
            if turn_id not in self._queue:
                self._done(turn_id)
            elif self._queue[turn_id] and rest.because in ("judge", "turn"):
                del self._resting[turn_id]
        if not turn_ids:  # an outcome may have come though nothing is left to judge
            self._on_sample()

    def _next(self, now: float) -> list[int]:
        """Return the turns to advance now: those that failed least, the oldest first."""
        chosen = list[int]()
        for turn_id in sorted(self._queue, key=self._failed.__getitem__):
            if len(self._in_hand) + len(chosen) >= self._concurrency:
                break
            rest = self._resting.get(turn_id)
            if turn_id in self._in_hand or (rest is not None and rest.until > now):
                continue
            if self._asks(turn_id):
                if self._needs_none():
                    continue
                if self._recent.trouble and (self._asking or self._probe_at > now):
                    continue
                self._asking.add(turn_id)
            chosen.append(turn_id)
        return chosen

    def _asks(self, turn_id: int) -> bool:
        """Return whether a turn waits for the judge's verdict."""
        turns = self._parts.ledger.turns
        return not self._queue[turn_id] and not (self._by_outcome and turns.get(turn_id).episode)

    def _needs_none(self) -> bool:
        """Return whether no verdict would be used: learning has ended, and no lesson is told."""
        return self._parts.health.learner.ended and self._parts.training.lessons == "off"

    def _due_after(self, now: float) -> float | None:
        """Return when something is due that waits for time alone; None: nothing is."""
        rests = [rest.until for rest in self._resting.values()]
        return min((at for at in (*rests, self._probe_at, self._look_at) if at > now), default=None)

    async def _handle(self, turn_id: int) -> None:
        """Advance one turn."""
        try:
            await self._advance(turn_id)
        except ForgottenError:
            self._done(turn_id)
        except OutageError as error:
            self._service_is_away(turn_id, error)
        except LedgerError as error:
            self._parts.health.judge_is("failing", str(error))
            self._rest(turn_id, "ledger")
        except JudgeError as error:
            self._no_answer(turn_id, error)
        except Exception as error:  # unexpected: this part ends, and starts again
            message = f"{type(error).__name__}: {error}"
            self._try_later(turn_id, message, blamed=self._recent.blames())
            raise
        else:
            self._done(turn_id)
        finally:
            self._in_hand.discard(turn_id)
            self._asking.discard(turn_id)
            self._changed.set()

    def _show(self) -> None:
        """Report the judge's state to health."""
        trouble, away = self._recent.trouble, isinstance(self._recent.away, OutageError)
        state = "stalled" if away else "failing"
        self._parts.health.judge_is(state if trouble else "ok", trouble)

    def _done(self, turn_id: int) -> None:
        self._queue.pop(turn_id, None)
        self._failed.pop(turn_id, None)
        self._resting.pop(turn_id, None)
        if not self._resting:  # no turn waits for the service any more
            self._parts.health.backend.over("judging")
            self._parts.health.backend.over("teaching")
            if isinstance(self._recent.away, OutageError):
                self._recent.away = None
        self._show()

    def _answers_again(self, what: Literal["judge", "teacher"]) -> None:
        """End the rests of all turns that wait for it."""
        for turn_id in [turn_id for turn_id, rest in self._resting.items() if rest.because == what]:
            del self._resting[turn_id]

    def _service_is_away(self, turn_id: int, error: OutageError) -> None:
        """Let the turn wait; neither turn nor judge is at fault."""
        if turn_id in self._asking:
            self._recent.well, self._recent.away = False, error
            self._show()
            self._rest(turn_id, "judge")
        else:
            self._parts.health.judge_is("stalled", str(error))
            self._rest(turn_id, "teacher")

    def _no_answer(self, turn_id: int, error: JudgeError) -> None:
        """Record that the judge gave no readable answer."""
        blamed, unread = self._recent.blames(), isinstance(error, _Unread)
        self._recent.note(0, self._judge.votes)
        if not blamed:
            self._recent.away = None if unread else error
            self._probe_at = asyncio.get_running_loop().time() + self._waits.first_s
        self._show()
        if self._parts.ledger.judgements.verdict(turn_id) is None:
            self._try_later(turn_id, str(error), blamed=blamed, paid=unread)
        else:  # rated outright, meanwhile
            self.wake()

    def _try_later(self, turn_id: int, answer: str, *, blamed: bool, paid: bool = True) -> None:
        """Try the turn again later, or set it aside after its last try.

        Args:
            paid: whether the try cost money; an error does not.
        """
        parts = self._parts
        if not parts.ledger.turns.is_open(turn_id):  # forgotten, and the answer may quote it
            self._done(turn_id)
            return
        if blamed:
            try:
                tries = parts.ledger.judgements.add_in_vain(turn_id, self._redact(answer))
            except ForgottenError:
                self._done(turn_id)
                return
            except LedgerError as refused:
                parts.health.judge_is("failing", str(refused))
                self._rest(turn_id, "ledger")
                return
            log.warning("turn.unjudged", turn=turn_id, tries=tries, of=TRIES)
            if tries >= TRIES:
                self._done(turn_id)
                parts.telemetry.sample("set_aside", turn=turn_id)
                return
        because = "turn" if blamed or not self._recent.trouble else "judge"
        self._rest(turn_id, because, self._rests if paid or blamed else self._waits)

    def _rest(
        self,
        turn_id: int,
        because: Literal["judge", "teacher", "ledger", "turn"],
        backoff: Backoff | None = None,
    ) -> None:
        self._failed[turn_id] += 1
        wait_s = (backoff or self._waits).after(self._failed[turn_id])
        self._resting[turn_id] = _Rest(asyncio.get_running_loop().time() + wait_s, because)
        self.wake()  # a rating may have come in just before

    async def _advance(self, turn_id: int) -> None:
        """Advance one turn as far as possible: to a sample, or to the reason why it is none."""
        ledger, judgements = self._parts.ledger, self._parts.ledger.judgements
        self._check(turn_id)
        turn = ledger.turns.get(turn_id)
        verdict = self._verdict(turn)
        if verdict is None:
            verdict = await self._ask(turn)
        hints = judgements.hints(turn_id)
        if verdict.value == 1:
            self._show_to_corrected(turn_id)
        texts = self._teacher_texts(turn, verdict, hints)
        refuses = partial(self._parts.method.refuses, verdict, cut=turn.cut, episode=turn.episode)
        if reason := refuses(texts):
            self._refuse(turn_id, TurnRefusal(reason))
            return
        teacher, untaught = await self._taught(turn, texts)
        self._check(turn_id)
        now = self._verdict(turn) or _NONE, judgements.hints(turn_id)
        if (verdict, hints) != now:
            self.wake()  # feedback has changed them meanwhile
            return
        if teacher is None and (reason := refuses(())):
            self._refuse(turn_id, untaught or TurnRefusal(reason))
            return
        reward = step_reward(verdict) if turn.episode else reward_of(verdict)
        taught, rated = teacher is not None, verdict.score is not None
        method, cfg = self._parts.method, self._parts.training
        bare = method.is_bare(reward, cfg, taught=taught, cut=turn.cut) and not turn.episode
        base = method.is_baseline(reward, cfg, taught=taught, rated=rated) and not turn.episode
        ledger.samples.add(turn_id, reward, teacher, untaught, bare=bare, baseline=base)
        self._parts.telemetry.sample("held" if turn.episode else "queued", turn=turn_id)
        self._on_sample()

    def _verdict(self, turn: Turn) -> Verdict | None:
        """Return the verdict that counts, or None where the judge has to be asked."""
        if turn.episode and self._by_outcome:  # whatever the step's own score
            return _NONE
        return self._parts.ledger.judgements.verdict(turn.id)

    async def _ask(self, turn: Turn) -> Verdict:
        state = self._parts.ledger.turns.next_state(turn.id)
        if state is None:  # an episode's last step; its outcome is enough
            return _NONE
        # By the form of the session's own harness: no judge is asked.
        if (vote := denied(state, turn.client)) is not None:
            self._parts.ledger.judgements.add(turn.id, value=vote, ballots=(), hints=())
            self._parts.telemetry.verdict(turn=turn.id, value=vote, votes=(), hints=0)
            return Verdict(votes=(), value=vote)
        await self._parts.spending.room()
        if (verdict := self._parts.ledger.judgements.verdict(turn.id)) is not None:
            return verdict  # by feedback, while waiting for budget
        with self._parts.health.backend.watching("judging"):
            lessons = self._lessons(turn)
            judgement = await self._answered(turn, state, lessons)
        verdict, read = judgement.verdict, sum(v is not None for v in judgement.verdict.votes)
        if not read:
            raise _Unread(judgement.answers[0])
        self._asking.discard(turn.id)
        self._record(turn.id, judgement, lessons)
        self._parts.telemetry.verdict(
            turn=turn.id,
            value=verdict.value,
            votes=verdict.votes,
            hints=len(judgement.hints),
        )
        self._recent.note(read, len(verdict.votes))
        self._probe_at = 0.0
        if self._recent.trouble is None:
            self._answers_again("judge")
        # Explicit feedback that came meanwhile takes precedence.
        return self._parts.ledger.judgements.verdict(turn.id) or verdict

    def _lessons(self, turn: Turn) -> list[Lesson]:
        shows_lessons = self._parts.training.lessons != "off" and not turn.episode
        return self._parts.ledger.lessons.for_judge(turn.id) if shows_lessons else []

    async def _answered(self, turn: Turn, state: NextState, lessons: Sequence[Lesson]) -> Judgement:
        self._check(turn.id)  # forgotten while waiting for budget?
        redact = self._redact
        silent = asyncio.get_running_loop().call_later(self._silent_s, self._is_silent)
        try:
            with self._parts.spending.paying("judge", turn_id=turn.id):
                return await self._judge.judge(
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
                )
        finally:
            silent.cancel()

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
        method, judgements = self._parts.method, self._parts.ledger.judgements
        if Signal.DEMONSTRATION not in method.needs:
            return
        lacking = method.refuses(Verdict(votes=(), value=-1), ())
        if lacking and judgements.take_up_corrected(turn_id, lacking):
            self.wake()

    def _record(self, turn_id: int, judgement: Judgement, lessons: Sequence[Lesson]) -> None:
        self._check(turn_id)
        verdict, redact = judgement.verdict, self._redact
        ids = [None, *(lesson.id for lesson in lessons)]
        candidate = self._parts.ledger.judgements.add(
            turn_id,
            value=verdict.value,
            weight=verdict.weight,
            ballots=[
                Ballot(answer=redact(answer), value=vote)
                for answer, vote in zip(judgement.answers, verdict.votes, strict=True)
            ],
            hints=[redact(hint) for hint in judgement.hints],
            prompt=judgement.prompt,
            wish=self._to_be_told(judgement.wish),
            repeats=ids[judgement.repeats],
            contradicts=ids[judgement.contradicts],
        )
        if candidate is not None:
            log.info("lesson.candidate", lesson=candidate)

    def _to_be_told(self, wish: Wish | None) -> Wish | None:
        """Return a wish that may become a lesson; None: there is none."""
        if wish is None or self._parts.training.lessons == "off":
            return None
        return wish if self._redact(wish.text) == wish.text else None

    async def _taught(
        self, turn: Turn, texts: tuple[str, ...]
    ) -> tuple[HintScores | None, TurnRefusal | None]:
        """Return the teacher's scores, or why there are none; both None: there is nothing to tell
        it. A failure leaves the reward."""
        if not texts:
            return None, None
        spending = self._parts.spending
        if self._doubts_hints and not self._parts.ledger.judgements.follows_hints(turn.id):
            return None, TurnRefusal(Reason.UNFOLLOWED_HINTS)
        await spending.room()
        self._check(turn.id)  # forgotten while waiting for budget?
        fitting = self._scorer.fitting(turn, texts)
        if isinstance(fitting, TurnRefusal):
            return None, fitting
        try:
            with (
                self._parts.health.backend.watching("teaching"),
                spending.paying("teacher", turn_id=turn.id),
            ):
                try:
                    scores = await self._scorer.teach(turn, fitting)
                except GoneError as error:  # no reply is to blame
                    raise OutageError(str(error)) from error
        except OutageError:
            raise
        except (AlignmentError, BackendError, RequestError) as error:
            return None, TurnRefusal(Reason.UNSCORED, str(error))
        self._answers_again("teacher")
        if self._parts.training.recipe != "paper" and ends_apart(turn.completion, scores):
            return None, TurnRefusal(Reason.ENDLESS_HINT)
        return scores, None

    def _check(self, turn_id: int) -> None:
        """Raise where the turn was forgotten meanwhile."""
        if not self._parts.ledger.turns.is_open(turn_id):
            raise ForgottenError

    def _refuse(self, turn_id: int, refusal: TurnRefusal) -> None:
        self._check(turn_id)
        self._parts.ledger.turns.refuse(turn_id, refusal)
        self._parts.telemetry.sample("refused", turn=turn_id, reason=str(refusal))
        self._on_sample()  # an episode may be complete without it
