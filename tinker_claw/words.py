"""Turns and runs as named values, for the terminal and the page, which only lay them out.

Rule: what both show comes from here, so that they show the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from statistics import fmean
from typing import NamedTuple

from tinker_claw.ledger.jobs import TRIES
from tinker_claw.ledger.turn_view import Contents, Record, TurnView
from tinker_claw.served import OPENING
from tinker_claw.turn_state import TurnState


def moment(at: float, now: float | None = None) -> str:
    """Return local time, with the date where it is not today."""
    then = datetime.fromtimestamp(at)
    today = then.date() == (datetime.now() if now is None else datetime.fromtimestamp(now)).date()
    return then.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 3 samples, 1 sample."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    """Return a text on one line, without control characters: clients and services choose some."""
    return "".join(c if c.isprintable() else " " for c in text)


def vote(value: float | None) -> str:
    """Return +1, 0 or -1, or a reward between; `none` where no vote was valid."""
    return "none" if value is None else f"{value:+z.3g}" if value else "0"


def step_word(status: str) -> str:
    """Return the word for a step's status."""
    return {"committed": "taken", "intent": "under way"}.get(status, status)


def _joined(*values: object) -> str:
    return " · ".join(str(value) for value in values if value)


# A turn


class Field(NamedTuple):
    """A named value of a turn, and the text that belongs to it."""

    name: str
    value: str = ""
    quote: str | None = None
    """Words of a user, model or tool."""
    lesson: int | None = None
    """Lesson that is quoted."""


def turn_fields(turn: TurnView, contents: Contents) -> Iterator[Field]:
    """Yield the fields of a turn, from its request to the version that it helped to make."""
    key = contents.session_key
    session = f"session {turn.session}" + f" ({key})" * (not key.startswith(OPENING))
    at, kind = moment(turn.created_at), f"{turn.kind} turn {turn.index}"
    yield Field("turn", _joined(turn.id, kind, session, turn.user, at, turn.request_kind))
    if turn.state is TurnState.FORGOTTEN:
        yield _outcome(turn, contents)
        return
    yield Field("kind", _joined(turn.kind, turn.kind_reason))
    lost = "could not be tied to a reply" if contents.lost else ""
    yield Field("prompt", _joined(f"{turn.prompt_tokens} tokens", lost), contents.request_text)
    for lesson in contents.lessons:
        yield Field("lesson", str(lesson["id"]), lesson["text"], lesson["id"])
    if contents.voices:
        pieces = (f"{who} {size}{f' ({name})' * bool(name)}" for who, name, size in contents.voices)
        yield Field("writers", f"{', '.join(pieces)} characters")
    yield _reply(turn, contents)
    yield from _next(contents)
    yield from _judged(turn, contents)
    yield from _episode(turn, contents)
    yield _outcome(turn, contents)
    if contents.advantage is not None:
        yield Field("advantage", _advantage(contents))
    yield from (Field("practice", practised(run)) for run in contents.runs)
    if contents.usd:
        yield Field("cost", f"${contents.usd:.6f} without steps")


def _reply(turn: TurnView, contents: Contents) -> Field:
    length, done = turn.completion_tokens, contents.completion
    lost = "tokens not kept" if length > len(done.tokens) else ""
    by = f"not by the current version: {turn.fallback}" if turn.fallback else ""
    value = _joined(f"v{turn.policy_version}", plural(length, "token"), done.stop_reason, lost, by)
    return Field("reply", value, contents.reply_text)


def _next(contents: Contents) -> Iterator[Field]:
    if (state := contents.next_state) is None:
        yield Field("next", "none yet")
        return
    yield Field("next", {"user": "owner"}.get(state.role, state.role), state.text)
    for writer, words in state.beside if state.role == "user" else ():
        yield Field("beside", writer, words)


def _judged(turn: TurnView, contents: Contents) -> Iterator[Field]:
    for feedback in contents.feedback:
        of = "session" if feedback["final"] else "reply"
        unused = f"trains nothing: {feedback['unused']}" if feedback["unused"] else ""
        score = f"{vote(feedback['score'])} by the {feedback['source']}, of the {of}"
        yield Field("rating", _joined(score, unused), feedback["text"] or None)
    if not turn.judged:
        if (answer := contents.failed_try) is not None:
            tries = f"{contents.tries} of {TRIES} tries to judge it"
            yield Field("failed", tries, answer or "(empty)")
        return
    yield Field("verdict", f"{vote(turn.verdict)} by the {_verdict_by(turn, contents)}")
    for hint in contents.hints:
        yield Field("hint", "used" if hint == contents.hint else "not used", hint)
    if contents.hint and contents.hint not in contents.hints:
        yield Field("teacher", "was shown", contents.hint)
    if contents.untaught:
        yield Field("teacher", contents.untaught)


def _verdict_by(turn: TurnView, contents: Contents) -> str | None:
    """Name who judged a turn, with the judge's votes."""
    by, judged = turn.verdict_by, turn.verdict_by == "judge"
    votes = " ".join(
        "unreadable" if answer["value"] is None else vote(answer["value"])
        for answer in contents.answers
    )
    if votes:
        of_judge = "" if judged else f"judge {vote(contents.judge_verdict)}: "
        return f"{by} ({of_judge}{votes})"
    return "agent's program" if judged and contents.judge_prompt is None else by


def _episode(turn: TurnView, contents: Contents) -> Iterator[Field]:
    outcome, reward = contents.session_outcome, contents.reward
    parts = [
        f"{name} {value}" for name, value in (("task", turn.task), ("group", turn.group)) if value
    ]
    parts += [f"outcome {vote(outcome)}"] if outcome is not None else []
    if outcome is not None and reward is not None and turn.state is not TurnState.HELD:
        parts.append(f"reward {vote(reward)}")
    if parts:
        yield Field("episode", _joined(*parts))


def _outcome(turn: TurnView, contents: Contents) -> Field:
    parts = [turn.outcome]
    if turn.trained_in_step is not None:
        parts.append(f"v{contents.version}" + " (rolled back)" * contents.left_behind)
        parts.append(f"with {contents.together - 1} others")
        parts += [moment(contents.finished_at)] if contents.finished_at else []
    parts += [f"step {id} void: {error}" for id, error in contents.void.items()]
    return Field("outcome", _joined(*parts))


def _advantage(contents: Contents) -> str:
    each, parts = contents.advantages, [f"{contents.advantage:+z.3f}"]
    if each:
        parts.append(f"tokens {min(each):+z.3f} to {max(each):+z.3f}, mean {fmean(each):+z.3f}")
    if contents.age:
        parts.append(f"{plural(contents.age, 'step')} old")
    return _joined(*parts)


def practised(run: Record) -> str:
    """Describe a step that practised a lesson."""
    turns = {name: ", ".join(map(str, ids)) for name, ids in run["turns"].items()}
    lesson = "a forgotten lesson" if run["lesson"] is None else f"lesson {run['lesson']}"
    source = f"from turn {turns['source']}" if "source" in turns else ""
    step = _joined(f"step {run['id']}: {lesson}", source, f"on turns {turns['practised']}")
    if run["status"] == "intent":
        return f"{step} · under way"
    if (figures := run["figures"]) is None:
        return f"{step} · failed: {run['error']}"
    return (
        f"{step} · v{run['version']} from v{run['parent']} after "
        f"{plural(figures['optimizer_steps'], 'optimizer step')} · of {figures['of']} replies "
        f"{figures['follow']} follow it (base with it in the prompt: {figures['follow_told']}), "
        f"{figures['end']} end · {figures['obey']} of {figures['contrary']} contrary requests "
        "obeyed"
    )


# A run


def run_fields(seen: Record) -> Iterator[tuple[str, str]]:
    """Yield the state of a run as named values, from the figures of `read_figures`."""
    run, step, pin = seen["run"], seen["step"], seen["pinned"]
    names = (run.get(name) for name in ("method", "model", "backend"))
    yield "run", _joined(*names, seen["data_dir"])
    policy = "none yet"
    if seen["policy_version"] is not None:
        policy = f"v{seen['policy_version']}, {plural(step, 'step')} from the base"
    yield "policy", _joined(policy, f"v{pin} answers, which is pinned" if pin is not None else "")
    ready, queued = seen["samples_waiting"], seen["samples"].get("queued", 0)
    more = f"{queued - ready} more wait for samples to be compared with" if queued > ready else ""
    yield "next step", _joined(f"{ready} of {seen['batch_size']} samples", more)
    kinds, private = seen["turns"], seen["private_sessions"]
    yield (
        "turns",
        _joined(
            f"{kinds['main']} main, {kinds['side']} side",
            plural(seen["sessions"], "session"),
            f"{private} private" if private else "",
        ),
    )
    verdicts, rated = seen["verdicts"], seen["feedback"]
    yield (
        "verdicts",
        _joined(
            ", ".join(f"{verdicts[name]} {name}" for name in ("good", "neutral", "bad")),
            f"{verdicts['none']} without a valid vote" if verdicts["none"] else "",
            plural(seen["hints"], "hint"),
            f"{rated['replies']} rated ({rated['unlike']} unlike the judge)"
            if rated["replies"]
            else "",
        ),
    )
    outcomes = {"trained": seen["samples"].get("trained", 0), **seen["not_trained"]}
    yield "outcomes", _joined(*(f"{outcome}: {turns}" for outcome, turns in outcomes.items()))
    if usd := seen["usd"]:
        costs = ", ".join(f"{purpose} ${cost:.4f}" for purpose, cost in sorted(usd.items()))
        unpriced = f"{n} bills without a price" if (n := seen["bills_without_price"]) else ""
        yield "spent", _joined(f"${sum(usd.values()):.4f}", costs, unpriced)
    yield from _notices(seen)


def _notices(seen: Record) -> Iterator[tuple[str, str]]:
    """Yield what only some runs have."""
    if seen["held"]:
        yield "paused", f"learning is paused: {seen['held']}"
    if seen["gate"]:
        yield "gate", f"step {seen['gate'][0]['step']}: {seen['gate'][0]['told']}"
    if any((episodes := seen["episodes"]).values()):
        yield "episodes", f"{episodes['running']} running, {episodes['over']} ended"
    lessons = seen["lessons"]
    if lessons["told"] or lessons["practised"]:
        first = f"lesson {lessons['newest']} first in session {lessons['session']}"
        counts = f"{lessons['told']} in prompts", f"{lessons['practised']} practised"
        yield "lessons", _joined(*counts, first * bool(lessons["session"]))
    if (number := lessons["candidate"]) is not None:
        yield (
            "wish",
            f"keep lesson {number} for later sessions: `tinker-claw lessons keep {number}`",
        )
    for owner in seen["unheard"]:
        counts = f"{plural(owner['rejections'], 'rejection')} and {plural(owner['hints'], 'hint')}"
        yield "unheard", f"{owner['user']}: {counts} in the newest 100 judged messages"
    if lost := seen["lost_next_states"]:
        yield "lost", f"{plural(lost, 'message')} could not be tied to a reply"
    for client, n in sorted(seen["unclear"].items()):
        source = client or "a client without a name"
        yield "unclear", f"{plural(n, 'message')} of {source} taught nothing: `explain` says why"
    for stranger in seen["strangers"]:
        yield "owners", owners_line(**stranger)


def owners_line(channel: str, sender: str, name: str) -> str:
    """Say which line lets somebody teach who writes to the agent in a chat service."""
    return (
        f"{name or sender} writes to the agent in {channel}, and teaches nothing. If that is you: "
        f'owners = ["{channel}:{sender}"] under [gateway.chats]'
    )
