"""Turns, episodes and runs in words, for the terminal and the page, which only lay them out.

Rule: these sentences are written only here and in `why.py`; they decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Final

from tinker_claw.ledger.groups import LIMIT_S
from tinker_claw.ledger.jobs import TRIES
from tinker_claw.ledger.outcome import Contents, Record, RunView, SampleView, TurnView
from tinker_claw.ledger.samples import KEPT_BARE, KEPT_BASELINE
from tinker_claw.served import OPENING
from tinker_claw.types import Kind, StopReason, Vote, Writer
from tinker_claw.why import Why


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


# A turn

ASKED: Final = "It was asked"
REPLIED: Final = "It replied"
NEXT: Final = "What came next"
VERDICT: Final = "Verdict"
BECAME: Final = "What became of it"


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence about a turn, and its quotation."""

    sentence: str
    quote: str | None = None
    """Words of a user, model or tool."""
    lesson: int | None = None
    """Lesson that is quoted."""


def tell(turn: TurnView, contents: Contents, run: RunView) -> dict[str, list[Sentence]]:
    """Tell a turn from its request to the version that it helped to make, by headings."""
    if turn.blanked == "forgotten":
        text = f"Turn {turn.id} of session {turn.session} was forgotten: its words are gone."
        return {BECAME: [Sentence(text), Sentence(outcome(turn, run))]}
    became = (*of_episode(turn), outcome(turn, run), *_cost(turn, contents))
    return {
        ASKED: [*_request(turn, contents)],
        REPLIED: [*_reply(turn, contents)],
        NEXT: [*_followed(contents), *_rated(contents)],
        VERDICT: [*_judged(turn, contents)],
        BECAME: [
            *(Sentence(text) for text in became),
            *(Sentence(practised(step)) for step in contents.runs),
        ],
    }


def _request(turn: TurnView, contents: Contents) -> Iterator[Sentence]:
    purpose = f", for: {turn.call}" if turn.call else ""
    yield Sentence(
        f"Turn {turn.id}: {turn.kind} turn {turn.index} of session {turn.session} "
        f"({_name(contents.session_key)}) of user {turn.user}, {moment(turn.created_at)}{purpose}."
    )
    yield Sentence(f"{turn.kind.capitalize()} turn: {turn.reason}.")
    yield Sentence(f"It asked, in a prompt of {turn.prompt_tokens} tokens:", contents.request_text)
    for lesson in contents.lessons:
        number = lesson["id"]
        yield Sentence(f"Its prompt has lesson {number}:", lesson["text"], number)
    if contents.voices:
        pieces = (
            f"{who}{f' ({what})' * bool(what)}, {plural(n, 'character')}"
            for who, what, n in contents.voices
        )
        yield Sentence(f"Who wrote what was new in it: {'; '.join(pieces)}.")
    if turn.lost:
        yield Sentence("That could not be tied to a reply, so no turn got it as its next state.")


def _name(key: str) -> str:
    """Return the name of a session; a digest of its first messages is none."""
    return "known by its first messages" if key.startswith(OPENING) else key


_ENDED = {
    StopReason.STOP: "and stopped",
    StopReason.LENGTH: "and reached the limit on replies",
    StopReason.ABORT: "and broke off",
}


def _reply(turn: TurnView, contents: Contents) -> Iterator[Sentence]:
    done, length = contents.completion, turn.completion_tokens
    ended = _ENDED.get(done.stop_reason, done.stop_reason)
    sentence = f"v{turn.policy_version} replied with {plural(length, 'token')} {ended}:"
    yield Sentence(sentence, contents.reply_text)
    if length > len(done.tokens):
        yield Sentence(
            "Its tokens are not in the ledger: they held what is not kept, or were dropped."
        )
    if turn.fallback is not None:
        yield Sentence(f"It was not the current version that answered: {turn.fallback}.")


_FOLLOWED = {
    "user": "The owner went on:",
    "tool": "Its tools returned:",
    "other": "Others went on, who are not the owner:",
}
_BESIDE = {
    Writer.QUOTATION: "quoted from earlier messages",
    Writer.MEMBER: "another person's",
}


def _followed(contents: Contents) -> Iterator[Sentence]:
    if (state := contents.next_state) is None:
        yield Sentence("Nothing has followed it so far.")
        return
    yield Sentence(_FOLLOWED[state.role], state.text)
    for writer, words in state.beside if state.role == "user" else ():
        yield Sentence(f"Beside it stood what is {_BESIDE.get(writer, writer)}:", words)


def _rated(contents: Contents) -> Iterator[Sentence]:
    for feedback in contents.feedback:
        of = "the end of its session" if feedback["final"] else "it"
        more = ", ".join(f"{name} {feedback[name]}" for name in ("task", "group") if feedback[name])
        rest = f" ({more})" if more else ""
        sentence = f"Its {feedback['source']} rated {of} outright: {vote(feedback['score'])}{rest}"
        quote = feedback["text"] or None
        yield Sentence(f"{sentence}{':' if quote else '.'}", quote)


def _judged(turn: TurnView, contents: Contents) -> Iterator[Sentence]:
    if not turn.judged:
        if (answer := contents.failed_try) is not None:
            yield Sentence("The last try to judge it failed:", answer or "(an empty answer)")
        return
    voted = ", ".join("unreadable" if v is None else vote(v) for v in turn.votes)
    judge = f"The judge voted {voted}" if voted else "The judge"
    if turn.verdict_by == "judge" and contents.judge_prompt is None and not voted:
        did = "denied the call" if turn.verdict == -1 else "stopped the run"
        yield Sentence(f"The agent's program says that you {did}: {_verdict(turn.verdict)}.")
    elif turn.verdict_by == "judge":
        yield Sentence(f"{judge}: {_verdict(turn.verdict)}.")
    else:
        if voted:
            yield Sentence(f"{judge}: by them {_verdict(turn.judge_verdict)}.")
        yield Sentence(
            f"Its {turn.verdict_by}'s rating outranks the judge: {_verdict(turn.verdict)}."
        )
    for hint in contents.hints:
        used = ", used" if hint == contents.hint else ""
        yield Sentence(f"Hint, as the {turn.verdict_by} put it{used}:", hint)
    if contents.hint and contents.hint not in contents.hints:
        yield Sentence("The teacher was told:", contents.hint)
    # Where the prompt or all tokens are gone, so is the place, whether or not the hint was used.
    place_lost = turn.refused is Why.FORGOTTEN_LESSON or not contents.completion.tokens
    if contents.hints and not (turn.has_hint_place or place_lost):
        yield Sentence("The prompt has no place for a hint, so it was not used.")
    if contents.untaught:
        yield Sentence(f"No teacher scored it: {contents.untaught}.")


def _verdict(value: Vote | None) -> str:
    if value is None:
        return "no vote could be read, so there is no verdict"
    return f"the verdict is {vote(value)} ({({1: 'good', 0: 'neutral', -1: 'bad'})[value]})"


def _cost(turn: TurnView, contents: Contents) -> Iterator[str]:
    """Tell how a trained turn was trained, and what a turn cost."""
    sample, each = turn.sample, contents.advantages
    if turn.trained_in_step is not None and sample and sample.advantage is not None:
        yield f"Advantage by its reward: {sample.advantage:+z.3f} (above 0: more of this)."
        if each:
            spread = f"min {min(each):+z.3f}, mean {fmean(each):+z.3f}, max {max(each):+z.3f}"
            yield f"Token advantages: {spread}."
        if sample.age:
            old = plural(sample.age, "step")
            yield f"It was {old} old by then; its advantages are corrected for that."
    if contents.usd:
        yield f"Serving, judging and teaching it cost ${contents.usd:.6f}; steps are not in that."


def practised(run: Record) -> str:
    """Tell of a step that practised a lesson."""
    turns = {name: ", ".join(map(str, ids)) for name, ids in run["turns"].items()}
    lesson = "a forgotten lesson" if run["lesson"] is None else f"lesson {run['lesson']}"
    source = f", said of turn {turns['source']}," if "source" in turns else ""
    sentence = f"Step {run['id']} practised {lesson}{source} from v{run['parent']} on the first "
    sentence += f"messages of turns {turns['practised']}"
    if run["status"] == "intent":
        return f"{sentence}; it is under way."
    if (figures := run["figures"]) is None:
        return f"{sentence}. It failed: {run['error'].rstrip('.')}."
    steps, of = plural(figures["optimizer_steps"], "optimizer step"), figures["of"]
    return (
        f"{sentence}: after {steps} {figures['follow']} of {of} replies follow it without being "
        f"told (the base, told: {figures['follow_told']}), {figures['end']} end by themselves, and "
        f"{figures['obey']} of {figures['contrary']} requests for the opposite are obeyed. It made "
        f"v{run['version']}."
    )


# Its outcome, or what it waits for


def outcome(turn: TurnView, run: RunView) -> str:
    """Describe the outcome of a turn, or what it waits for, in sentences that contain its word."""
    sentence = _became(turn, run)
    if turn.sample is not None and turn.sample.void:
        sentence += _void(turn.sample.void)
    if turn.unused is None:
        return sentence
    recorded = f"Its {turn.said_by}'s rating is recorded and trains nothing"
    counts = f" {_COUNTS}" * (turn.sample is not None and turn.judged)
    return f"{sentence} {recorded}: {turn.unused.rstrip('.')}.{counts}"


_COUNTS = "It is the verdict all the same, and counts among the accepted replies, or against them."


def rating(turn: TurnView) -> str:
    """Describe what a rating of a turn does from now on."""
    if turn.trained_in_step is not None:
        return (
            "This reply was trained already, so a rating trains nothing more. It becomes the "
            "verdict, and counts among the accepted replies, or against them."
        )
    if turn.kind is Kind.SIDE:
        return "A rating of a side turn is recorded, and trains nothing."
    return (
        "A rating takes the place of the judge's verdict. A reason of 👎 is the hint: what should "
        "have been done."
    )


def _became(turn: TurnView, run: RunView) -> str:
    word, sample = turn.outcome, turn.sample
    match turn.why:
        case Why.SIDE:
            return f"It is never trained: it is a {word}."
        case Why.NEXT:
            return f"It {word}: the user's next message, or the results of its tools."
        case Why.IDLE:
            return f"It {word}: whatever the user still says in it counts."
        case Why.PASSED:
            return _passed(turn)
        case Why.JUDGE if turn.tries:
            again = f"and is tried again, at most {TRIES} times; {turn.tries} failed"
            return f"It {word}, {again}."
        case Why.JUDGE:
            return (
                f"It {word}. `tinker-claw status` says whether the judge works, waits for the "
                "service, or is paused by the budget."
            )
        case Why.QUEUE if turn.judged and sample is None:
            longer = "which takes a moment, or longer where a teacher scores it first"
            return f"It was judged, and {word}, {longer}."
        case Why.ENDING | Why.GROUP | Why.QUEUE:
            return _running(turn)
        case _:
            pass
    if sample is None:
        because = (turn.untrained_because or word).rstrip(".")
        return f"It is not trained: {because}."
    match turn.why:
        case Why.TRAINING:
            return f"It is {word}, in step {sample.begun}."
        case Why.STEP:
            return f"It {word}; {_queue(run)}"
        case Why.BARE:
            return (
                f"It {word}: a rejection without a hint does not say what would be better. It goes "
                f"with the next batch that has one; the newest {KEPT_BARE} such are kept. "
                "`/bad why` gives a hint."
            )
        case Why.BASELINE:
            return (
                f"It {word}: a batch without one does not say what would be better. The newest "
                f"{KEPT_BASELINE} such samples are kept as the baseline; {_queue(run)}"
            )
        case Why.EXPIRED:
            return (
                f"It is not trained: {word}, because too many steps had been taken since "
                f"v{turn.policy_version} answered (--max-staleness); by now they are "
                f"{run.step - turn.version_step}."
            )
        case _:
            pass
    if sample.state != "trained":  # set aside, or expired for a reason of its own
        return f"It is not trained: {word}."
    return _trained(word, sample, run)


def _passed(turn: TurnView) -> str:
    if turn.passed_by is None:
        return f"It {turn.outcome}: its session is private now, and nothing of it is kept."
    which = "which does not answer this reply"
    if turn.passed_lost:
        which = "which could not be tied to a reply"
    return f"It {turn.outcome}: its session has gone on with turn {turn.passed_by}, {which}."


def _running(turn: TurnView) -> str:
    """Describe an episode that waits for its outcome, or for its group's."""
    limit = f"{LIMIT_S / 3600:g} hour after the last that is heard of"
    if turn.why is Why.ENDING:
        expires = f"without one it expires {limit} its {'group' if turn.group else 'episode'}"
        return f"It {turn.outcome}: final feedback says how its episode ended; {expires}."
    if turn.why is Why.QUEUE:
        return f"Its episode has ended, and it {turn.outcome}, which takes a moment."
    return (
        f"It {turn.outcome}: of {turn.group_size} episodes of {turn.group} {turn.group_done} have "
        f"their outcome. Those that have one are queued without the others {limit} any of them."
    )


def _trained(word: str, sample: SampleView, run: RunView) -> str:
    company = f"with {plural(n, 'other sample')}" if (n := sample.together - 1) else "alone"
    at = "" if sample.finished_at is None else f" at {moment(sample.finished_at)}"
    left = sample.version is not None and sample.version not in run.line.live
    behind = " A rollback has left that version behind." if left else ""
    return f"It was {word}, {company}, which made v{sample.version}{at}.{behind}"


def _queue(run: RunView) -> str:
    """Describe how far the next batch is."""
    missing = run.batch - run.ready
    rest = (
        f"A step takes {run.batch} at a time or whole groups, the newest first, not too many of "
        "one session or user, and at most half that tools have judged."
    )
    if missing > 0:
        are = "is" if missing == 1 else "are"
        rest = f"A step takes {run.batch}, so {missing} {are} missing."
    able = f"{plural(run.ready, 'sample')} {'is' if run.ready == 1 else 'are'} ready"
    return f"{able}. {rest}"


def _void(steps: Mapping[str, str | None]) -> str:
    why = next(filter(None, [*steps.values()][::-1]), "no reason is known").rstrip(".")
    which, were = ("Steps", "were") if len(steps) > 1 else ("Step", "was")
    return f" {which} {', '.join(steps)} with it {were} void: {why}."


def of_episode(turn: TurnView) -> Iterator[str]:
    """Yield sentences on the turn's episode; none where its session is not an episode."""
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
        yield f"Reward of this reply, {of}: {vote(sample.reward)}."


# Patterns among turns

_MOST = 0.75
_FEWEST = 3
"""Fewest turns that make a pattern."""


def advice(turns: Sequence[TurnView]) -> Iterator[str]:
    """Yield advice on these turns, oldest first; none where learning works."""
    main = [turn for turn in turns if turn.kind is Kind.MAIN]
    followed = [turn for turn in main if turn.next_role is not None]
    side = [turn for turn in turns if turn.kind is Kind.SIDE]
    if _most(side, turns):
        reason, times = Counter(turn.reason for turn in side).most_common(1)[0]
        yield (
            f"{len(side)} of {len(turns)} requests are side turns, which are never trained; the "
            f"reason of {times}: {reason}. Recaps, titles, compaction, heartbeat and cron are "
            "meant to be side turns. If these were your own messages, the client sends something "
            "that marks them: look for a header X-Turn-Type, for a model name with @v, and for "
            "another proxy in between; `tinker-claw explain` shows the reason of each."
        )
    if len(main) >= _FEWEST and not followed:
        why = (
            "although sessions go on. The replies do not come back in the client's history as they "
            "were sent: something between rewrites or drops them."
        )
        if len({turn.session for turn in main}) == len(main):
            why = (
                "so there is nothing to judge: every one stands alone in its session. Go on in the "
                "same conversation; if you did, the client sends neither its earlier messages back "
                "nor a name for the session (X-Session-Id)."
            )
        yield f"None of the {len(main)} main turns has a next state, {why}"
    unfit = [turn for turn in main if turn.refused is Why.SAMPLED_AT]
    if _most(unfit, main):
        yield (
            f"{len(unfit)} of {len(main)} main turns cannot be trained: "
            f"{unfit[-1].untrained_because}. The client sets it; take temperature, top_p and top_k "
            "out of its settings for this model."
        )


def _most(part: Sequence[TurnView], whole: Sequence[TurnView]) -> bool:
    return len(whole) >= _FEWEST and len(part) >= _MOST * len(whole)


# A run

DEFINED = (
    "This counts the first turn of each session that its owner judged, by their next message or a "
    "rating: usually the reply after the tools. Neutral verdicts, what tools and programs say, and "
    "versions that a rollback left behind do not count. The 95 % interval in brackets holds at "
    "every look. What you ask changes over time, too: this is a record, not an experiment."
)
"""Explanation of the accepted shares."""
_JUDGE_ALONE = (
    "nobody has rated a reply outright, so a judge that is always wrong would not show: "
    "rate a reply now and then (/good, /bad)"
)
_UNHEARD = (
    "in the newest 100 judged messages, where people reject about 11: `make judge` measures a judge"
)


def facts(seen: Record) -> Iterator[tuple[str, str]]:
    """Yield figures that fit on a line each, as name and text."""
    model, method, backend = (seen["run"].get(k, "?") for k in ("model", "method", "backend"))
    yield "records", f"{seen['data_dir']}: {method} on {model}, backend {backend}"
    if seen["policy_version"] is None:
        yield "policy", "no version yet: the run has not begun"
    else:
        pin = "" if seen["pinned"] is None else f"; v{seen['pinned']} answers, which is pinned"
        steps = plural(seen["step"], "step")
        yield "policy", f"v{seen['policy_version']}, {steps} from the base{pin}"
    if seen["held"]:
        yield "paused", f"learning is paused: {seen['held']}"
    if seen["gate"]:
        yield "gate", f"step {seen['gate'][0]['step']}: {seen['gate'][0]['told']}"
    able, whole = seen["samples_waiting"], seen["batch_size"]
    more = seen["samples"].get("queued", 0) - able
    waits = (
        f"; {more} more wait: a step needs a rejection, a hint or a rating; rejections without a "
        "hint train only beside a better reply; what tools have judged is at most half of a step"
    )
    yield "next step", f"{able} of {whole} samples{waits * (more > 0)}"
    private = f", {n} of them private now" if (n := seen["private_sessions"]) else ""
    turns = f"{seen['turns']['main']} main and {seen['turns']['side']} side turns"
    yield "turns", f"{turns} in {plural(seen['sessions'], 'session')}{private}"
    if any((episodes := seen["episodes"]).values()):
        yield "episodes", f"{episodes['running']} running, {episodes['over']} ended"
    votes = ", ".join(f"{seen['verdicts'][name]} {name}" for name in ("good", "neutral", "bad"))
    none = f"{seen['verdicts']['none']} without a valid vote"
    yield "verdicts", f"{votes}, {none}; {plural(seen['hints'], 'hint')}"
    lessons = seen["lessons"]
    if lessons["told"] or lessons["practised"]:
        first, session = lessons["newest"], lessons["session"]
        new = f"; lesson {first} for the first time in session {session}" if session else ""
        more = f", {n} practised" if (n := lessons["practised"]) else ""
        yield "lessons", f"{lessons['told']} told{new}{more}: see `tinker-claw lessons`"
    if (number := lessons["candidate"]) is not None:
        yield "wish", f"hold lesson {number} in later sessions? `tinker-claw lessons keep {number}`"
    feedback = seen["feedback"]
    if seen["verdicts"]["good"] and not any(feedback.values()):
        yield "feedback", _JUDGE_ALONE
    if any(feedback.values()):
        replies = "1 reply" if feedback["replies"] == 1 else f"{feedback['replies']} replies"
        rated = f"{replies} and {plural(feedback['sessions'], 'session')} rated outright"
        yield "feedback", f"{rated}; the judge disagreed on {feedback['unlike']} of the replies"
    for owner in seen["unheard"]:
        counts = f"{plural(owner['rejections'], 'rejection')} and {plural(owner['hints'], 'hint')}"
        yield "unheard", f"{owner['user']}: {counts} {_UNHEARD}"
    if lost := seen["lost_next_states"]:
        yield "lost", f"{plural(lost, 'message')} could not be tied to a reply"
    for client, n in sorted(seen["unclear"].items()):
        source = client or "a client without a name"
        yield "unclear", f"{plural(n, 'message')} of {source} taught nothing: `explain` says why"
    for stranger in seen["strangers"]:
        yield "owners", owners_line(**stranger)
    states = sorted(seen["samples"].items())
    samples = ", ".join(f"{n} {_STATES.get(state, state)}" for state, n in states)
    yield "samples", samples or "none"
    if usd := seen["usd"]:
        costs = ", ".join(f"{purpose} ${cost:.4f}" for purpose, cost in sorted(usd.items()))
        unpriced = f"; {n} bills without a price" if (n := seen["bills_without_price"]) else ""
        yield "spent", f"${sum(usd.values()):.4f}: {costs}{unpriced}"
    if (judge := seen["judge_billed"])["turns"]:
        tokens = f"{judge['asked']:,} tokens asked and {judge['answered']:,} answered"
        yield "judge", f"{plural(judge['turns'], 'turn')} judged: {tokens}, ${judge['usd']:.4f}"


_STATES: Mapping[str, str] = {"held": "waiting for an outcome", "quarantined": "set aside"}


def owners_line(channel: str, sender: str, name: str) -> str:
    """Say which line lets somebody teach who writes to the agent in a chat service."""
    return (
        f"{name or sender} writes to the agent in {channel}, and teaches nothing. If that is you: "
        f'owners = ["{channel}:{sender}"] under [gateway.chats]'
    )
