"""Turns and runs as named values, for the terminal and the page, which only lay them out.

Rule: what both show comes from here, so that they show the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from statistics import fmean
from typing import NamedTuple

from tinker_claw.ledger.jobs import TRIES
from tinker_claw.ledger.turn_view import Contents, Record
from tinker_claw.served import OPENING
from tinker_claw.turn_state import TurnState
from tinker_claw.types import NextState


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


def short(length: int, text: str | None) -> str:
    """Shorten a text to at most `length` characters."""
    text = text or ""
    return text if len(text) <= length else text[: length - 1] + "…"


def bar(part: int, whole: int, cells: int) -> str:
    """Draw a bar that is filled to part / whole."""
    filled = cells * min(part, whole) // whole if whole else 0
    return f"[{'#' * filled}{'.' * (cells - filled)}]"


def vote(value: float | None) -> str:
    """Return +1, 0 or -1, or a reward between; `none` where no vote was valid."""
    return "none" if value is None else f"{value:+z.3g}" if value else "0"


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


def turn_fields(contents: Contents) -> Iterator[Field]:
    """Yield the fields of a turn, from its request to the version that it helped to make."""
    turn, key = contents.turn, contents.session_key
    session = f"session {turn['session']}" + f" ({key})" * (not key.startswith(OPENING))
    yield Field("turn", _joined(turn["id"], session, turn["user"], moment(turn["created_at"])))
    if turn["state"] == TurnState.FORGOTTEN:
        yield Field("outcome", _outcome(contents))
        return
    yield Field("kind", _joined(turn["kind"], turn["kind_reason"]))
    lost = "could not be tied to a reply" if contents.lost else ""
    yield Field("prompt", _joined(f"{turn['prompt_tokens']} tokens", lost), contents.request_text)
    for lesson in contents.lessons:
        yield Field("lesson", str(lesson["id"]), lesson["text"], lesson["id"])
    if contents.voices:
        pieces = (f"{who} {size}{f' ({name})' * bool(name)}" for who, name, size in contents.voices)
        yield Field("writers", f"{', '.join(pieces)} characters")
    yield Field("reply", _reply(contents), contents.reply_text)
    yield from _next(contents.next_state)
    yield from _judged(contents)
    if episode := _episode(contents):
        yield Field("episode", episode)
    yield Field("outcome", _outcome(contents))
    if contents.advantage is not None:
        yield Field("advantage", _advantage(contents.advantage, contents.advantages))
    yield from (Field("practice", practised(run)) for run in contents.runs)


def _reply(contents: Contents) -> str:
    turn, done = contents.turn, contents.completion
    return _joined(
        f"v{turn['policy_version']}",
        plural(turn["completion_tokens"], "token"),
        done.stop_reason,
        "tokens not kept" if turn["completion_tokens"] > len(done.tokens) else "",
        f"not by the current version: {turn['fallback']}" if turn["fallback"] else "",
    )


def _next(state: NextState | None) -> Iterator[Field]:
    if state is None:
        yield Field("next", "none yet")
        return
    yield Field("next", "owner" if state.role == "user" else state.role, state.text)
    for writer, words in state.beside if state.role == "user" else ():
        yield Field("beside", writer, words)


def _judged(contents: Contents) -> Iterator[Field]:
    for feedback in contents.feedback:
        of = "session" if feedback["final"] else "reply"
        unused = f"trains nothing: {feedback['unused']}" if feedback["unused"] else ""
        score = f"{vote(feedback['score'])} by the {feedback['source']}, of the {of}"
        yield Field("rating", _joined(score, unused), feedback["text"] or None)
    if not contents.turn["judged"]:
        if contents.failed_try is not None:
            tries = f"{contents.tries} of {TRIES} tries to judge it"
            yield Field("failed", tries, contents.failed_try or "(empty)")
        return
    yield Field("verdict", _verdict(contents))
    for hint in contents.hints:
        yield Field("hint", "used" if hint == contents.hint else "not used", hint)
    if contents.hint and contents.hint not in contents.hints:
        yield Field("teacher", "was shown", contents.hint)
    if contents.untaught:
        yield Field("teacher", contents.untaught)
    if contents.teacher_text:
        trained = "is trained" if contents.advantage is not None else "will be trained"
        yield Field("teacher", f"wrote a reply, which {trained}", contents.teacher_text)


def _verdict(contents: Contents) -> str:
    """Return the verdict, who gave it, and the judge's votes."""
    by = contents.turn["verdict_by"]
    judge = "" if by == "judge" else "judge "
    votes = " ".join(
        "unreadable" if answer["value"] is None else vote(answer["value"])
        for answer in contents.answers
    )
    if by == "judge" and not votes and contents.judge_prompt is None:
        by = "agent's program"
    return f"{vote(contents.turn['verdict'])} by the {by}" + f" ({judge}{votes})" * bool(votes)


def _episode(contents: Contents) -> str:
    turn, outcome, reward = contents.turn, contents.session_outcome, contents.reward
    final = outcome is not None and reward is not None and turn["state"] != TurnState.HELD
    return _joined(
        turn["task"] and f"task {turn['task']}",
        turn["group"] and f"group {turn['group']}",
        "" if outcome is None else f"outcome {vote(outcome)}",
        f"reward {vote(reward)}" if final else "",
    )


def _outcome(contents: Contents) -> str:
    version = "" if contents.version is None else f"v{contents.version}"
    return _joined(
        contents.turn["outcome"],
        version + " (rolled back)" * contents.left_behind,
        *(f"step {id} void: {error}" for id, error in contents.void.items()),
    )


def _advantage(reply: float, tokens: Sequence[float]) -> str:
    if not tokens:
        return f"{reply:+z.3f}"
    low, high, mean = min(tokens), max(tokens), fmean(tokens)
    return f"{reply:+z.3f} · tokens {low:+z.3f} to {high:+z.3f}, mean {mean:+z.3f}"


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
    names = (seen["run"].get(name) for name in ("method", "model", "backend"))
    yield "run", _joined(*names, seen["data_dir"])
    number, pin, policy = seen["policy_version"], seen["pinned"], "none yet"
    if number is not None:
        policy = f"v{number}, {plural(seen['step'], 'step')} from the base"
    yield "policy", _joined(policy, f"v{pin} answers, which is pinned" if pin is not None else "")
    ready, queued = seen["samples_waiting"], seen["samples"].get("queued", 0)
    more = f"{queued - ready} more wait for samples to be compared with" if queued > ready else ""
    yield "next step", _joined(f"{ready} of {seen['batch_size']} samples", more)
    yield "turns", _joined(*_turns(seen))
    yield "verdicts", _joined(*_verdicts(seen))
    outcomes = {"trained": seen["samples"].get("trained", 0), **seen["not_trained"]}
    yield "outcomes", _joined(*(f"{outcome}: {turns}" for outcome, turns in outcomes.items()))
    if usd := seen["usd"]:
        costs = ", ".join(f"{purpose} ${cost:.4f}" for purpose, cost in sorted(usd.items()))
        yield "spent", _joined(f"${sum(usd.values()):.4f}", costs)
    yield from _notices(seen)


def _turns(seen: Record) -> Iterator[str]:
    yield f"{seen['turns']['main']} main, {seen['turns']['side']} side"
    yield plural(seen["sessions"], "session")
    if private := seen["private_sessions"]:
        yield f"{private} private"
    if lost := seen["lost_next_states"]:
        yield f"{plural(lost, 'message')} could not be tied to a reply"


def _verdicts(seen: Record) -> Iterator[str]:
    verdicts = seen["verdicts"]
    yield ", ".join(f"{verdicts[name]} {name}" for name in ("good", "neutral", "bad"))
    if verdicts["none"]:
        yield f"{verdicts['none']} without a valid vote"
    yield plural(seen["hints"], "hint")
    if rated := seen["rated"]:
        yield f"{rated} rated ({seen['unlike_judge']} unlike the judge)"


def _notices(seen: Record) -> Iterator[tuple[str, str]]:
    """Yield what asks the user to do something."""
    if seen["held"]:
        yield "paused", f"learning is paused: {seen['held']}"
    if (lesson := seen["candidate"]) is not None:
        yield (
            "wish",
            f"keep lesson {lesson} for later sessions: `tinker-claw lessons keep {lesson}`",
        )
    for owner in seen["unheard"]:
        counts = f"{plural(owner['rejections'], 'rejection')} and {plural(owner['hints'], 'hint')}"
        yield "unheard", f"{owner['user']}: {counts} in the newest 100 judged messages"
    for stranger in seen["strangers"]:
        yield "owners", owners_line(**stranger)


def owners_line(channel: str, sender: str, name: str) -> str:
    """Say which line lets somebody teach who writes to the agent in a chat service."""
    return (
        f"{name or sender} writes to the agent in {channel}, and teaches nothing. If that is you: "
        f'owners = ["{channel}:{sender}"] under [gateway.chats]'
    )
