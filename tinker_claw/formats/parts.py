"""Parts of messages, as the clients of all formats send them.

Rule: a history is read, whoever wrote it. Text is shown as text, and anything else as one line that
says what stood there; nothing vanishes. Only the user's message that asks is refused later where it
holds such a thing: see `MessagePart.refusal`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from typing import Any, Final, cast

import msgspec

from tinker_claw.errors import RequestError
from tinker_claw.formats.body import Object, members, shorten_name
from tinker_claw.images import Image, MessagePart, Refusal, parts_of, read_url
from tinker_claw.types import KnownMessage, Message

READS_TEXT: Final = "this model reads text only"
_ELSEWHERE: Final = "it was kept by another service, and is not here"
_NOT_THEIRS: Final = "images are shown in messages of users and results of tools only"
UNREAD: Final = "it cannot be read here"
MAX_DEPTH: Final = 64
"""Levels of nesting in one value: deeper ones would overflow the encoder's stack later."""
_BINARY: Final = re.compile(r"[A-Za-z0-9+/=_-]{1000}")
"""How a text begins that is packed data."""
_PACKED: Final = ("encrypted_", "signature", "cache_control")
"""How the names of members begin that were for another service."""
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "summary_text"})
THOUGHTS: Final = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "reasoning_details"}
)
_PICTURES: Final = frozenset({"image", "image_url", "input_image", "computer_screenshot"})


def line(why: str, *what: str) -> str:
    """One line in place of something that is not shown.

    Args:
        why: it is not shown.
        what: its kind, name and size; "" where one is not known.
    """
    return f"[{', '.join(shorten_name(' '.join(text.split())) for text in what if text)}: {why}]"


def size(count: int) -> str:
    """A size as lines show it. `count`: bytes."""
    return f"{max(1, round(count / 1000)):,} kB"


def _unpacked(data: str) -> str:
    """The size of a file that is packed in base64."""
    return size(len(data) * 3 // 4)


def with_parts(message: Message, parts: Sequence[MessagePart]) -> KnownMessage:
    """Return a message with this content."""
    content = "".join(part.text for part in parts)
    is_plain = len(parts) < 2 and not any(part.image or part.attached for part in parts)
    return KnownMessage({**message, "content": content}, () if is_plain else tuple(parts))


def attached(text: str, refusal: Refusal | None = None) -> MessagePart:
    """Return a part that nobody typed."""
    return MessagePart(text, attached=True, refusal=refusal)


def joined(parts: Iterable[MessagePart], *, glued: bool = False) -> list[MessagePart]:
    """Return the parts of one message with breaks between them. A text begins a line of its own
    behind another, and so does what is attached, wherever it stands. Joining twice adds nothing.

    Args:
        glued: texts go on where the one before ends, as the pieces of a reply do.
    """
    pieces = list[MessagePart]()
    for part in parts:
        if not part.text:
            continue
        before = pieces[-1] if pieces else MessagePart("\n")
        begins = before.text.endswith("\n") or (part.attached and part.text.startswith("\n"))
        if part.attached and not begins:
            pieces.append(replace(part, text=f"\n{part.text}"))
            continue
        if before.attached and not begins:
            pieces.append(attached("\n"))
        elif not (glued or begins or before.image or part.image or part.text.startswith("\n")):
            pieces[-1] = MessagePart(f"{before.text}\n")
        pieces.append(part)
    return pieces


def kind_of(part: Mapping[str, Any]) -> str:
    """Type of a part; "" where it has none."""
    return _named(part, "type")


def read_parts(
    fields: Object, name: str, read: Callable[[Object], list[MessagePart]], *, glued: bool = False
) -> list[MessagePart]:
    """Read a string or a list of parts.

    Args:
        read: reads one of them.
        glued: see `joined`.
    """
    content = fields.get(name, [])
    if isinstance(content, str):
        return [MessagePart(content)]
    if not isinstance(content, list):
        raise fields.wrong("must be a string or a list of parts", name)
    at = fields.place(name)
    sent = (
        [MessagePart(item)] if isinstance(item, str) else read(Object(item, f"{at}[{i}]"))
        for i, item in enumerate(cast("list[Any]", content))
        if item is not None
    )
    return joined(chain.from_iterable(sent), glued=glued)


def seen_part(part: Object) -> list[MessagePart]:
    """A part of a message whose images the model may see: a user's, or the result of a tool."""
    return [_picture(part)] if kind_of(part) in _PICTURES else plain_part(part)


def plain_part(part: Object) -> list[MessagePart]:
    """A part of a message of the assistant or the system, who show no images."""
    kind = kind_of(part)
    if kind in _TEXTS or kind == "refusal":
        return [MessagePart(part.text("refusal" if kind == "refusal" else "text"))]
    if kind in THOUGHTS:
        return []  # another model's; `thought_in` reads those in clear
    if kind in _PICTURES:
        return [attached(line(_NOT_THEIRS, *_described(part)))]
    if kind in _READ:
        return _READ[kind](part)
    if isinstance(part.get("text"), str):
        return [MessagePart(part["text"])]
    packed = _named(members(part.get(kind)), "data")
    how_much = _unpacked(packed) if packed else ""
    why = line(READS_TEXT, kind or "a part without a type", how_much)
    return [attached(why, _refusal(part, unreadable(part)))]


def thought_in(content: Any) -> list[str]:
    """The thinking in clear among the parts of a message of the assistant."""
    texts = list[str]()
    for part in map(members, cast("list[Any]", content if isinstance(content, list) else [])):
        if kind_of(part) in THOUGHTS:
            named = (_named(part, name) for name in ("thinking", "reasoning", "text"))
            texts += [text for text in named if text][:1]
    return texts


def unreadable(part: Object) -> RequestError:
    """Return the error for a part that is not read here."""
    kind = part.get("type")
    what = f"of type {shorten_name(kind)}" if isinstance(kind, str) else "without a type"
    return part.wrong(
        f"is a part {what}, which is not read here; images are, of users and results of tools"
    )


def _picture(part: Object) -> MessagePart:
    """An image, as the text that stands for it."""
    try:
        image = read_url(*_url_of(part))
        return MessagePart(str(image), image)
    except RequestError as error:
        # Without its traceback, which would hold the whole body.
        refused = RequestError(str(error), param=error.param)
        return attached(line(UNREAD, *_described(part)), _refusal(part, refused))


def _refusal(part: Object, error: RequestError) -> Refusal:
    """Return the refusal of a part. Where a client marks its cache changes with each request."""
    sent = {name: value for name, value in part.items() if name != "cache_control"}
    return Refusal(error, hashlib.sha256(msgspec.json.encode(sent)).hexdigest())


def _url_of(part: Object) -> tuple[str, str]:
    """Address of an image, and where it stands; of one that is sent as data, a data: URL."""
    if "source" in part:
        source = part.object("source")
        if source.get("type") == "url":
            return source.string("url"), source.place("url")
        if source.get("type") != "base64":
            raise source.wrong("must be base64 or url", "type")
        url = f"data:{_named(source, 'media_type')};base64,{source.string('data')}"
        return url, source.place("data")
    if isinstance(part.get("image_url"), str):
        return part["image_url"], part.place("image_url")
    image_url = part.object("image_url")
    return image_url.string("url"), image_url.place("url")


def _described(part: Object) -> tuple[str, str]:
    """Kind and size of an image, or its address."""
    try:
        url, _ = _url_of(part)
    except RequestError:
        url = _named(members(part.get("source")) or part, "file_id")
    kind, data = _data_url(url)
    return (kind or "image", _unpacked(data)) if data else ("image", url)


def without_images(message: Message, whys: Callable[[Image], str | None]) -> KnownMessage:
    """Return a message with a line in place of some of its images.

    Args:
        whys: says why an image is not shown; None: it is shown.
    """

    def shown(part: MessagePart) -> MessagePart:
        image = part.image
        why = whys(image) if image is not None else None
        return attached(line(why, image.kind, size(image.size))) if image and why else part

    return with_parts(message, joined(map(shown, parts_of(message))))


def _document(block: Object) -> list[MessagePart]:
    """A document as Anthropic's format has it."""
    source = Object(members(block.get("source")), block.place("source"))
    title, kind = _named(block, "title"), source.get("type")
    if kind == "text":
        return _headed("document", title, [MessagePart(_named(source, "data"))])
    if kind == "content":
        return _headed("document", title, read_parts(source, "content", seen_part))
    at = _named(source, "url") or _named(source, "file_id")
    return _packed("document", title, _named(source, "media_type"), _named(source, "data"), at)


def _search_result(block: Object) -> list[MessagePart]:
    named = f"{_named(block, 'title')} {_named(block, 'source')}"
    return _headed("search result", named, read_parts(block, "content", seen_part))


def _headed(kind: str, title: str, parts: Sequence[MessagePart]) -> list[MessagePart]:
    """Attached parts under a line that says what they are."""
    named = shorten_name(" ".join(title.split()))
    head = MessagePart(f"[{kind}: {named}]\n" if named else f"[{kind}]\n")
    pieces = list[MessagePart]()
    for is_text, run in groupby([head, *parts], lambda part: not (part.image or part.attached)):
        same = list(run)
        pieces += [attached("".join(part.text for part in same))] if is_text else same
    return joined(pieces)


def _tool_reference(block: Object) -> list[MessagePart]:
    return [attached(f"[tool: {shorten_name(_named(block, 'tool_name'))}]")]


def _file(part: Object) -> list[MessagePart]:
    """A file as OpenAI's formats have it: in a member of the part, or the part itself."""
    file = members(part.get("file")) or part
    sent = _named(file, "file_data")
    media, data = _data_url(sent)
    at = _named(file, "file_url") or _named(file, "file_id")
    return _packed("file", _named(file, "filename"), media, data or sent, at)


def _data_url(url: str) -> tuple[str, str]:
    """Type and data of a data: URL; two empty strings for any other text."""
    head, _, data = url.partition(",")
    return (head[5:].partition(";")[0], data) if head.startswith("data:") else ("", "")


def _packed(what: str, title: str, media: str, data: str, at: str) -> list[MessagePart]:
    """A file in base64: its text, or a line in its place.

    Args:
        media: its type; "" where it is not known.
        at: where it is if there is no data.
    """
    if not data:
        return [attached(line(_ELSEWHERE, what, title, at))]
    if media.startswith("text/") or media in ("application/json", "application/xml"):
        with suppress(binascii.Error, ValueError):
            text = base64.b64decode(data, validate=True).decode()
            return _headed(what, title, [MessagePart(text)])
    return [attached(line(READS_TEXT, media or what, title, _unpacked(data)))]


def _named(fields: Mapping[str, Any], name: str) -> str:
    """A text that describes something; "" where there is none."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


_READ: dict[str, Callable[[Object], list[MessagePart]]] = {
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    "file": _file,
    "input_file": _file,
}
_PARTS: Final = _TEXTS | _PICTURES | _READ.keys()


def as_text(value: Any) -> str:
    """Return the call or result of a service's own tool as text: JSON without packed data."""
    if isinstance(value, str):
        packed = _BINARY.match(value)
        return line(UNREAD, "data", _unpacked(value)) if packed else value
    return json.dumps(_clear(value, 0), ensure_ascii=False, separators=(",", ":"))


def _clear(value: Any, depth: int) -> Any:
    """A value without what was packed for another service."""
    if depth == MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {
            name: _clear(entry, depth + 1)
            for name, entry in cast("dict[str, Any]", value).items()
            if entry is not None and not name.startswith(_PACKED)
        }
    if isinstance(value, list):
        return [_clear(entry, depth + 1) for entry in cast("list[Any]", value)]
    return as_text(value) if isinstance(value, str) else value


def answered(content: Any, at: str) -> list[MessagePart]:
    """Return the result of a service's own tool: its texts, documents and images, or JSON."""
    inner = members(members(content).get("content"))
    if "source" in inner:
        content = [inner]  # a page that was fetched
    blocks: Sequence[Any] = content if isinstance(content, list) else []
    if blocks and all(kind_of(members(block)) in _PARTS for block in blocks):
        return read_parts(Object({at: blocks}), at, seen_part)
    return [MessagePart(as_text(content if content is not None else ""))]
