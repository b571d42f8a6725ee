"""An owner's own sentences as a lesson, and the characters that no lesson may hold.

Rule: a judge only points at the owner's words. A lesson is copied from those by whole sentences, so
nobody else chooses its text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

_Span = tuple[int, int]
"""Where a text begins and ends in another."""
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
_ENDS = ".!?…؟۔।॥։！？。"
_QUOTED = re.compile(
    r"“[^“”]*(?:”|\Z)|„[^„“”]*(?:[“”]|\Z)|«[^«»]*(?:»|\Z)|»[^«»]*«|「[^「」]*(?:」|\Z)|『[^『』]*(?:』|\Z)"
    r"|```(?:(?!```).)*(?:```|\Z)|(?<![^\s(\[:])\"(?=\S)[^\"]*(?:\"(?!\w)|\Z)",
    re.DOTALL,
)
"""Words within quotation marks, and code; a quotation that is not closed goes on to the end."""
_OPENERS = "\"'“„«»‹›‘‚「『`"
_QUOTATION = re.compile(
    rf"[{_OPENERS}][^\"“”„«»「」『』`]*[\"'”“»«›‹’‘」』`]"
    rf"|[{_OPENERS}][^\"'’”]*|[^\"'‘“]*[.!?…。][\"'’”]"
)
"""A sentence of nothing but a quotation, or of one end of it: it may be another's."""
_MAIL = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
"""A line of a message that is answered."""
_WORD = re.compile(
    r"[^\W\u3040-\u9fff\uac00-\ud7af]+(?:['’-]\w+)*|[\u3040-\u9fff\uac00-\ud7af]{1,2}"
)
"""A word; of writing without blanks two letters."""
_FEW = 4
"""Words of a sentence that may be a piece of the one beside it."""
_IF = re.compile(
    r"[\s\W]*(?:(?:unless|except|only|but|provided|if|when|while|otherwise|however"
    r"|außer|es sei denn|nur|aber|wenn|falls|sofern|sonst"
    r"|sauf|à moins|seulement|mais|si|quand|sinon"
    r"|salvo|excepto|a menos|s[oó]lo|pero|cuando|siempre que)\b"
    r"|ただし|でも|もし|但|除非|除了|如果|只有|不过)",
    re.IGNORECASE,
)
"""How a condition begins."""
_NOT = re.compile(
    r"\b(?:not|never|no(?=\s+\w)|none|nothing|nobody|without|stop|avoid|ever|forbidden"
    r"|\w*n['’]ts?|don?ts|nicht\w*|nie|niemals|kein\w*|ohne|verboten|niemand"
    r"|ne|pas|jamais|sans|rien|aucun\w*|interdit"
    r"|nunca|jamás|sin|nada|ning[uú]n\w*|prohibido|tampoco)\b|\bn['’](?=\w)"
    r"|ない|ません|禁止|だめ|ダメ|駄目|以外|[不别没沒勿]|नहीं|मत|لا|ليس|إلا|بدون",
    re.IGNORECASE,
)
"""What turns a sentence round."""
_SCHEME = re.compile(r"\b(?!https?:)[a-z][a-z0-9+.-]*:(?=[\w/\\(])", re.IGNORECASE | re.ASCII)
_REDACTED = "[redacted: "
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Characters that show nothing, of other categories."""


def own_sentences(owner: str, *quotes: str) -> str | None:
    """Return the owner's sentences in which quotes stand; None: they make no lesson.

    As many as are short enough together, from the first on. The first sentence of each quote must
    be among them. A sentence comes with the fragments beside it that may turn it round: "Not these.
    Delete files." A quotation that is a sentence of its own makes no lesson.

    Args:
        owner: the owner's own words.
        quotes: must stand in those letter for letter; blanks may differ.
    """
    owner = _MAIL.sub("\n", owner)
    text = BLANKS.sub(lambda blank: "\n" if blank[0].count("\n") > 1 else " ", owner)
    spans = [_span(quote, text) for quote in quotes]
    sentences = [*_sentences(text)]
    texts = [text[start:end] for start, end in sentences]
    quoted = [
        number
        for number, (start, end) in enumerate(sentences)
        if any(first < end and start < last for first, last in spans)
    ]
    if any(_is_quotation(texts[n]) for n in quoted):
        return None
    chosen, lesson, whole_to = list[str](), "", 0
    for numbers in _whole(texts, quoted):
        chosen += [texts[n].replace("\n", " ").strip() for n in numbers]
        if len(" ".join(chosen)) > LONGEST:
            break
        lesson, whole_to = " ".join(chosen), sentences[numbers[-1]][1]
    complete = all(0 <= first < whole_to for first, _ in spans)
    return lesson if complete and _reads_alike(lesson) else None


def hidden(text: str) -> str | None:
    """Return the first character of a text that shows nothing or changes its direction or lines;
    None: there is none."""
    return next(filter(is_hidden, text), None)


def plain_line(text: str) -> str:
    """Return a text as one line, without hidden characters and with plain dots within words."""
    seen = "".join(char for char in BLANKS.sub(" ", text) if not is_hidden(char))
    dots = {at for at in _dots(seen) if not _ends_sentence(seen, at)}
    return "".join("." if at in dots else char for at, char in enumerate(seen)).strip()


def _span(quote: str, text: str) -> _Span:
    """Return where a quote stands in a text with single blanks; (-1, -1): nowhere."""
    words = " ".join(quote.split()).strip(_QUOTATION_MARKS)
    first = text.replace("\n", " ").find(words) if words else -1
    return (first, first + len(words)) if first >= 0 else (-1, -1)


def _sentences(text: str) -> Iterator[_Span]:
    """Yield start and end of each sentence."""
    start = 0
    inside = {at for match in _QUOTED.finditer(text) for at in range(match.start(), match.end())}
    for mark in _END.finditer(text):
        end = mark.end()
        before = max(start, end - _LONGEST_ABBREVIATED)
        goes_on = _goes_on(mark[0], text[end : end + 2].lstrip()[:1]) or {end - 1, end} <= inside
        if end > start and not (goes_on or (mark[0] and _ABBREVIATED.search(text, before, end))):
            yield start, end
            start = end
    yield start, len(text)


def _is_quotation(sentence: str) -> bool:
    return _QUOTATION.fullmatch(sentence.strip().rstrip(".,;。")) is not None


def _whole(sentences: Sequence[str], quoted: Sequence[int]) -> Iterator[range]:
    """Yield sentences, each with those beside it that may turn it round.

    Args:
        sentences: all sentences.
        quoted: numbers of those that are asked for, in order.
    """
    done = 0
    for n in quoted:
        first = n - _turning(sentences[:n][::-1])
        titles = (m for m in range(n) if _is_title(sentences, m) and _NOT.search(sentences[m]))
        first = max(done, min([first, *titles]))
        last = n + 1 + _turning(sentences[n + 1 :])
        if last > done:
            yield range(first, last)
            done = last


def _turning(beside: Sequence[str]) -> int:
    """Count the sentences beside one, the nearest first, that belong to it.

    They reach to the last fragment in a row that has a negation, or is a condition.
    """
    count = 0
    for n, sentence in enumerate(beside):
        short, condition = len(_WORD.findall(sentence)) <= _FEW, _IF.match(sentence)
        if not (short or condition):
            break
        if condition or _NOT.search(sentence):
            count = n + 1
    return count


def _is_title(sentences: Sequence[str], n: int) -> bool:
    """Return whether a sentence begins with a line that has no end mark, and announces the next."""
    head, empty_line, rest = sentences[n].strip(" ").removeprefix("\n").partition("\n")
    follows = bool(empty_line and rest) or sentences[n + 1].startswith("\n")
    return follows and head.rstrip()[-1:] not in _ENDS


def _goes_on(mark: str, following: str) -> bool:
    """Return whether a sentence goes on behind a mark.

    So do "Never (!) delete", and "I never want you to", an empty line, "delete". Many begin
    sentences with small letters, but only behind a single dot.
    """
    return following.islower() and mark.rstrip(_CLOSERS) != "."


def _reads_alike(text: str) -> bool:
    """Return whether people and programs read the same in a text."""
    return (
        hidden(text) is None
        and _REDACTED not in text
        and not _SCHEME.search(unicodedata.normalize("NFKC", text))
        and all(_ends_sentence(text, at) for at in _dots(text))
    )


def is_hidden(char: str) -> bool:
    """Return whether a character shows nothing, or changes the direction of a line."""
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


FRAME = (
    "Wishes of the user from earlier conversations. Follow each where it applies; of two that "
    "disagree, the later one. What the user asks in this conversation comes first."
)
"""The sentence above them."""
_LINE = "- If the message does not ask for the opposite: {}"
"""A lesson. Of the words tried, these kept wishes as well as any, and let most requests for the
opposite win; docs/lessons.md has the table."""


def lesson_text(lessons: Iterable[str]) -> str:
    """Return what a system prompt says of lessons, the newest last."""
    return "\n".join([FRAME, *map(_LINE.format, lessons)])
