"""What a start shows on a terminal: a banner, and a line for what became of each turn.

Rule: words stand on the terminal alone, read from the ledger, which has them redacted; no event has
any. Never those of private, side or other people's turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from tinker_claw.config.settings import DEFAULT_USER

LONGEST = 48
"""Characters of a turn's words."""
CELLS = 16
"""Cells of the bar to the next step."""
_EVERY_TURN = ("turn.forgotten", "sample.queued", "sample.held", "feedback", "judge.rules")
"""Events that a person need not see: each turn has them, or the banner says it."""


@dataclass(slots=True)
class Terminal:
    """structlog's last processor for a terminal."""

    quiet: bool = False
    """Whether to leave out words and lines of turns."""
    opening: Callable[[int], str | None] | None = None
    """Returns how a turn that its owner asked for began; None: nobody may see it here."""
    waiting: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns the samples that wait, and how many a step takes."""

    def __call__(self, logger: Any, method: str, event: dict[str, Any]) -> str:
        """Return the text of an event.

        Raises:
            structlog.DropEvent: a person need not see it.
        """
        name = event["event"]
        if name in _EVERY_TURN or (self.quiet and name in ("turn.captured", "verdict")):
            raise structlog.DropEvent
        if name == "serving":
            return banner(event)
        told = _TOLD.get(name)
        text = told(self, event) if told else None
        if text is None:
            return structlog.dev.ConsoleRenderer(colors=True)(logger, method, event)
        return f"{event['timestamp']}  {text}"

    def begun(self, turn: int | None) -> str:
        """Return a turn's first words in quotation marks.

        Raises:
            structlog.DropEvent: they are not shown here.
        """
        words = self.opening(turn) if self.opening and turn is not None else None
        if words is None:
            raise structlog.DropEvent
        words = "".join(c if c.isprintable() else " " for c in words)
        line = " ".join(words.split())
        return f"“{line[:LONGEST]}{'…' if len(line) > LONGEST else ''}”"

    def bar(self) -> str:
        """Return the bar to the next step."""
        waiting, batch = self.waiting()
        full = CELLS * min(waiting, batch) // batch if batch else 0
        return f"next step [{'#' * full}{'.' * (CELLS - full)}] {min(waiting, batch)}/{batch}"


def banner(event: Mapping[str, Any]) -> str:
    """Return the lines that a start ends with. `event`: `serving`."""
    url = event["url"]
    lines = {
        "address": f"{url}   model {event['model']}",
        "page": f"{url.removesuffix('/v1')}/ui",
        "key": f"in {event['key_file']}" if event.get("key_file") else event.get("key", "none"),
        "learns": f"{event['method']}, {event['backend']}, version {event['version']} answers",
        "records": event["data_dir"],
        "next": "point your agent at the address; for OpenClaw: tinker-claw openclaw-config",
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
    meaning = _MEANING[event["value"]]
    words = terminal.begun(event["turn"])
    return f"{words}  turn {event['turn']} {meaning}{hint}   {terminal.bar()}"


def _stepped(terminal: Terminal, event: Mapping[str, Any]) -> str:
    took = f"{event['seconds']:.1f} s"
    return f"A step has trained on {event['samples']} samples in {took}."


_MEANING = {
    1: "was accepted",
    0: "was judged neutral",
    -1: "was rejected",
    None: "got no readable verdict",
}
_TOLD: Mapping[str, Callable[[Terminal, Mapping[str, Any]], str | None]] = {
    "turn.captured": _answered,
    "verdict": _judged,
    "step": _stepped,
    "publish": lambda _, event: f"Version {event['version']} answers from now on.",
    "layout": lambda _, event: f"{event['gpus'][0].upper()}{event['gpus'][1:]}.",
    "model.download": lambda _, event: (
        f"{event['model']} is not on this machine: downloading it from the Hugging Face hub ..."
    ),
    "stopped": lambda _, __: "Stopped.",
}
