"""Tables by which agent harnesses are recognised, from harnesses.toml, which documents them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Literal

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

    def begins(self, text: str, at: int) -> bool:
        """Whether the block begins here."""
        if not text.startswith(self.opens, at) or self.holds not in text[at:]:
            return False
        return not self.whole or text[at:].rstrip() == self.opens

    def end(self, text: str, at: int) -> int | None:
        """Where the block ends, with the blanks after it; None: it does not begin here."""
        if self.trails or not self.begins(text, at):
            return None
        end = len(text)
        if self.closes is not None:
            end = text.find(self.closes, at) + len(self.closes)
            if end < len(self.closes):
                return len(text) if self.spans else None
            end += len(text[end:]) - len(text[end:].lstrip())
        return end


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


@dataclass(frozen=True, slots=True)
class Harness:
    """Markers by which a harness is recognised."""

    name: str
    blocks: Sequence[Block] = ()
    calls: Sequence[Call] = ()
    agents: Sequence[str] = ()
    """How the User-Agent header of its requests begins, in lower case."""
    systems: Sequence[str] = ()
    """How the system prompt of its main requests begins."""
    groups: Sequence[str] = ()
    """Texts in the system prompt of a conversation in which several people write."""


def read(table: dict[str, Any]) -> Harness:
    """Make a harness from its table, which is consumed."""
    blocks: list[Block] = []
    for one in table.pop("blocks", ()):
        blocks += [Block(tag, f"<{tag}", f"</{tag}>") for tag in one.pop("tags", ())]
        opens = one.pop("opens", ())
        texts = [opens] if isinstance(opens, str) else opens
        blocks += [Block(opens=text, **one) for text in texts]
    calls = [Call(**one) for one in table.pop("calls", ())]
    return Harness(blocks=blocks, calls=calls, **table)


_TEXT = files("tinker_claw.conversation").joinpath("harnesses.toml").read_text(encoding="utf-8")
_TABLES = tomllib.loads(_TEXT)
HARNESSES: Final = tuple(map(read, _TABLES["harness"]))
MACHINERY: Final[dict[str, Any]] = _TABLES["machinery"]
"""Regular expressions for texts of harnesses that no table lists."""
