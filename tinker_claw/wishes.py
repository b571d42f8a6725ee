"""An owner's own sentences as a lesson, and the characters that no lesson may hold.

Rule: a judge only points at the owner's words. A lesson is copied from those by whole sentences, so
nobody else chooses its text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

LONGEST = 300
"""Most characters of a lesson."""
BLANKS = re.compile(r"[ \t\r\n\u00a0\u202f\u3000]+")
"""What a lesson holds as one blank."""
_CLOSERS = "\"'”’»›)]}*_`」』）】》〉"
_QUOTATION_MARKS = "\"'“”„«»‹›‘’ "
_CLOSE = f"[{re.escape(_CLOSERS)}]*"
_END = re.compile(
    # Latin letters behind a "。" without a blank may be an address: a browser reads it as a dot.
    rf"(?:[.!?…؟۔।॥።։]+{_CLOSE}(?=\s)|[！？]+{_CLOSE}|。+{_CLOSE}(?![A-Za-z0-9_\-０-９Ａ-Ｚａ-ｚ])"
    # An item means little without the words before its list: they may be "Never do this:".
    r"|(?<![:;,：；，、])(?=\n))(?!\s(?:[-*+•–—]|\d+[.)])\s)"
)
"""What ends a sentence: its marks, or an empty line."""
_ABBREVIATED = re.compile(
    r"(?:(?<![\w/])[^\W\d_]|\b(?:etc|vs|cf|ca|bzw|usw|approx|dr|mrs?|ms|st|prof|max|min|vgl|inkl|evtl|ggf)|(?<![\w.])\d+)\.$",
    re.IGNORECASE,
)
"""What ends with a dot and mostly goes on: e.g., z. B., etc., Dr., 3."""
_LONGEST_ABBREVIATED = 12
_QUOTED = re.compile(
    r"“[^“”]*”|„[^„“”]*[“”]|«[^«»]*»|»[^«»]*«|「[^「」]*」|『[^『』]*』|```(?:(?!```).)*```"
    r"|(?<![^\s(\[:])\"(?=\S)[^\"\n]*\"(?!\w)",
    re.DOTALL,
)
"""Words within quotation marks, and code. A sentence of those alone may be another's."""
_MAIL = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
"""A line of a message that is answered."""
_SCHEME = re.compile(r"\b(?!https?:)[a-z][a-z0-9+.-]*:(?=[\w/\\(])", re.IGNORECASE | re.ASCII)
_REDACTED = "[redacted: "
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0")
"""Characters that show nothing, of other categories."""


def own_sentences(owner: str, *quotes: str) -> str | None:
    """Return the owner's sentences in which quotes stand; None: they make no lesson.

    As many as are short enough together, from the first on. The first sentence of each quote must
    be among them.

    Args:
        owner: the owner's own words.
        quotes: must stand in those letter for letter; blanks may differ.
    """
    owner = _MAIL.sub("\n", owner)
    text = BLANKS.sub(lambda blank: "\n" if blank[0].count("\n") > 1 else " ", owner)
    spans = [_span(quote, text) for quote in quotes]
    chosen, lesson, whole_to = list[str](), "", 0
    for start, end in _sentences(text):
        if any(first < end and start < last for first, last in spans):
            chosen.append(text[start:end].replace("\n", " ").strip())
            if len(" ".join(chosen)) > LONGEST:
                break
            lesson, whole_to = " ".join(chosen), end
    complete = all(0 <= first < whole_to for first, _ in spans)
    return lesson if complete and _reads_alike(lesson) else None


def hidden(text: str) -> str | None:
    """Return the first character of a text that shows nothing or changes its direction or lines;
    None: there is none."""
    return next(filter(_is_hidden, text), None)


def plain_line(text: str) -> str:
    """Return a text as one line, without hidden characters and with plain dots within words."""
    seen = "".join(char for char in BLANKS.sub(" ", text) if not _is_hidden(char))
    dots = {at for at in _dots(seen) if not _ends_sentence(seen, at)}
    return "".join("." if at in dots else char for at, char in enumerate(seen)).strip()


def _span(quote: str, text: str) -> tuple[int, int]:
    """Return where a quote stands in a text with single blanks; (-1, -1): nowhere."""
    words = " ".join(quote.split()).strip(_QUOTATION_MARKS)
    first = text.replace("\n", " ").find(words) if words else -1
    return (first, first + len(words)) if first >= 0 else (-1, -1)


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence."""
    start = 0
    inside = {at for found in _QUOTED.finditer(text) for at in range(found.start(), found.end())}
    for mark in _END.finditer(text):
        end = mark.end()
        before = max(start, end - _LONGEST_ABBREVIATED)
        goes_on = _goes_on(mark[0], text[end : end + 2].lstrip()[:1]) or {end - 1, end} <= inside
        if end > start and not (goes_on or (mark[0] and _ABBREVIATED.search(text, before, end))):
            yield start, end
            start = end
    yield start, len(text)


def _goes_on(mark: str, following: str) -> bool:
    """Whether a sentence goes on behind a mark: "Never (!) delete", "I never want you to", an empty
    line, "delete". Many begin sentences with small letters, but only behind a single dot."""
    return following.islower() and mark.rstrip(_CLOSERS) != "."


def _reads_alike(text: str) -> bool:
    """Return whether people and programs read the same in a text."""
    return (
        hidden(text) is None
        and _REDACTED not in text
        and not _SCHEME.search(unicodedata.normalize("NFKC", text))
        and all(_ends_sentence(text, at) for at in _dots(text))
    )


def _is_hidden(char: str) -> bool:
    tag = "\U000e0000" <= char <= "\U000e0fff"  # tags and variation selectors, assigned or not
    return tag or char in _INVISIBLE or unicodedata.category(char) in _HIDDEN


def _dots(text: str) -> Iterator[int]:
    """Yield the places of characters that IDNA maps to dots; not the dot itself, nor an
    ellipsis, which is no part of a name."""
    for at, char in enumerate(text):
        if char not in ".…" and set(".。") & set(unicodedata.normalize("NFKC", char)):
            yield at


def _ends_sentence(text: str, at: int) -> bool:
    """Return whether a "。" stands there, with a blank or what closes a sentence behind it."""
    return text[at] == "。" and not text[at + 1 : at + 2].strip(f"。 {_CLOSERS}")
