"""What became of a turn, or what it waits for: a sentence for every state that it can be in, and a
short word for tables.

Rule: nobody else words it, and what the word says the sentence says too. Pure, but for what reads
the run and counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.groups import LIMIT_S
from tinker_claw.ledger.judgements import SET_ASIDE, TRIES
from tinker_claw.ledger.turns import OUTCOME, STEP
from tinker_claw.ledger.versions import REFUSED, TOO_FAR
from tinker_claw.ledger.views import Record, SampleView, TurnView, turns_where
from tinker_claw.types import Kind, Lost

LOST = {
    Lost.COMPACTED: "a summary stands for the history, and none of the session's replies behind it",
    Lost.EDITED: "what leads to that reply was changed",
    Lost.UNKNOWN: "that reply is, to the letter, none of the last that were given here",
}
"""Why a request could not be tied to the turn whose reply it answers."""
_SIDE = "side turn"
_NEXT = "waits for a next state"
_IDLE = "waits for a next state in an idle session"
_PASSED = "waits for a next state, and may wait for ever"
_STEPS = {"committed": "taken", "intent": "under way"}
_OUTCOME = "waits for its outcome"
_GROUP = "waits for its group"
_JUDGE = "waits for the judge"
_QUEUE = "waits to be queued"
_STEP = "waits for its step"
_TRAINING = "being trained right now"
_EXPIRED = "its sample expired"
_QUARANTINED = "its sample was set aside"
_GOING = "being forgotten"
_HEADS = (
    _SIDE,
    "the teacher could not score it",
    "what its teacher would be told does not fit",
)
"""Reasons that go on with something of the turn's own."""


@dataclass(frozen=True, slots=True)
class RunView:
    """What a turn's outcome depends on beside the turn."""

    names: Mapping[str, str]
    """Model, method, backend."""
    step: int
    """Optimizer steps that the newest version is away from the base."""
    queued: int
    """Samples that wait for a step just now."""
    batch: int
    """Samples of a step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a turn, or what it waits for."""

    word: str
    """For tables; the sentence has it, too."""
    sentence: str


def read_run(rows: Rows, batch_size: int) -> RunView:
    """`batch_size`: samples of a step, where none was taken yet."""
    metrics = rows.one(
        "SELECT metrics FROM steps WHERE status = 'committed' ORDER BY id DESC LIMIT 1"
    )
    known: Mapping[str, Any] = json.loads(metrics) if metrics else {}
    return RunView(
        names=run_of(rows),
        step=rows.one("SELECT step FROM versions ORDER BY id DESC LIMIT 1") or 0,
        queued=rows.one("SELECT COUNT(*) FROM samples WHERE state = 'queued'"),
        batch=(known.get("rule") or {}).get("batch_size") or known.get("samples") or batch_size,
    )


def step_word(status: str) -> str:
    """What became of a step."""
    return _STEPS.get(status, status)


def outcome(turn: TurnView, run: RunView) -> Outcome:
    """Whether it is trained, and why."""
    became = _became(turn, run)
    if turn.said is None or turn.said.unused is None:
        return became
    who = f" What its {turn.said.source} said of it is recorded, and it is not trained by that: "
    return Outcome(became.word, f"{became.sentence}{who}{turn.said.unused.rstrip('.')}.")


def _became(turn: TurnView, run: RunView) -> Outcome:
    if turn.sample is not None:
        return _sampled(turn, turn.sample, run)
    if turn.kind is Kind.SIDE:
        return Outcome(_SIDE, f"It is never trained: it is a {_SIDE}.")
    if turn.untrained_because is not None:
        return Outcome(_word(turn.untrained_because), f"It is not trained: {_reason(turn)}.")
    if turn.settled:
        return Outcome(_GOING, f"It is {_GOING}.")
    if not turn.judged:
        return _unfollowed(turn) if turn.next_role is None else _unjudged(turn)
    longer = "which takes a moment, or longer where a teacher scores it first"
    return Outcome(_QUEUE, f"It was judged, and {_QUEUE}, {longer}.")


def add_outcomes(rows: Rows, run: RunView, turns: Sequence[Record]) -> None:
    """The word for it, as `outcome`, to records of turns."""
    for turn in turns:
        turn["outcome"] = _closed(turn)
    # The others are few, however long a ledger is.
    still_open = {turn["id"]: turn for turn in turns if turn["outcome"] is None}
    which = "WHERE turns.id IN (SELECT value FROM json_each(?))"
    for turn in turns_where(rows, which, json.dumps([*still_open])):
        still_open[turn.id]["outcome"] = outcome(turn, run).word


def _closed(turn: Record) -> str | None:
    if turn["sample"] is not None:
        return _trained_in(turn["trained_in_step"]) if turn["sample"] == "trained" else None
    if turn["kind"] == Kind.SIDE:
        return _SIDE
    return None if turn["untrained_because"] is None else _word(turn["untrained_because"])


def _trained_in(step: int | None) -> str:
    return f"trained in step {step}"


def _reason(turn: TurnView) -> str:
    return (turn.untrained_because or "").rstrip(".")


def _word(reason: str) -> str:
    return next((head for head in _HEADS if reason.startswith(head)), reason.rstrip("."))


def _unfollowed(turn: TurnView) -> Outcome:
    if turn.passed_by is not None:
        which = "which does not answer this reply"
        if turn.passed_lost is not None:
            which = f"of which it is not known what reply it answers: {LOST[turn.passed_lost]}"
        gone_on = f"its session has gone on with turn {turn.passed_by}, {which}"
        return Outcome(_PASSED, f"It {_PASSED}: {gone_on}.")
    if turn.private:
        return Outcome(
            _PASSED, f"It {_PASSED}: its session is private now, and nothing of it is kept."
        )
    if turn.episode == 1:
        return _running(turn)
    if turn.session_closed:
        return Outcome(_IDLE, f"It {_IDLE}: whatever the user still says in it counts.")
    return Outcome(_NEXT, f"It {_NEXT}: the user's next message, or the results of its tools.")


def _running(turn: TurnView) -> Outcome:
    """Of an episode whose outcome, or that of its group, is to come."""
    limit = f"{LIMIT_S / 3600:g} hour after the last that is heard of"
    if turn.session_outcome is None:
        expires = f"without one it expires {limit} its {'group' if turn.group else 'episode'}"
        return Outcome(
            _OUTCOME, f"It {_OUTCOME}: final feedback says how its episode ended; {expires}."
        )
    if turn.sample is None or turn.group is None:
        return Outcome(_QUEUE, f"Its episode has ended, and it {_QUEUE}, which takes a moment.")
    return Outcome(
        _GROUP,
        f"It {_GROUP}: of {turn.group_size} episodes of {turn.group} {turn.group_done} have their "
        f"outcome. Those that have one are queued without the others {limit} any of them.",
    )


def _unjudged(turn: TurnView) -> Outcome:
    if turn.tries:
        again = f"and is tried again, at most {TRIES} times; {turn.tries} came to nothing"
        return Outcome(_JUDGE, f"It {_JUDGE}, {again}.")
    return Outcome(
        _JUDGE,
        f"It {_JUDGE}. `tinker-claw status` says whether the judge works, waits for the service, "
        "or is paused by the budget.",
    )


def _sampled(turn: TurnView, sample: SampleView, run: RunView) -> Outcome:
    if sample.state == "trained":
        found = _trained(sample)
    elif sample.state == "held":
        found = _running(turn)
    elif sample.state == "queued":
        found = _queued(sample, run)
    elif sample.state == "quarantined":
        found = Outcome(_QUARANTINED, f"It is not trained: {_QUARANTINED}, {_why_aside(sample)}.")
    elif sample.expired_because is not None:
        why = sample.expired_because
        found = Outcome(why, f"It is not trained: {why}.")
    elif turn.left_behind:
        found = Outcome(
            _EXPIRED,
            f"It is not trained: {_EXPIRED}, because a rollback has left v{turn.policy_version}, "
            "which answered, behind.",
        )
    else:
        found = Outcome(
            _EXPIRED,
            f"It is not trained: {_EXPIRED}, because too many steps had been taken since "
            f"v{turn.policy_version} answered (--max-staleness); by now they are "
            f"{run.step - turn.version_step}.",
        )
    return Outcome(found.word, found.sentence + _failed(sample))


def _trained(sample: SampleView) -> Outcome:
    word, others = _trained_in(sample.step), sample.together - 1
    company = f"with {others} other {'sample' if others == 1 else 'samples'}" if others else "alone"
    at = "" if sample.finished_at is None else f" at {moment(sample.finished_at)}"
    behind = " A rollback has left that version behind." if sample.left_behind else ""
    return Outcome(word, f"It was {word}, {company}, which made v{sample.version}{at}.{behind}")


def _queued(sample: SampleView, run: RunView) -> Outcome:
    if sample.begun and sample.begun[-1].status == "intent":
        return Outcome(_TRAINING, f"It is {_TRAINING}, in step {sample.begun[-1].id}.")
    missing = run.batch - run.queued
    rest = (
        f"A step takes {run.batch} at a time or whole groups, the newest first, and not too many "
        "of one session, user or tool (--max-share)."
    )
    if missing > 0:
        are = "is" if missing == 1 else "are"
        rest = f"A step takes {run.batch}, so {missing} {are} missing."
    queued = f"{plural(run.queued, 'sample')} {'is' if run.queued == 1 else 'are'} queued"
    return Outcome(_STEP, f"It {_STEP}; {queued}. {rest}")


def _why_aside(sample: SampleView) -> str:
    last = next(filter(None, (step.error for step in reversed(sample.begun))), "")
    batch, blame = "with its whole batch, because", "it need not be to blame"
    if last.startswith(REFUSED):
        return f"{batch} the gate refused the version that a step with them had made; {blame}"
    if last.startswith(TOO_FAR):
        return f"{batch} even the smallest step with them moved the policy too far; {blame}"
    return "because steps with it failed"


def _failed(sample: SampleView) -> str:
    void = [step for step in sample.begun if step.status == "void"]
    if not void:
        return ""
    numbers = ", ".join(str(step.id) for step in void)
    why = (void[-1].error or "no reason is known").rstrip(".")
    return f" Step{'s' if len(void) > 1 else ''} {numbers} with it came to nothing: {why}."


def moment(at: float, now: float | None = None) -> str:
    """Local time, with the day where it is another one than today."""
    then = datetime.fromtimestamp(at)
    today = then.date() == (datetime.now() if now is None else datetime.fromtimestamp(now)).date()
    return then.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def plural(count: int, noun: str) -> str:
    """3 samples, 1 sample."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def vote(value: float | None) -> str:
    """+1, 0 or -1, or a reward between; `none` where no vote was valid."""
    return "none" if value is None else f"{value:+z.3g}" if value else "0"


# Episodes


def of_episode(turn: TurnView) -> Iterator[str]:
    """Sentences on the episode that a turn is of; none where its session is none."""
    task = f" at task {turn.task}" if turn.task else ""
    group = f", one of {turn.group_size} of group {turn.group}" if turn.group else ""
    if not turn.episode:
        if task:
            yield f"Its session is an attempt{task}."
        return
    ended = "has no outcome"
    if turn.session_outcome is not None:
        ended = f"has the outcome {vote(turn.session_outcome)}"
    yield f"Its session is an episode{task}{group}, and {ended}."
    sample = turn.sample
    if sample is not None and sample.state != "held" and sample.reward is not None:
        of = "outcome and votes" if turn.judged else "its outcome alone"
        yield f"Reward of this step, {of}: {vote(sample.reward)}."


_EPISODES = f"""
SELECT sessions.id AS session, sessions.user, created_at, sessions.task, group_id,
  groups.name AS "group", size, episode, ({OUTCOME}) AS outcome,
  (SELECT policy_version FROM turns WHERE session_id = sessions.id AND kind = 'main'
    ORDER BY idx LIMIT 1) AS version,
  (SELECT COUNT(*) FROM turns WHERE session_id = sessions.id AND kind = 'main') AS replies
FROM sessions LEFT JOIN groups ON groups.id = group_id
WHERE episode <> 0 AND (?1 IS NULL OR sessions.user = ?1) AND (?2 IS NULL OR group_id = ?2)
  AND (?3 IS NULL OR sessions.id < ?3) ORDER BY sessions.id DESC LIMIT ?4
"""


def episodes(
    rows: Rows, limit: int, *, user: str | None, group: int | None, before: int | None
) -> list[Record]:
    """The newest episodes, the newest first.

    Args:
        user, group: of these alone; None: of all.
        before: only sessions of lower numbers.
    """
    found = [dict(row) for row in rows.rows(_EPISODES, user, group, before, limit)]
    for one in found:
        waits = _QUEUE if one["group_id"] is None else _GROUP
        waits = _OUTCOME if one["outcome"] is None else waits
        one["waits"] = None if one["episode"] == 2 else waits
    return found


def rewards_by_step(rows: Rows, group: int) -> list[Record]:
    """Of the replies of a group, oldest first: `session`, `turn`, the step that it is of, and the
    `reward` that it is compared by with the others of this step; None: it has none (yet)."""
    found = rows.rows(
        f"SELECT session_id AS session, turns.id AS turn, {STEP} AS step, "
        "CASE state WHEN 'held' THEN NULL ELSE reward END AS reward FROM sessions "
        "JOIN turns ON session_id = sessions.id LEFT JOIN samples ON turn_id = turns.id "
        "WHERE group_id = ? AND kind = 'main' ORDER BY turns.id",
        group,
    )
    return [dict(row) for row in found]


# What some turns mean together

_MOST = 0.75
_FEWEST = 3
"""Fewer turns are no pattern."""


def advice(turns: Sequence[TurnView]) -> Iterator[str]:
    """Sentences on these turns, oldest first; none where learning goes its way."""
    main = [turn for turn in turns if turn.kind is Kind.MAIN]
    followed = [turn for turn in main if turn.next_role is not None]
    yield from _of_side_turns(turns, [turn for turn in turns if turn.kind is Kind.SIDE])
    if len(main) >= _FEWEST and not followed:
        why = (
            "although sessions go on. The replies do not come back in the client's history as they "
            "were sent: something between rewrites or drops them."
        )
        if len({turn.session_id for turn in main}) == len(main):
            why = (
                "so there is nothing to judge: every one stands alone in its session. Go on in the "
                "same conversation; if you did, the client sends neither its earlier messages back "
                "nor a name for the session (X-Session-Id)."
            )
        yield f"None of the {len(main)} main turns has a next state, {why}"
    if aside := [turn for turn in main if turn.untrained_because == SET_ASIDE]:
        yield (
            f"{len(aside)} of {len(main)} main turns were set aside: three times the judge gave "
            f"nothing that could be read. `tinker-claw explain {aside[-1].id}` shows what it said; "
            "once that is mended, by --prm-max-tokens or another --judge-url, `tinker-claw "
            "rejudge` takes them up again."
        )
    waiting = [turn for turn in followed if not turn.judged and turn.untrained_because is None]
    if _most(waiting, followed):
        yield (
            f"{len(waiting)} turns wait for the judge: `tinker-claw status` says whether the judge "
            "fails, waits for the service, or is paused by the budget."
        )
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
            "current one, because that one failed; `tinker-claw explain` says why."
        )


def _of_side_turns(turns: Sequence[TurnView], side: Sequence[TurnView]) -> Iterator[str]:
    if not _most(side, turns):
        return
    reason, times = Counter(turn.kind_reason for turn in side).most_common(1)[0]
    yield (
        f"{len(side)} of {len(turns)} requests are side turns, which are never trained; the reason "
        f"of {times}: {reason}. Recaps, titles, compaction, heartbeat and cron are "
        "meant to be side turns. If these were your own messages, the client sends something that "
        "marks them: look for a header X-Turn-Type, for a model name with @v, and for another "
        "proxy in between; `tinker-claw explain` shows the reason of each."
    )
    if len(side) == len(turns):
        yield "There is no main turn among them: nothing can be learned from these requests."


def _most(part: Sequence[TurnView], whole: Sequence[TurnView]) -> bool:
    return len(whole) >= _FEWEST and len(part) >= _MOST * len(whole)


# All turns of a ledger, counted

_REFUSED = (
    "SELECT untrained_because, COUNT(*) FROM turns WHERE untrained_because IS NOT NULL "
    "GROUP BY untrained_because"
)
_OPEN = f"""
SELECT next_states.turn_id IS NOT NULL AS followed, closed_at IS NOT NULL AS closed,
  CASE episode WHEN 1 THEN ({OUTCOME}) IS NULL END AS running,
  next_states.turn_id IS NULL AND (private = 1 OR turns.id <
    (SELECT later.id FROM turns AS later WHERE later.session_id = turns.session_id
      AND later.kind = 'main' ORDER BY later.idx DESC LIMIT 1)) AS passed, COUNT(*) AS n
FROM turns CROSS JOIN sessions ON sessions.id = turns.session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
WHERE settled = 0 AND verdicts.turn_id IS NULL GROUP BY 1, 2, 3, 4
"""
_HELD = f"""
SELECT ({OUTCOME}) IS NULL AS running, group_id IS NOT NULL AS grouped, COUNT(*) AS n
FROM samples CROSS JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id
WHERE state = 'held' GROUP BY 1, 2
"""
_JUDGED = (
    "SELECT COUNT(*) FROM turns CROSS JOIN verdicts ON verdicts.turn_id = turns.id "
    "WHERE settled = 0"
)
_IN_HAND = (
    "SELECT COUNT(*) FROM step_samples JOIN steps ON steps.id = step_samples.step_id JOIN samples "
    "ON samples.id = sample_id WHERE step_samples.step_id = (SELECT MAX(id) FROM steps) "
    "AND status = 'intent' AND state = 'queued'"
)


def count_outcomes(rows: Rows) -> Counter[str]:
    """How many turns have each outcome but a step that trained them, by the word for it.

    However long a ledger is, no row of `turns` is read but those that are open or held.
    """
    found = rows.rows(
        "SELECT COALESCE(expired_because, state) AS state, COUNT(*) AS n FROM samples GROUP BY 1"
    )
    samples: dict[str, int] = {row["state"]: row["n"] for row in found}
    trained = samples.pop("trained", 0)
    in_hand = rows.one(_IN_HAND)
    counts = Counter(
        {
            _STEP: samples.pop("queued", 0) - in_hand,
            _TRAINING: in_hand,
            _EXPIRED: samples.pop("expired", 0),
            _QUARANTINED: samples.pop("quarantined", 0),
        }
    )
    samples.pop("held", None)
    counts.update(samples)  # what has expired by name
    for row in rows.rows(_HELD):
        counts[_OUTCOME if row["running"] else _GROUP if row["grouped"] else _QUEUE] += row["n"]
    for reason, turns in rows.rows(_REFUSED):
        counts[_word(reason)] += turns
    for row in rows.rows(_OPEN):
        waits = _IDLE if row["closed"] else _NEXT
        if row["running"] is not None:
            waits = _OUTCOME if row["running"] else _QUEUE
        counts[_JUDGE if row["followed"] else _PASSED if row["passed"] else waits] += row["n"]
    counts[_QUEUE] += rows.one(_JUDGED)
    everyone = rows.one("SELECT COUNT(*) FROM turns")
    counts[_GOING] = everyone - trained - counts.total()
    return +counts


def run_of(rows: Rows) -> dict[str, str]:
    """Model, method and backend."""
    found = rows.rows("SELECT * FROM meta WHERE key IN ('model', 'method', 'backend')")
    return {row["key"]: row["value"] for row in found}
