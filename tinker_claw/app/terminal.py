"""The terminal of a start: a banner, and a line for the outcome of each turn.

Rule: words stand on the terminal alone, read from the ledger, which has them redacted; no event has
any. Never those of private, side or other people's turns.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from tinker_claw.config.settings import DEFAULT_USER
from tinker_claw.words import bar, owners_line, printable, short, vote

LONGEST = 48
"""Characters of a turn's words."""
CELLS = 16
"""Cells of the bar to the next step."""
UNSEEN = (
    "turn.forgotten",
    "feedback",
    "judge.rules",
    "judge.thinks",
    "judge.adapted",
    "servers.ready",
    "sampler.close_failed",
    "version.republished",
    "version.publish_failed",
    "ledger.trimmed",
    "forgotten",
    "judged_again",
)
"""Events for `--log json` alone, as are all of samples: each turn has them, another line or the
command that asked says it, or a person can do nothing about it."""


@dataclass(slots=True)
class Terminal:
    """structlog's last processor for a terminal."""

    quiet: bool = False
    """Whether to leave out words and lines of turns."""
    opening: Callable[[int], str | None] | None = None
    """Returns how a turn that its owner asked for began; None: nobody may see it here."""
    lesson: Callable[[int], str | None] = lambda lesson: None
    """Returns the words of a lesson; None: there is no such lesson."""
    waiting: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns the samples that wait, and how many a step takes."""

    def __call__(self, logger: Any, method: str, event: dict[str, Any]) -> str:
        """Return the text of an event.

        Raises:
            structlog.DropEvent: a person need not see it.
        """
        name = event["event"]
        unseen = name in UNSEEN or name.startswith("sample.")
        if unseen or (self.quiet and name in ("turn.captured", "verdict")):
            raise structlog.DropEvent
        if name == "serving":
            return banner(event)
        if (sentence := SENTENCES.get(name)) is not None:
            text = sentence.format_map(event | {"words": self._words(event.get("lesson"))})
        elif (write := LINES.get(name)) is not None:
            text = write(self, event)
        else:  # a plug-in's
            return structlog.dev.ConsoleRenderer(colors=True)(logger, method, event)
        traced = f"\n{event['exception']}" if event.get("exception") else ""
        return f"{event['timestamp']}  {printable(text)}{traced}"

    def begun(self, turn: int | None) -> str:
        """Return a turn's first words in quotation marks.

        Raises:
            structlog.DropEvent: they are not shown here.
        """
        words = self.opening(turn) if self.opening and turn is not None else None
        if words is None:
            raise structlog.DropEvent
        return quoted(words)

    def _words(self, lesson: int | None) -> str:
        words = None if self.quiet or lesson is None else self.lesson(lesson)
        return "" if words is None else f": {quoted(words)}"

    def bar(self) -> str:
        """Return the bar to the next step."""
        waiting, batch = self.waiting()
        return f"next step {bar(waiting, batch, CELLS)} {min(waiting, batch)}/{batch}"


def quoted(words: str) -> str:
    """Return the first words of a text in quotation marks, on one line."""
    return f"“{short(LONGEST, ' '.join(printable(words).split()))}”"


def banner(event: Mapping[str, Any]) -> str:
    """Return the lines that a start ends with. `event`: `serving`."""
    url = event["url"]
    lines = {
        "address": f"{url}   model {event['model']}",
        "page": f"{url.removesuffix('/v1')}/ui",
        "key": f"in {event['key_file']}" if event.get("key_file") else event.get("key", "none"),
        "learns": f"{event['method']}, {event['backend']}, version {event['version']} answers",
        "records": event["data_dir"],
        "next": "point your agent at the address; for OpenClaw: tinker-claw openclaw-config "
        f"--data-dir {shlex.quote(event['data_dir'])}",
    }
    return "\n".join(
        ["", "tinker-claw is ready. Ctrl-C ends it; nothing is lost."]
        + [f"  {name:<8} {text}" for name, text in lines.items()]
        + [""]
    )


def _answered(terminal: Terminal, event: Mapping[str, Any]) -> str:
    words = terminal.begun(event.get("turn"))
    took = f"v{event['version']} answered in {event['seconds']:.1f} s"
    who = "you" if event["user"] == DEFAULT_USER else event["user"]
    return f"{who}: {words}  turn {event['turn']}, {took}"


def _judged(terminal: Terminal, event: Mapping[str, Any]) -> str:
    hint = ", with a hint" if event["hints"] else ""
    verdict = f"turn {event['turn']}, verdict {vote(event['value'])}{hint}"
    return f"{terminal.begun(event['turn'])}  {verdict}   {terminal.bar()}"


def _practising(_: Terminal, event: Mapping[str, Any]) -> str:
    cost = "" if event.get("usd") is None else f", for ${event['usd']:.2f} at most"
    prompts = f"{event['prompts']} of your first messages"
    return f"Lesson {event['lesson']} is practised now on {prompts}{cost}."


def _estimated(_: Terminal, event: Mapping[str, Any]) -> str:
    if event["step_usd"] is None:
        return f"What it will cost is not known: {event['note']}"
    budget = str(event["budget_usd"]).removesuffix(".0")
    limit = "there is no budget" if budget == "None" else f"the budget is ${budget}"
    return (
        f"By estimate a message with ten requests costs ${event['message_usd']:.2f}, a training "
        f"step ${event['step_usd']:.2f}; {limit}."
    )


LINES: Mapping[str, Callable[[Terminal, Mapping[str, Any]], str]] = {
    "turn.captured": _answered,
    "verdict": _judged,
    "practice.started": _practising,
    "spend.estimate": _estimated,
    "sender.unlisted": lambda _, event: owners_line(
        event["channel"], event["sender"], event["name"]
    ),
}
SENTENCES: Mapping[str, str] = {
    "lesson.first_told": "Lesson {lesson} is told for the first time{words}",
    "lesson.candidate": "Hold this in later sessions? `tinker-claw lessons keep {lesson}`{words}",
    "version.refused": "The service refuses version {version} (in its place: {by}): {error}",
    "step": "A step has trained on {samples} samples in {seconds:.1f} s.",
    "layout": "GPUs: {gpus}.",
    "part.failed": "The {part} failed: {error}",
    "publish": "Version {version} answers from now on.",
    "model.download": (
        "{model} is not on this machine: downloading it from the Hugging Face hub ..."
    ),
    "stopped": "Stopped.",
    "resumed": "Resumed: version {version}, after {step} steps; {waiting} samples are queued.",
    "key.created": "Others can log in on this machine, so clients need the key in {file}.",
    "data_dir.closed": "{files} files could be read by others, and no longer can: {first} ...",
    "data_dir.open": "Others can read {files} files ({first} ...): run chmod -R go= on them.",
    "local": "{message}",
    "servers": "{message}",
    "learning.held": "Learning is paused: {because}",
    "learning.resumed": "Learning resumes.",
    "step.void": "A training step failed and changed nothing: {error}",
    "steps.void": "A training step was interrupted at the last stop; its samples are still queued.",
    "gate.idle": "{canaries} canaries are too few to check new versions ({fewest} are needed).",
    "gate.refused": "The new version failed the canaries and will not answer: {error}",
    "gate.left_out": "{questions} canaries could not be asked: {error}",
    "gate.skipped": "The canaries could not be asked, so the new version answers: {error}",
    "gate.unanswered": "The canaries got no answer: {error}",
    "practice.over_budget": "Lesson {lesson} waits to be practised: the budget has no room for it.",
    "practice.rejected": "Lesson {lesson} is told again: practising it did not do what you want.",
    "practice.learned": "Lesson {lesson} is learned, and no longer told.",
    "practice.failed": "Practising a lesson failed and changed nothing: {error}",
    "turn.unjudged": "The judge's answers on turn {turn} could not be read; it is not trained.",
    "judge.failing": "The judge fails, so learning waits: {error}",
    "judge.recovered": "The judge answers again.",
    "ledger.checking": "Checking the ledger ({gigabytes} GB) ...",
    "ledger.failing": "The ledger cannot be written: {error}",
    "ledger.recovered": "The ledger can be written again.",
    "ledger.log_grows": "The ledger's log file grows: {because}.",
    "ledger.trim_failed": "Old turns could not be dropped; it is tried again: {error}",
    "metrics.write_failed": "{file} cannot be written: {error}",
    "spend.paused": "{because}",
    "spend.near": "{because}",
    "backend.lost": "The service does not answer; requests are tried again: {error}",
    "backend.recovered": "The service answers again, after {away_s:.0f} s.",
    "version.answers": "Version {version} answers again.",
    "sampler.failed": "A reply broke off; it continues in {again_in_s:.0f} s: {error}",
    "sampler.gone": "Version {version} cannot be sampled: {error}",
    "pin.gone": "The pinned version {version} cannot be sampled, and the pin is gone: {error}",
    "fallback.failed": "{by} could not answer instead: {error}",
    "fallback.answered": "{by} answered instead of version {version}.",
    "checkpoint.kept": "A checkpoint could not be deleted and stays: {path} ({error})",
    "gateway.failed": "A request failed in the gateway ({kind}): {error}",
    "page.read_failed": "The page could not read the ledger: {error}",
    "request.left_out": "Left out of a request: {what}",
    "request.unfit": "{what}",
    "private.near_miss": "A private session began: {meaning}.",
    "pinned": "Version {version} is pinned and answers.",
    "unpinned": "Version {version} answers again, the newest.",
    "rolled_back": "Version {version}, with the weights of version {to}, answers from now on.",
    "accepted": "Canaries are compared with version {version} from now on.",
    "renderer.refuses": "The model's chat format does not do all: {of}",
    "sink.failed": "The tracker {sink} failed, and is tried again in {again_in_s:.0f} s: {error}",
    "sink.killed": "The tracker {sink} was stopped: {because}",
}
