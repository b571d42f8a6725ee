"""Turn a next state into a sample: judge, then score, then queue.

Rule: the work comes from the ledger, so a restart picks up where this stopped. If the judge or the
ledger fails, the turn is tried again, and no verdict is made up; if the teacher fails, the sample
keeps its reward and records why. While the service behind either is away, the turn waits.

A turn that cannot be judged although others can is tried three times, with growing waits, and then
set aside. While the judge fails as a whole no try counts, and one turn asks at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

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
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.judgements import TRIES, Ballot
from tinker_claw.ledger.lessons import Lesson
from tinker_claw.methods.base import Evidence, Signal, reward_of, step_reward
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.types import HintScores, NextState, Turn, Verdict, Wish
from tinker_claw.why import Why

WAITS = Backoff(first_s=5.0, longest_s=600.0, jitter=0.25)
"""Waits between attempts while the judge fails, the service is away, or the ledger refuses."""
RESTS = Backoff(first_s=60.0, longest_s=3600.0)
"""Waits between the tries of a turn whose answers cannot be read."""
CONCURRENCY = 8
"""Turns judged at the same time: the samplers that judge also answer users."""
_AT_ONCE = 64
"""Turns started before the event loop can serve replies again."""
LATELY = 8
"""Number of latest tries that show whether the judge works."""


_NONE = Verdict(votes=(), value=None)
"""Verdict of a reply that nobody has rated."""


class _Unread(JudgeError):
    """Raised when the judge answered, but no answer can be read."""

    def __init__(self, answer: str, *, counts: bool) -> None:
        super().__init__(answer)
        self.counts = counts
        """Whether it counts as one of the turn's tries."""


class _Heard:
    """Record of the judge's latest answers, to tell its failures from those of a turn."""

    def __init__(self) -> None:
        self._last = deque[tuple[int, int]](maxlen=LATELY)
        """Readable answers and all answers of each try; none are readable where the endpoint
        failed."""
        self.down: str | None = None
        """Why the last try got no answers, unless the turn was at fault."""
        self._tries = 0
        self._well = 0
        """Number of the last try with good answers."""
        self._failed: dict[int, int] = {}
        """Last try of each turn whose last try failed, by turn id."""

    @property
    def trouble(self) -> str | None:
        """Why the judge fails as a whole; None: it works, as far as known."""
        return self.down or self._mostly_lost()

    @property
    def mends(self) -> bool:
        """Whether the latest attempt succeeded."""
        return self._well == self._tries

    def well(self, turn_id: int, read: int, of: int) -> None:
        self._note(read, of)
        self.down = None
        self._well = self._tries
        self._failed.pop(turn_id, None)

    def ill(self, turn_id: int, read: int, of: int, error: str | None) -> bool:
        """Record a bad try; return whether it counts against the turn. `error`: why there was no
        answer."""
        counts = self._others_go_well()
        self._note(read, of)
        self._failed[turn_id] = self._tries
        self.down = None if counts else error
        return counts

    def accident(self, turn_id: int) -> bool:
        """Record an unexpected error; return whether it counts against the turn. The judge is not
        blamed."""
        counts = self._others_go_well()
        self._failed[turn_id] = self._tries
        return counts

    def _others_go_well(self) -> bool:
        """Return whether the judge works for other turns: it did when last asked, and one has
        succeeded since the last failure of any turn."""
        return not self._mostly_lost() and self._well > max(self._failed.values(), default=0)

    def forget(self, turn_id: int) -> None:
        self._failed.pop(turn_id, None)

    def _note(self, read: int, of: int) -> None:
        self._tries += 1
        self._last.append((read, of))

    def _mostly_lost(self) -> str | None:
        # Averaged by turn, as the judge is asked less about accepted replies than about others.
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
        self._waits = waits
        self._rests = rests
        self._slots = asyncio.Semaphore(concurrency)
        self._in_hand: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._due: dict[int, tuple[float, Callable[[float], Awaitable[None]], bool]] = {}
        """Loop time until which a turn rests, the function it rests with, and whether it had a
        verdict when the rest began, by turn id."""
        self._unasked: dict[int, asyncio.Timeout] = {}
        """Timeouts of turns that wait for the judge; an explicit rating ends the wait."""
        self._heard = _Heard()
        self._probe = asyncio.Lock()
        """Held by the turn that asks while the judge fails."""
        self._works = asyncio.Event()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look for work: a next state has come in, or a turn is taken up again."""
        self._wake.set()

    async def run(self) -> None:
        """Judge all turns that can be judged, until cancelled. May be called again after an
        unexpected end: the state of turns and judge is kept."""
        self._in_hand.clear()  # a task cancelled before it began has not removed itself
        self._show()
        self._wake.set()
        failures = 0
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                try:
                    found = self._parts.ledger.turns.judgeable()
                    self._ask_nobody_about(found)
                except LedgerError as error:
                    failures += 1
                    self._parts.health.judge_is("failing", str(error))
                    await asyncio.sleep(self._waits.after(failures))
                    self._wake.set()
                    continue
                failures = 0
                if not found:  # an outcome may have come though nothing is left to judge
                    self._on_sample()
                new = [turn_id for turn_id in found if turn_id not in self._in_hand]
                for number, turn_id in enumerate(new):  # the oldest first
                    self._in_hand.add(turn_id)
                    group.create_task(self._one(turn_id))
                    if number % _AT_ONCE == _AT_ONCE - 1:
                        await asyncio.sleep(0)  # replies go first

    def _ask_nobody_about(self, found: Sequence[int]) -> None:
        """End the wait of turns that have been rated explicitly."""
        waiting = [turn_id for turn_id in found if turn_id in self._unasked]
        for turn_id in self._parts.ledger.judgements.judged(waiting):
            self._unasked.pop(turn_id).reschedule(0)

    async def _one(self, turn_id: int) -> None:
        """Advance one turn. A turn without an answer rests, and does not hold up the others."""
        try:
            async with AsyncExitStack() as held:
                if self._is_judged(turn_id):
                    await self._turn_of(turn_id, held)
                else:
                    try:
                        async with asyncio.timeout(None) as waiting:
                            self._unasked[turn_id] = waiting
                            await self._turn_of(turn_id, held)
                    except TimeoutError:
                        await held.enter_async_context(self._slots)
                    finally:
                        self._unasked.pop(turn_id, None)
                await self._advance(turn_id)
            self._done(turn_id)
            self._show()
        except ForgottenError:
            self._done(turn_id)
            self._show()
        except (OutageError, LedgerError) as error:
            self._wait_for(turn_id, error)
        except JudgeError as error:
            self._failed(turn_id, error)
        except Exception as error:  # unexpected: this part ends, and starts again
            answer = f"{type(error).__name__}: {error}"
            self._rest(turn_id, answer, counts=self._heard.accident(turn_id))
            raise
        finally:
            self._in_hand.discard(turn_id)

    async def _turn_of(self, turn_id: int, held: AsyncExitStack) -> None:
        """Wait until the turn's rest is over, then for a slot, which `held` keeps."""
        until, rest, judged = self._due.get(turn_id, (0.0, asyncio.sleep, False))
        left_s = until - asyncio.get_running_loop().time()
        if left_s > 0 and judged == self._is_judged(turn_id):  # else it has been rated since
            await rest(left_s)
        await held.enter_async_context(self._place(turn_id))

    def _is_judged(self, turn_id: int) -> bool:
        return self._parts.ledger.judgements.verdict(turn_id) is not None

    @asynccontextmanager
    async def _place(self, turn_id: int) -> AsyncGenerator[None]:
        """Wait for a slot: one of several, or a single one while the judge fails. Failed turns rest
        before, longer each time, so that they never hold up new ones."""
        turns = self._parts.ledger.turns
        asks = turns.next_state(turn_id) is not None and not self._is_judged(turn_id)
        asks = asks and not (self._by_outcome and turns.get(turn_id).episode)
        while True:
            async with self._slots:
                if not (asks and self._heard.trouble):
                    yield
                    return
            async with self._probe:
                if self._heard.trouble:
                    if not self._heard.mends:
                        await asyncio.sleep(self._waits.first_s)
                    yield
                    return

    async def _until_it_works(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._works.wait()

    def _show(self) -> None:
        """Report the judge's state to health, and wake the turns that wait for it."""
        trouble = self._heard.trouble
        if trouble is None:
            self._works.set()
        else:
            self._works.clear()
        self._parts.health.judge_is("failing" if trouble else "ok", trouble)

    def _done(self, turn_id: int) -> None:
        self._failures.pop(turn_id, None)
        self._due.pop(turn_id, None)
        self._heard.forget(turn_id)
        if not self._due:  # no turn waits for the service any more
            self._parts.health.backend.over("judging")
            self._parts.health.backend.over("teaching")

    def _wait_for(self, turn_id: int, error: OutageError | LedgerError) -> None:
        """Let the turn wait for what is away; neither turn nor judge is at fault."""
        health, rest = self._parts.health, asyncio.sleep
        if isinstance(error, OutageError):  # what is left to do shows which was away
            what = "teaching" if self._is_judged(turn_id) else "judging"
            rest = partial(health.backend.rest, what)
        health.judge_is("stalled" if isinstance(error, OutageError) else "failing", str(error))
        self._set_due(turn_id, self._waits, rest)

    def _failed(self, turn_id: int, error: JudgeError) -> None:
        """Record that the judge gave no readable answer."""
        if isinstance(error, _Unread):
            counts = error.counts
        else:
            counts = self._heard.ill(turn_id, 0, self._judge.votes, str(error))
        self._show()
        if self._is_judged(turn_id):  # by feedback, meanwhile
            self._wake.set()
        else:
            self._rest(turn_id, str(error), counts=counts)

    def _rest(self, turn_id: int, answer: str, *, counts: bool) -> None:
        """Try the turn again later, or set it aside after its last try."""
        parts = self._parts
        if not parts.ledger.turns.is_open(turn_id):  # forgotten, and the answer may quote it
            self._done(turn_id)
            return
        if counts:
            try:
                tries = parts.ledger.judgements.add_in_vain(turn_id, self._redact(answer))
            except ForgottenError:
                self._done(turn_id)
                return
            except LedgerError as refused:
                self._wait_for(turn_id, refused)
                return
            log.warning("turn.unjudged", turn=turn_id, tries=tries, of=TRIES)
            if tries >= TRIES:
                self._done(turn_id)
                parts.telemetry.sample("set_aside", turn=turn_id)
                return
        # Answers cost money, errors do not.
        backoff = self._waits if self._heard.down else self._rests
        failing = self._heard.trouble and not counts
        self._set_due(turn_id, backoff, self._until_it_works if failing else asyncio.sleep)

    def _set_due(
        self, turn_id: int, backoff: Backoff, rest: Callable[[float], Awaitable[None]]
    ) -> None:
        self._failures[turn_id] += 1
        until = asyncio.get_running_loop().time() + backoff.after(self._failures[turn_id])
        self._due[turn_id] = (until, rest, self._is_judged(turn_id))
        self._wake.set()

    async def _advance(self, turn_id: int) -> None:
        """Advance one turn as far as possible: to a sample, or to the reason why it is none."""
        ledger, judgements = self._parts.ledger, self._parts.ledger.judgements
        self._check(turn_id)
        turn = ledger.turns.get(turn_id)
        verdict = judgements.verdict(turn_id)
        if verdict is None:
            verdict = await self._ask(turn)
        hints = judgements.hints(turn_id)
        if verdict.value == 1:
            self._show_to_corrected(turn_id)
        told = self._told(turn, verdict, hints)
        refuses = partial(self._parts.method.refuses, verdict, cut=turn.cut, episode=turn.episode)
        if reason := refuses(told):
            self._refuse(turn_id, reason)
            return
        teacher, untaught = await self._taught(turn, told)
        self._check(turn_id)
        now = judgements.verdict(turn_id) or _NONE, judgements.hints(turn_id)
        if (verdict, hints) != now:
            self._wake.set()  # feedback has changed them meanwhile
            return
        if teacher is None and (reason := refuses(())):
            self._refuse(turn_id, untaught or reason)
            return
        reward = step_reward(verdict) if turn.episode else reward_of(verdict)
        taught, cut = teacher is not None, turn.cut
        bare = self._parts.method.is_bare(reward, self._parts.training, taught=taught, cut=cut)
        ledger.samples.add(turn_id, reward, teacher, untaught, bare=bare and not turn.episode)
        self._parts.telemetry.sample("held" if turn.episode else "queued", turn=turn_id)
        self._on_sample()

    async def _ask(self, turn: Turn) -> Verdict:
        state = self._parts.ledger.turns.next_state(turn.id)
        if state is None or (turn.episode and self._by_outcome):  # the outcome is enough
            return _NONE
        if (vote := denied(state)) is not None:  # by the harness's own form: no judge is asked
            self._parts.ledger.judgements.add(turn.id, value=vote, ballots=(), hints=())
            self._parts.telemetry.verdict(turn=turn.id, value=vote, votes=(), hints=0)
            return Verdict(votes=(), value=vote)
        await self._parts.spending.room()
        if (said := self._parts.ledger.judgements.verdict(turn.id)) is not None:
            return said  # by feedback, while waiting for budget
        with self._parts.health.backend.watching("judging"):
            lessons = self._lessons(turn)
            judgement = await self._answered(turn, state, lessons)
        votes = judgement.verdict.votes
        read = sum(vote is not None for vote in votes)
        if not read:
            counts = self._heard.ill(turn.id, 0, len(votes), None)
            raise _Unread(judgement.answers[0], counts=counts)
        self._record(turn.id, judgement, lessons)
        said = judgement.verdict
        self._parts.telemetry.verdict(
            turn=turn.id,
            value=said.value,
            votes=said.votes,
            hints=len(judgement.hints),
        )
        self._heard.well(turn.id, read, len(votes))
        # Explicit feedback that came meanwhile takes precedence.
        return self._parts.ledger.judgements.verdict(turn.id) or judgement.verdict

    def _lessons(self, turn: Turn) -> list[Lesson]:
        known = self._parts.training.lessons != "off" and not turn.episode
        return self._parts.ledger.lessons.shown(turn.id) if known else []

    async def _answered(self, turn: Turn, state: NextState, lessons: Sequence[Lesson]) -> Judgement:
        self._check(turn.id)  # forgotten while waiting for budget?
        redact = self._redact
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

    def _told(self, turn: Turn, verdict: Verdict, hints: tuple[str, ...]) -> tuple[str, ...]:
        """Return the texts that the teacher can be told; () where its prompt has no place for
        them."""
        parts = self._parts
        if parts.method.teaching is None or turn.hint_at is None:
            return ()
        state, shown = parts.ledger.turns.next_state(turn.id), None
        if Signal.DEMONSTRATION in parts.method.needs:
            shown = parts.ledger.judgements.demonstration(turn.id)
        if hints and verdict.source != "judge":  # an explicit reason says more than what followed
            state = NextState("user", hints[0])
        known = Evidence(verdict, hints, state, shown)
        # A text may be empty: a tool's result, or one that was forgotten.
        told = parts.method.teaching.tells(known)
        return tuple(self._redact(text) for text in told if text)

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
        self._parts.ledger.judgements.add(
            turn_id,
            value=verdict.value,
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

    def _to_be_told(self, wish: Wish | None) -> Wish | None:
        """Return a wish that may become a lesson; None: there is none."""
        if wish is None or self._parts.training.lessons == "off":
            return None
        return wish if self._redact(wish.text) == wish.text else None

    async def _taught(
        self, turn: Turn, told: tuple[str, ...]
    ) -> tuple[HintScores | None, str | None]:
        """Return the teacher's scores, or why there are none; both None: there is nothing to tell
        it. A failure leaves the reward."""
        if not told:
            return None, None
        spending = self._parts.spending
        await spending.room()
        self._check(turn.id)  # forgotten while waiting for budget?
        texts = self._scorer.fitting(turn, told)
        if isinstance(texts, str):
            return None, texts
        try:
            with (
                self._parts.health.backend.watching("teaching"),
                spending.paying("teacher", turn_id=turn.id),
            ):
                try:
                    return await self._scorer.teach(turn, texts), None
                except GoneError as error:  # no reply is to blame
                    raise OutageError(str(error)) from error
        except OutageError:
            raise
        except (AlignmentError, BackendError, RequestError) as error:
            return None, Why.UNSCORED.says(str(error))

    def _check(self, turn_id: int) -> None:
        """Raise where the turn was forgotten meanwhile."""
        if not self._parts.ledger.turns.is_open(turn_id):
            raise ForgottenError

    def _refuse(self, turn_id: int, reason: str) -> None:
        self._check(turn_id)
        self._parts.ledger.turns.refuse(turn_id, reason)
        self._parts.telemetry.sample("refused", turn=turn_id, reason=reason)
        self._on_sample()  # an episode may be complete without it
