"""Shapes of the lines that a person types, and the words in them that may be quoted.

Rule: a text is prose only if each of its lines has the shape of prose. A line of another shape may
be the frame that some program wrote around words of others. What a line says decides nothing.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from tinker_claw.wishes import is_hidden

_FENCE = re.compile(r"[ \t]{0,3}(?:[-*+] |\d{1,9}[.)] )?(?P<mark>`{3,}|~{3,})(?P<rest>.*)")
_CITED = re.compile(r" {0,3}>(?!>)")
_INDENTED = re.compile(r" {4}| {0,3}\t")
_CODE = re.compile(r"(?<!`)(`{1,2})(?!`)[^`\n]+\1(?!`)")
"""Code within a line."""
_ITEM = re.compile(r"(?:(?:[-*+•–]|\d{1,9}[.)]|\[[ xX]\])[ \t]+)*")
_LINK = re.compile(r"!?\[[^\]]*\](?:\([^)\s]*\)|\[[^\]]*\])|<(?:https?://|mailto:)[^\s<>]+>")
_OPENERS = "\"'“”„‘’«»‚`´*_~#>|/\\-+–—−=•·.…,:;!?¿¡(%&@$^§°)]}<{「『《〈"
"""Signs that may begin a line of prose, beside letters, digits, emoji and money."""
_HEADER = re.compile(
    r"<[/!?]?[A-Za-z_]|<[|<!]|>>|\{(?:[{%\"']|\s*$)|@@|:::|[!?]{3,}[ \t]+\w|\\(?:begin|end)\{"
    r"|[「『《〈][^」』》〉]*[」』》〉](?:\s|$)"
)
"""How a header begins whose first sign may also begin a line of prose."""
_WITHIN = re.compile(r"\"\"\"|\'\'\'|<!--|-->|<!\[|\]\]>|<<-?['\"]?[A-Za-z_]|\[/\w+\]")
"""Bounds of blocks, wherever they stand in a line."""
_TAG = re.compile(r"<([A-Za-z_][\w:.-]*)(?:\s[^<>]*)?>")
_END_TAG = re.compile(r"</\s*([\w:.-]*)")
_RULE = r"\-=*_~+#<>•·─━═—–"
_TITLED_RULE = re.compile(
    rf"[{_RULE}]{{2,}}[ \t]*[^\s{_RULE}].*?[{_RULE}]{{2,}}$"
    r"|(?:[-=_~+<>─━═]{3,}|[─━═]{2,}|\*{3,}|#{7,})[ \t]+\S"
)
_BOLD = re.compile(r"(\*{2,3}|_{2,3}|~~)[^\s*_~].*\1$")
_SIGNS = re.compile(r"[^\w\s]{3,}")
"""A line of signs alone, as blocks begin and end with."""
_HARMLESS = re.compile(r"[.?!…]+|[\])}]+[;,)]*|[:;=][-']?[()*/|\\]+|/[\\*]+")
"""Signs that people type alone, and ends of blocks of code."""
_WORD = r"[\w'()/&.-]+"
_LABEL = re.compile(rf"(?:#{{1,6}}[ \t]+)?[^\W\d_]{_WORD}(?:[ \t]{_WORD}){{0,5}}[ \t]?[:：]$")
"""A few words and a colon."""
_LABEL_WORDS = 3
"""Most words of a label of sentences; people end longer lines with a colon, too."""
_PLACE_WORDS = 7
"""Most words of a label that names a file."""
_PLACE = re.compile(r"(?:`|(?:^|\s)[~.]?/\w).*[:：]$")
"""A label that names a file."""
_ADDRESS = re.compile(r"\S@\S+\.\S.*[:：]$")
_FIELD = re.compile(rf"[^\W\d_]{_WORD}(?:[ \t]{_WORD}){{0,2}}[:：](?:[ \t]|$)(?!.*[,;{{]$)")
"""A name and a value; with a comma behind it is a line of code."""
_EMPHASIS = "*_~"
_SELECTORS = "".join(map(chr, range(0xFE00, 0xFE10)))
"""Signs that choose how another is drawn."""
_TYPED = re.compile(r"(?:\[[^\W_]+\]|<[A-Za-z]+(?:-[A-Za-z]+)*>)[ \t]+[^\s<\[]")
_QUOTED = re.compile(
    r"”[^“”]*[“”]|“[^“”]*(?:”|\Z)|„[^„“”]*(?:[“”]|\Z)|«[^«»]*(?:»|\Z)|»[^«»]*«|‹[^‹›]*(?:›|\Z)"
    r"|›[^‹›]*‹|「[^「」]*(?:」|\Z)|『[^『』]*(?:』|\Z)|[❝❞][^❝❞]*(?:[❝❞]|\Z)|‚[^‚‘’]*(?:[‘’]|\Z)"
    r"|``[^`\n]*?''|‘[^‘’]*’(?!\w)|(?<![\w'])'(?=\S)[^'\n]*'(?!\w)"
    r"|(?<![^\s(\[:,])[\"＂″](?=\S)[^\"＂″]*(?:[\"＂″](?!\w)|\Z)"
)
"""Words within quotation marks; a quotation that is not closed goes on to the end."""


class _Fence(NamedTuple):
    mark: str
    line: str
    """The line that begins it."""


class _Line(NamedTuple):
    text: str
    """The line as it stands."""
    shape: str | None
    """The line as people see it, without code in it; None: it is code or a quotation."""


def odd_line(text: str) -> str | None:
    """Return the first line that has not the shape of prose; None: the text is prose.

    Lines of code and of quotations may hold anything: nothing is quoted from them.
    """
    lines, unclosed = _read(text)
    for at, line in enumerate(lines):
        if line.shape and (
            _is_header(line.shape)
            or _is_bound(line.shape, lines[at - 1] if at else None, lines[at + 1 :])
            or _is_label(line.shape, lines[:at], lines[at + 1 :])
        ):
            return line.text.strip()
    return unclosed or _tagged([line.shape for line in lines])


def is_typed_line(text: str) -> bool:
    """Return whether a text is one line behind a header of one word, as people type to coding
    agents: `[ERROR] it does not compile`, `<my-widget> does not render`."""
    lines = text.strip().splitlines()
    line = _plain(lines[0]) if len(lines) == 1 else ""
    return "</" not in line and _TYPED.match(line) is not None


def quotable(text: str) -> str:
    """Return what a person says in a text by themselves: without code, quoted lines, and words in
    quotation marks."""
    own = "\n".join(line.text for line in _read(text)[0] if line.shape is not None)
    return _QUOTED.sub(" … ", own)


def _read(text: str) -> tuple[list[_Line], str | None]:
    """Return the lines of a text, and the one that begins a fence without an end."""
    lines, fence = list[_Line](), None
    for line in text.splitlines():
        plain = _plain(line)
        mark = _FENCE.match(plain)
        code = bool(fence or mark or _CITED.match(plain) or _INDENTED.match(plain))
        lines.append(_Line(line, None if code else plain.strip()))
        if mark:
            fence = _fence_behind(fence, mark, line)
    return lines, fence and fence.line


def _fence_behind(fence: _Fence | None, mark: re.Match[str], line: str) -> _Fence | None:
    """Return the fence that is open behind a line with a mark."""
    if fence is None:
        return _Fence(mark["mark"], line.strip())
    closes = mark["mark"].startswith(fence.mark) and not mark["rest"].strip()
    return None if closes else fence


def _plain(line: str) -> str:
    """Return a line in plain forms of its characters, without those that show nothing."""
    if "&" in line:
        line = html.unescape(line)
    if line.isascii() and line.isprintable():
        return line
    plain = unicodedata.normalize("NFKC", line)
    return "".join(c for c in plain if c == "\t" or not (is_hidden(c) or c in _SELECTORS))


def _is_header(line: str) -> bool:
    """Return whether a line opens with a header, holds the bound of a block, or is a rule with a
    title."""
    item = _ITEM.match(line)
    bare = line[item.end() :] if item else line
    if not bare or _LINK.match(bare):
        return False
    if not _may_open(bare[0]) or _HEADER.match(bare):
        return True
    if _WITHIN.search(_CODE.sub("`", bare)):
        return True
    return not _BOLD.match(bare) and _TITLED_RULE.match(bare) is not None


def _may_open(sign: str) -> bool:
    """Return whether a line of prose may begin with a sign."""
    if sign in _OPENERS or _is_drawn(sign):
        return sign in _OPENERS
    category = unicodedata.category(sign)
    return category[0] in "LNM" or category in ("So", "Sc", "Sm", "Po")


def _is_drawn(sign: str) -> bool:
    """Return whether boxes are drawn with a sign."""
    return "\u2500" <= sign <= "\u259f"


def _is_bound(line: str, above: _Line | None, below: Sequence[_Line]) -> bool:
    """Return whether a line of signs bounds a block: it is no rule between paragraphs."""
    if not _SIGNS.fullmatch(line) or _HARMLESS.fullmatch(line) or line.startswith("|"):
        return False
    if all(unicodedata.category(sign) == "So" and not _is_drawn(sign) for sign in line):  # emoji
        return False
    beside = [row for row in (above, *below[:1]) if row is not None]
    return above is None or any(row.text.strip() for row in beside)


def _is_label(line: str, above: Sequence[_Line], below: Sequence[_Line]) -> bool:
    """Return whether a line labels the block below it, or is a field of a head."""
    bare = line.strip(_EMPHASIS)
    block = next((row for row in below if row.text.strip()), None)
    if block is None:
        return False
    under = (below[0].shape or "").strip(_EMPHASIS)
    in_head = not any(row.text.strip() for row in above) and not below[0].text.strip()
    if _FIELD.match(bare) and (_FIELD.match(under) or in_head):
        return True
    if _ADDRESS.search(line) or (_PLACE.search(line) and line.count(" ") < _PLACE_WORDS):
        return True
    if not _LABEL.match(bare):
        return False
    if block.shape is None:
        return True
    item = _ITEM.match(block.shape)
    in_list = item is not None and item.end() > 0 and not _FIELD.match(block.shape[item.end() :])
    return not in_list and bare.count(" ") < _LABEL_WORDS


def _tagged(shapes: Sequence[str | None]) -> str | None:
    """Return a line with a tag that has an end in the text, or words on the line below it."""
    lines = [_CODE.sub("`", shape or "") for shape in shapes]
    ends = {end.lower() for end in chain.from_iterable(map(_END_TAG.findall, lines))}
    for line, below in zip(lines, [*lines[1:], ""], strict=False):
        for tag in _TAG.finditer(line):
            if tag[1].lower() in ends or (below and line.endswith(tag[0])):
                return line
    return next((line for line in lines if "</" in line), None)
