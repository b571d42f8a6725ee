"""Tables by which agent harnesses are recognised, from harnesses.toml, which documents them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Literal

from tinker_claw.types import Vote

Asks = Literal["announcement", "compaction", "cron", "memory flush", "nudge", "title", "utility"]
"""Kind of request that a harness's text makes; values of `classify.RequestKind`."""


@dataclass(frozen=True, slots=True)
class Block:
    """A text in a user message that the harness wrote. In the table `opens` is a text or a list of
    texts, each a block; `tags` is a list of XML tags, which needs neither `what` nor `closes`."""

    what: str
    """Name of the text, for people."""
    opens: str
    """How it begins."""
    closes: str | None = None
    """How it ends; None: it goes on to the end of the part."""
    asks: Asks | None = None
    """Kind of request that the text makes; None: a note, which asks for nothing."""
    holds: str = ""
    """A text that must also be in it, because a person may begin with the same words."""
    whole: bool = False
    """`opens` is all of the text."""
    spans: bool = False
    """It may end in a later part."""
    trails: bool = False
    """It follows a person's words, from `opens` to the end of the part."""
    summary: bool = False
    """It stands for messages that were compacted."""
    answered: bool = False
    """The harness writes the assistant's reply to it, too."""
    greedy: bool = False
    """A part that ends with the end mark is all of it: a name in it may hold the mark, too."""
    tag: bool = False
    """It is one of `tags`."""

    @property
    def wraps(self) -> bool:
        """Whether text from elsewhere stands in it, which may hold its end mark, too."""
        return self.closes is not None and self.closes != ">" and self.closes not in self.opens

    def begins(self, text: str, at: int) -> bool:
        """Whether the block begins here."""
        if not text.startswith(self.opens, at):
            return False
        after = at + len(self.opens)
        if self.tag and text[after : after + 1] not in _AFTER_TAG:
            return False
        if self.holds and text.find(self.holds, at) < 0:
            return False
        return not self.whole or not text[after:].strip()

    def end(self, text: str, at: int) -> int | None:
        """Where the block that begins here ends, with the blanks after it; None: it does not end in
        this text."""
        if self.closes is None:
            return len(text)
        mark = self.mark(text, at)
        if self.greedy and text.endswith(mark):
            return len(text)
        end = text.find(mark, at)
        return None if end < 0 else after_blanks(text, end + len(mark))

    def mark(self, text: str, at: int) -> str:
        """End mark of the block that begins here: that of a tag with an id repeats the id."""
        named = _ID.match(text, at + len(self.opens)) if self.tag else None
        return f"</{self.what}{named[0]}" if named else self.closes or ""


_AFTER_TAG: Final = (">", " ", "\n", "\t", "")
_ID: Final = re.compile(r' id="[0-9a-f]+">')
_BLANKS: Final = re.compile(r"\s*")


def after_blanks(text: str, at: int) -> int:
    """Index of the first character from `at` on that is not blank."""
    found = _BLANKS.match(text, at)
    return found.end() if found else at


@dataclass(frozen=True, slots=True)
class Call:
    """A request with a system prompt of its own."""

    opens: str
    """How the system prompt begins, or a part of it."""
    asks: str
    """Kind of the request; a value of `classify.RequestKind`."""
    traced: bool = True
    """It may belong to a turn and share its trace; False: it has none."""
    tools: bool = False
    """The request may have tools and a history."""
    holds: str = ""
    """A text that must also be in that part."""


@dataclass(frozen=True, slots=True)
class Denial:
    """A tool's result that the harness wrote, because the person denied or stopped the call."""

    form: re.Pattern[str]
    """The whole result."""
    tools: re.Pattern[str]
    """Names of the tools whose calls the harness may answer so."""
    vote: Vote
    """-1: denied; 0: stopped, which says nothing of the reply."""


@dataclass(frozen=True, slots=True)
class Harness:
    """Markers by which a harness is recognised."""

    name: str
    blocks: Sequence[Block] = ()
    calls: Sequence[Call] = ()
    denials: Sequence[Denial] = ()
    agents: Sequence[str] = ()
    """How the User-Agent header of its requests begins, in lower case."""
    systems: Sequence[str] = ()
    """How the system prompt of its main requests begins."""
    children: Sequence[str] = ()
    """Headers, in lower case, by which it marks the requests of agents that it starts."""
    results: Sequence[str] = ()
    """How the first part of a user message begins that shows the files of a tool's result."""
    section: str = ""
    """A heading in the system prompts of some, which may begin otherwise."""
    source: re.Pattern[str] | None = None
    """A line behind that heading, which says where the conversation takes place: `local`, `direct`,
    or another group name. None: the harness runs on its owner's machine, and nobody else writes."""

    def where(self, system: str) -> str:
        """Name the group of `source` that a system prompt matches; "": none, or it names several
        places."""
        if self.section and system.count(self.section) > 1:
            return ""
        behind = system[max(0, system.find(self.section)) :] if self.section else system
        match = self.source.search(behind) if self.source else None
        return match.lastgroup or "" if match else ""


def read(table: dict[str, Any]) -> Harness:
    """Make a harness from its table, which is consumed."""
    blocks: list[Block] = []
    for one in table.pop("blocks", ()):
        blocks += [Block(tag, f"<{tag}", f"</{tag}>", tag=True) for tag in one.pop("tags", ())]
        opens = one.pop("opens", ())
        texts = [opens] if isinstance(opens, str) else opens
        blocks += [Block(opens=text, **one) for text in texts]
    calls = [Call(**one) for one in table.pop("calls", ())]
    denials = [
        Denial(re.compile(form, re.DOTALL), re.compile(row.get("tools", ".*")), row["vote"])
        for row in table.pop("denials", ())
        for form in row["forms"]
    ]
    source = table.pop("source", None)
    form = None if source is None else re.compile(source, re.MULTILINE)
    return Harness(blocks=blocks, calls=calls, denials=denials, source=form, **table)


_TEXT = files("tinker_claw.conversation").joinpath("harnesses.toml").read_text(encoding="utf-8")
_TABLES = tomllib.loads(_TEXT)
HARNESSES: Final = tuple(map(read, _TABLES["harness"]))
