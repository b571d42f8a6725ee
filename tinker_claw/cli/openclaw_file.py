"""OpenClaw's configuration file: find it, read it, change single values, replace it without harm.

Rule: every other byte stays as it is: `set_values` reads its own result back and refuses to hand
out anything but what was meant. The old text is in a backup before the new one takes its place, in
one rename; whatever goes wrong before that leaves the file as it was.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import json5

from tinker_claw.errors import ConfigError

Where = tuple[str | int, ...]
"""Keys and indices from the root; an index equal to an array's length appends."""

# Values in JSON5 text

_TRIVIA = re.compile(r"(?:[\s\ufeff]|//[^\n\r\u2028\u2029]*|/\*.*?\*/)*", re.DOTALL)
_SAME_LINE = re.compile(r"(?:[ \t]*(?:/\*[^\n\r]*?\*/|//[^\n\r]*))*")
_STRING = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
_BARE = re.compile(r"[^\s,:\[\]{}/\"']+")
_INDENTED = re.compile(r"[\r\n]([ \t]+)[\"'\w$]")


@dataclass(slots=True)
class _Node:
    """A value's place in the text."""

    start: int
    end: int = 0
    members: list[tuple[str | int, int, _Node]] = field(
        default_factory=list["tuple[str | int, int, _Node]"]
    )
    """Of an object or array: key or index, where the member begins, its value."""
    comma: bool = False
    """The last member is followed by a comma."""

    def find(self, key: str | int) -> _Node | None:
        """The last of that name: it is the one that counts."""
        return next((node for name, _, node in reversed(self.members) if name == key), None)


def parse(text: str) -> Any:
    """The value of a JSON5 text.

    Raises:
        ValueError: it is none; says where.
    """
    text = text.removeprefix("\ufeff")
    try:
        return json.loads(text)  # by far the faster, and what most files are
    except ValueError:
        pass
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    try:
        return json5.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def set_values(text: str, changes: Sequence[tuple[Where, Any]]) -> str:
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
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise ConfigError(
            "the file is written in a way that cannot be changed here without harm; put the block "
            "in by hand"
        )
    return text


def _assign(whole: Any, path: Where, value: Any) -> None:
    data = whole
    for at, key in enumerate(path):
        if not _takes(data, key):
            shown = ".".join(str(part) for part in path[:at]) or "the whole"
            kind = "an object" if isinstance(key, str) else "a list"
            raise ConfigError(f"{shown} is not {kind} there; mend that first")
        last = at == len(path) - 1
        if isinstance(key, str):
            data[key] = value if last else data.get(key, {})
        elif key == len(data):
            data.append(value)
        elif last:
            data[key] = value
        data = data[key]


def _takes(data: Any, key: str | int) -> bool:
    return isinstance(data, dict if isinstance(key, str) else list)


def _set(text: str, path: Where, value: Any) -> str:
    node = _Scanner(text).root()
    for at, key in enumerate(path):
        inner = node.find(key)
        if inner is None:
            for missing in reversed(path[at + 1 :]):
                value = {missing: value}
            return _insert(text, node, key, value)
        node = inner
    written = _written(text, value, _line_indent(text, node.start), _flat(text, node))
    return text[: node.start] + written + text[node.end :]


def _insert(text: str, node: _Node, key: str | int, value: Any) -> str:
    """A new last member."""
    outer, flat = _line_indent(text, node.start), _flat(text, node)
    indent = outer + _unit(text)
    if node.members:
        first = node.members[-1][1]
        if not text[text.rfind("\n", 0, first) + 1 : first].strip():
            indent = _line_indent(text, first)
    label = f"{json.dumps(key)}: " if isinstance(key, str) else ""
    newline = "\r\n" if "\r\n" in text else "\n"
    if not node.members:
        body = label + _written(text, value, indent, flat=False)
        rest = text[node.start + 1 : node.end - 1].rstrip()  # a comment may stand there
        return (
            f"{text[: node.start + 1]}{rest}{newline}{indent}{body}{newline}{outer}"
            f"{text[node.end - 1 :]}"
        )
    body = label + _written(text, value, indent, flat)
    value_end = node.members[-1][2].end
    comma_end = text.index(",", _trivia(text, value_end)) + 1 if node.comma else value_end
    end = _SAME_LINE.match(text, comma_end)
    place = end.end() if end else comma_end
    between = " " if flat else newline + indent
    comma = "" if node.comma else ","
    kept = text[value_end:place]
    tail = "," if node.comma and not flat else ""  # as the file has it
    return f"{text[:value_end]}{comma}{kept}{between}{body}{tail}{text[place:]}"


def _written(text: str, value: Any, indent: str, flat: bool) -> str:
    if flat:
        return json.dumps(value, ensure_ascii=False)
    lines = json.dumps(value, indent=_unit(text), ensure_ascii=False).split("\n")
    return (("\r\n" if "\r\n" in text else "\n") + indent).join(lines)


def _flat(text: str, node: _Node) -> bool:
    """An object or array that stands on one line."""
    return bool(node.members) and "\n" not in text[node.start : node.end]


def _unit(text: str) -> str:
    """How this file indents."""
    found = _INDENTED.search(text)
    return found.group(1) if found else "  "


def _line_indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _trivia(text: str, at: int) -> int:
    found = _TRIVIA.match(text, at)
    return found.end() if found else at


class _Scanner:
    """Finds where values stand in text that is known to be valid."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def root(self) -> _Node:
        return self._value()

    def _value(self) -> _Node:
        self._at = _trivia(self._text, self._at)
        node = _Node(self._at)
        opening = self._text[self._at : self._at + 1]
        if opening in ("{", "["):
            self._at += 1
            self._members(node, "}" if opening == "{" else "]")
        else:
            self._token()
        node.end = self._at
        return node

    def _members(self, node: _Node, closing: str) -> None:
        while True:
            self._at = _trivia(self._text, self._at)
            if self._text[self._at] == closing:
                self._at += 1
                return
            begin = self._at
            key: str | int = len(node.members)
            if closing == "}":
                key = self._key()
            node.members.append((key, begin, self._value()))
            self._at = _trivia(self._text, self._at)
            node.comma = self._text[self._at] == ","
            if node.comma:
                self._at += 1

    def _key(self) -> str:
        begin = self._at
        self._token()
        written = self._text[begin : self._at]
        (key,) = parse(f"{{{written}: 0}}")
        self._at = _trivia(self._text, self._at) + 1  # the colon
        return str(key)

    def _token(self) -> None:
        """A string, a number or a word."""
        found = _STRING.match(self._text, self._at) or _BARE.match(self._text, self._at)
        if found is None:
            raise ConfigError("the file is written in a way that cannot be changed here")
        self._at = found.end()


# The file


PATH_VARIABLE = "OPENCLAW_CONFIG_PATH"
STATE_VARIABLE = "OPENCLAW_STATE_DIR"
_PRIVATE = 0o600
"""It may hold keys."""


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A configuration that was read."""

    path: Path
    """Behind links."""
    text: str
    data: dict[str, Any]


def usual_path() -> Path:
    """Where OpenClaw itself looks."""
    if named := os.environ.get(PATH_VARIABLE):
        return Path(named).expanduser()
    state = os.environ.get(STATE_VARIABLE)
    return (Path(state).expanduser() if state else Path.home() / ".openclaw") / "openclaw.json"


def read(path: Path) -> FoundConfig | None:
    """What stands at `path`; None: nothing does.

    Raises:
        ConfigError: it cannot be read, or is no configuration.
    """
    try:
        target = path.expanduser().resolve()
        raw = target.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    try:
        text = raw.decode()
        data = parse(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON5, and is left alone: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object, and is left alone")
    return FoundConfig(target, text, data)


def create(path: Path, text: str) -> None:
    """Write a file where none is, readable by its user only.

    Raises:
        ConfigError: its folder does not exist or cannot be written.
    """
    target = path.expanduser().resolve()
    if not target.parent.is_dir():
        raise ConfigError(f"{path} cannot be made: there is no folder {target.parent}")
    try:
        with _beside(target) as (handle, temporary):
            _fill(handle, text.encode())
            os.link(temporary, target)  # unlike a rename it never replaces a file
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    _settle(target.parent)


def replace(found: FoundConfig, text: str) -> Path:
    """Put a new text in the place of the one that was read; returns the backup of that.

    Raises:
        ConfigError: it cannot be written, belongs to somebody else, or has changed meanwhile.
    """
    target, old = found.path, found.text.encode()
    try:
        was = target.stat()
        if was.st_uid != os.geteuid() and os.geteuid() != 0:
            raise ConfigError(f"{target} belongs to another user: run this as that user")
        with _beside(target) as (handle, temporary):
            _fill(handle, text.encode())
            _own(temporary, was)
            backup = _back_up(target, old, was)
            if target.read_bytes() != old:
                backup.unlink()
                raise ConfigError(f"{target} has changed meanwhile: run this again")
            os.rename(temporary, target)
        _settle(target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be replaced: {error.strerror}") from error
    return backup


@contextmanager
def _beside(target: Path) -> Generator[tuple[int, str]]:
    """A private temporary file in the same folder, gone at the end unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        yield handle, name
    finally:
        Path(name).unlink(missing_ok=True)


def _fill(handle: int, content: bytes) -> None:
    with open(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _own(name: str, like: os.stat_result) -> None:
    """Give a file of ours the mode and the owner of another."""
    mine = os.stat(name)
    if (mine.st_uid, mine.st_gid) != (like.st_uid, like.st_gid):
        os.chown(name, like.st_uid, like.st_gid)
    os.chmod(name, like.st_mode & 0o7777)


def _back_up(target: Path, old: bytes, like: os.stat_result) -> Path:
    stamp = f"{target.name}.bak-{time.strftime('%Y%m%d-%H%M%S')}"
    for again in ("", *(f"-{n}" for n in range(1, 100))):
        backup = target.with_name(stamp + again)
        try:
            handle = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        except FileExistsError:
            continue
        _fill(handle, old)
        _own(str(backup), like)
        os.chmod(backup, _PRIVATE)  # it may hold keys, and nobody else needs it
        return backup
    raise ConfigError(f"{target.parent} holds a hundred backups of this second already")


def _settle(folder: Path) -> None:
    """The rename itself survives a power cut, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
