"""Tables by which agent harnesses are recognised, from harnesses.toml, which documents them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any, Final, Literal

from tinker_claw.types import Vote, Writer

_LABELLED: Final = (
    r"{} ⟦openclaw:ctx⟧[ \t]*\n```json[ \t]*\n(?P<json>[^\n]*)\n```[ \t]*(?:\n|\Z)(?:[ \t]*\n)*"
)
"""A label of OpenClaw's, and a line of JSON in a fence: nothing inside can end it."""
_BLANKS: Final = re.compile(r"\s*")


@dataclass(frozen=True)
class Block:
    """A text in a user message that the harness wrote.

    In the table `opens`, `tags` and `labels` are lists: of texts, of XML tags, and of labels over a
    line of JSON. Each entry is a block.
    """

    what: str
    """Name of the text, for people."""
    opens: str = ""
    """How it begins."""
    closes: str = ""
    """How it ends; "": it goes on to the end of the part."""
    form: str = ""
    """A regular expression for all of it, in place of `opens` and `closes`."""
    holds: str = ""
    """A text that must also be in it, because a person may begin with the same words."""
    whole: bool = False
    """`opens` is all of the text."""
    tag: bool = False
    """It is one of `tags`."""
    spans: str = ""
    """A later part that ends it, where it has no end of its own; "": there is none."""
    shows: bool = False
    """The part behind it holds the text that it announces."""
    trails: bool = False
    """It follows a person's words, and goes on to the end of the part."""
    stamp: Literal["none", "before", "any"] = "none"
    """Whether OpenClaw's timestamp or block of the sender stands before it."""
    prompt: Literal["", "whole", "leads", "short"] = ""
    """OpenClaw's own prompt: all of a message, before a person's words, or as it stands in later
    histories, also before such words."""
    writer: Writer = Writer.HARNESS
    asks: str | None = None
    """Kind of request that the text makes, a value of `RequestKind`; None: it asks for nothing."""
    summary: bool = False
    """It stands for messages that were compacted."""
    replies: bool = False
    """The harness may put it in the place of a reply, too."""
    answered: bool = False
    """The harness writes the assistant's reply to it, too."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the text. Its group `end` is an end mark that text in it may hold, too."""
        return re.compile(self.form or self._literals(), re.DOTALL)

    def _literals(self) -> str:
        opens, closes = re.escape(self.opens), re.escape(self.closes)
        if self.tag:  # an end tag repeats the id
            named = r'(?P<id> id="[0-9a-f]+"(?=>))?+'
            return rf"{opens}(?=[>\s]|\Z){named}.*?(?P<end></{self.what}(?(id)(?P=id)))>\s*"
        if self.holds:
            opens += rf"(?=.*{re.escape(self.holds)})"
        if self.whole:
            return rf"{opens}\s*\Z"
        return rf"{opens}.*?(?P<end>{closes})\s*" if closes else rf"{opens}.*"


def after_blanks(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not blank."""
    match = _BLANKS.match(text, at)
    return match.end() if match else at


@dataclass(frozen=True, slots=True)
class KnownRequest:
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
    calls: Sequence[KnownRequest] = ()
    denials: Sequence[Denial] = ()
    agents: Sequence[str] = ()
    """How the User-Agent header of its requests begins, in lower case."""
    systems: Sequence[str] = ()
    """How the system prompt of its main requests begins."""
    children: Sequence[str] = ()
    """Headers, in lower case, by which it marks the requests of agents that it starts."""
    results: Sequence[str] = ()
    """How the first part of a user message begins that shows the files of a tool's result."""
    nudges: Sequence[str] = ()
    """How it asks again after an empty reply; the message is gone from later requests."""
    sessions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kind of request by the form of a session's key or id, where no person writes."""
    section: str = ""
    """A heading in the system prompts of some, which may begin otherwise."""
    source: re.Pattern[str] | None = None
    """A line behind that heading, which says where the conversation takes place: `local`, `direct`,
    or another group name. None: the harness runs on its owner's machine, and nobody else writes."""

    def sent(self, program: str, system: str) -> bool:
        """Return whether a request is this harness's.

        Args:
            program: its User-Agent, in lower case.
        """
        named = program.startswith(tuple(self.agents))
        named |= system.lstrip().startswith(tuple(self.systems))
        return named or (self.section != "" and self.section in system)

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
    blocks = [block for row in table.pop("blocks", ()) for block in _blocks(row)]
    calls = [KnownRequest(**call) for call in table.pop("calls", ())]
    denials = [
        Denial(re.compile(form, re.DOTALL), re.compile(row.get("tools", ".*")), row["vote"])
        for row in table.pop("denials", ())
        for form in row["forms"]
    ]
    source = table.pop("source", None)
    form = None if source is None else re.compile(source, re.MULTILINE)
    return Harness(blocks=blocks, calls=calls, denials=denials, source=form, **table)


def _blocks(row: dict[str, Any]) -> Iterator[Block]:
    """Yield a block for each opening, tag and label of a row, which is consumed."""
    row["writer"] = Writer(row.get("writer", Writer.HARNESS))
    opens, tags, labels = (row.pop(name, ()) for name in ("opens", "tags", "labels"))
    for text in opens:
        yield Block(opens=text, **row)
    for tag in tags:
        yield Block(tag, f"<{tag}", tag=True, **row)
    for label in labels:
        yield Block(label, form=_LABELLED.format(re.escape(label)), **row)
    if "form" in row:
        yield Block(**row)


_TEXT = files("tinker_claw.conversation").joinpath("harnesses.toml").read_text(encoding="utf-8")
_TABLES = tomllib.loads(_TEXT)
HARNESSES: Final = tuple(map(read, _TABLES["harness"]))
