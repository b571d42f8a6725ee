"""OpenClaw's configuration file: find it, read it, change single values, replace it without harm.

Rule: every other byte stays as it is: `set_values` reads its own result back and refuses to hand
out anything but what was meant. The old text is in a backup before the new one takes its place, in
one rename; whatever goes wrong before that leaves the file as it was.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import json5

from tinker_claw.cli.common import room_beside
from tinker_claw.errors import ConfigError

Where = tuple[str | int, ...]
"""Keys and indices from the root; an index of -1 puts a new value first."""
Change = tuple[Where, Any]
"""A place and the value that it gets."""


def parse(text: str) -> Any:
    """The value of a JSON5 text.

    Raises:
        ValueError: it is none; says where.
    """
    text = text.removeprefix("\ufeff")
    try:
        try:
            return json.loads(text)  # by far the faster, and what most files are
        except ValueError:
            return json5.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def set_values(text: str, changes: Sequence[Change]) -> str:
    """The text with these values set, objects on the way made where they are missing.

    Raises:
        ConfigError: something on the way is neither object nor array, or the text is written in a
            way that this cannot change safely.
    """
    wanted = parse(text)
    try:
        for path, value in changes:
            _assign(wanted, path, value)
            text = _set(text, path, value)
        same = parse(text) == wanted
    except (ValueError, IndexError, RecursionError):
        same = False
    if not same:
        raise ConfigError(
            "the file is written in a way that cannot be changed here without harm; put the block "
            "in by hand"
        )
    return text


def _assign(data: Any, path: Where, value: Any) -> None:
    for at, key in enumerate(path):
        fits = isinstance(data, dict if isinstance(key, str) else list)
        if not fits:
            kind = "an object" if isinstance(key, str) else "a list"
            raise ConfigError(
                f"{shown(path[:at]) or 'the whole'} is not {kind} there; mend that first"
            )
        if at < len(path) - 1:
            data = data.setdefault(key, {}) if isinstance(key, str) else data[key]
        elif key == -1:
            data.insert(0, value)
        else:
            data[key] = value


def shown(path: Where) -> str:
    """How a place is named in a sentence: agents.list[2].model."""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(steps).removeprefix(".")


# Where values stand in a text that is known to be valid, and how the file writes them

_TOKEN = re.compile(
    r"""(?P<trivia>(?:[\s\ufeff]|//[^\n\r\u2028\u2029]*|/\*.*?\*/)+)
    | [{}\[\],:] | (["'])(?:\\.|(?!\2)[^\\])*\2 | [^\s\ufeff,:\[\]{}/"']+""",
    re.DOTALL | re.VERBOSE,
)
_COMMENT_OF_LINE = re.compile(r"[ \t]*(?:/\*[^\n\r]*?\*/|//[^\n\r]*)")
_INDENTED = re.compile(r"[\r\n]([ \t]+)[\"'\w$]")


@dataclass(slots=True)
class _Place:
    """Where a value stands in the text."""

    start: int
    end: int
    members: dict[str | int, _Place] = field(default_factory=dict[str | int, "_Place"])
    """Of an object or array, by key or index; of equal keys the last, which is the one that counts.
    """


def _place(tokens: Iterator[re.Match[str]], token: re.Match[str]) -> _Place:
    """Of the value that begins with `token`; takes its other tokens from `tokens`."""
    place = _Place(token.start(), token.end())
    closing = {"{": "}", "[": "]"}.get(token[0])
    if closing is None:
        return place
    for token in tokens:
        if token[0] == closing:
            place.end = token.end()
            break
        if token[0] == ",":
            continue
        key = len(place.members)
        if closing == "}":
            (key,) = parse(f"{{{token[0]}: 0}}")
            next(tokens)  # the colon
            token = next(tokens)
        place.members[key] = _place(tokens, token)
    return place


def _set(text: str, path: Where, value: Any) -> str:
    tokens = (token for token in _TOKEN.finditer(text) if token["trivia"] is None)
    place = _place(tokens, next(tokens))
    for at, key in enumerate(path):
        if key not in place.members:
            for missing in reversed(path[at + 1 :]):
                value = {missing: value}
            return _insert(text, place, key, value)
        place = place.members[key]
    written = _written(text, value, None if _is_flat(text, place) else _indent(text, place.start))
    return text[: place.start] + written + text[place.end :]


def _insert(text: str, place: _Place, key: str | int, value: Any) -> str:
    """With a new first member, written as the file writes the others."""
    label = f"{json.dumps(key)}: " if isinstance(key, str) else ""
    at, outer, (newline, unit) = place.start + 1, _indent(text, place.start), _style(text)
    if _is_flat(text, place):
        while text[at].isspace():
            at += 1
        return f"{text[:at]}{label}{_written(text, value, None)}, {text[at:]}"
    while found := _COMMENT_OF_LINE.match(text, at):
        at = found.end()
    indent, comma = outer + unit, "," if place.members else ""
    end = "" if newline in text[at : place.end] else f"{newline}{outer}"
    body = f"{newline}{indent}{label}{_written(text, value, indent)}{comma}"
    return f"{text[:at]}{body}{end}{text[at:]}"


def _written(text: str, value: Any, indent: str | None) -> str:
    """A value for this text, on lines that are indented so; None: on one line."""
    if indent is None:
        return json.dumps(value, ensure_ascii=False)
    newline, unit = _style(text)
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", newline + indent)


def _is_flat(text: str, place: _Place) -> bool:
    """An object or array that stands on one line."""
    return bool(place.members) and "\n" not in text[place.start : place.end]


def _style(text: str) -> tuple[str, str]:
    """How the file ends a line, and by what it indents."""
    found = _INDENTED.search(text)
    return "\r\n" if "\r\n" in text else "\n", found[1] if found else "  "


def _indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


# The file


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A configuration that was read, or could be made."""

    path: Path
    """Behind links."""
    text: str
    data: dict[str, Any]
    was: os.stat_result | None
    """None: there is no file yet."""


def usual_path() -> Path:
    """Where OpenClaw itself looks."""
    if named := os.environ.get("OPENCLAW_CONFIG_PATH"):
        return Path(named).expanduser()
    state = os.environ.get("OPENCLAW_STATE_DIR") or "~/.openclaw"
    return Path(state).expanduser() / "openclaw.json"


def read(path: Path) -> FoundConfig:
    """What stands at `path`.

    Raises:
        ConfigError: it cannot be read, or is no configuration.
    """
    target = path.expanduser()
    try:
        target = target.resolve()
        raw, was = target.read_bytes(), target.stat()
    except FileNotFoundError:
        return FoundConfig(target, "{}\n", {}, None)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    try:
        text = raw.decode()
        data = parse(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON5, and is left alone: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object, and is left alone")
    return FoundConfig(target, text, data, was)


def save(found: FoundConfig, text: str) -> Path | None:
    """Put a new text in the place of the one that was read; returns the backup of that, if any.

    Raises:
        ConfigError: it cannot be written, belongs to somebody else, or has changed meanwhile.
    """
    target, was = found.path, found.was
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be made: there is no folder {target.parent}")
    if was is not None and os.geteuid() not in (0, was.st_uid):
        raise ConfigError(f"{target} belongs to another user: run this as that user")
    with room_beside(target) as room:
        new = _private(room / "new", text)
        if was is None:
            os.link(new, target)  # unlike a rename it never replaces a file
            return None
        old = _private(room / "old", found.text)
        for file in (new, old):
            os.chown(file, was.st_uid, was.st_gid)
        new.chmod(was.st_mode & 0o7777)  # the backup stays private: nobody else needs it
        if target.read_bytes() != found.text.encode():
            raise ConfigError(f"{target} has changed meanwhile: run this again")
        once = f"{time.strftime('%Y%m%d-%H%M%S')}-{room.suffix[1:]}"
        backup = old.rename(target.with_name(f"{target.name}.bak-{once}"))
        new.rename(target)
    return backup


def _private(path: Path, text: str) -> Path:
    """A new file, on the disk, and nobody else's to read: it may hold keys."""
    path.touch(mode=0o600, exist_ok=False)
    with path.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file)
    return path
