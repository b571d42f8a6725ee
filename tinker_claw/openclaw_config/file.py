"""OpenClaw's configuration file: find it, read it, and replace it without a moment of harm.

Rule: the old text is in a backup before the new one takes its place, in one rename; whatever goes
wrong before that leaves the file as it was.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_claw.errors import ConfigError
from tinker_claw.openclaw_config.edit import parse

PATH_VARIABLE = "OPENCLAW_CONFIG_PATH"
STATE_VARIABLE = "OPENCLAW_STATE_DIR"
_PRIVATE = 0o600
"""It may hold keys."""


@dataclass(frozen=True, slots=True)
class Found:
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


def read(path: Path) -> Found | None:
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
    return Found(target, text, data)


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


def replace(found: Found, text: str) -> Path:
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
