"""The key that a gateway makes for itself where others have accounts on its machine.

Rule: loopback keeps other machines out, but not other users of this one. So a gateway without a key
makes one with its new data directory, which only its owner can read. A gateway that lets a named
origin in does the same. With `--api-key none` there is none.
"""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Iterable
from pathlib import Path

from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.files import write_private
from tinker_claw.origin import is_loopback

KEY_FILE = "api-key"
"""File name of the key in the data directory."""
_PERSONS = range(1000, 65534)
_NO_LOGIN = ("nologin", "false")


def accounts() -> Iterable[pwd.struct_passwd]:
    """Return all accounts of this machine."""
    return pwd.getpwall()


def others() -> list[str]:
    """Names of those who can log in here, without the account that runs this."""
    return [
        account.pw_name
        for account in accounts()
        if account.pw_uid in _PERSONS
        and account.pw_uid != os.getuid()
        and Path(account.pw_shell).name not in _NO_LOGIN
    ]


def with_own_key(settings: Settings) -> Settings:
    """Add the gateway's own key to settings that neither give nor refuse one.

    The key was made at an earlier start; else only its file is named, for the next start.

    Raises:
        ConfigError: it cannot be read.
    """
    directory = settings.run.directory
    file = directory / KEY_FILE
    if settings.users or not is_loopback(settings.gateway.host):
        return settings
    try:
        key = file.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        new = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        needed = settings.gateway.origins or (new and others())
        return settings.with_key(file, None) if needed else settings
    except OSError as error:
        raise ConfigError(f"{file}, the gateway's key, cannot be read: {error.strerror}") from error
    return settings.with_key(file, key)


def make(settings: Settings, file: Path) -> Settings:
    """Write a new key to `file`; returns the settings with it.

    Raises:
        LedgerError: it cannot be written.
    """
    key = secrets.token_urlsafe(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(file, f"{key}\n")
    except OSError as error:
        raise LedgerError(
            f"the data directory {file.parent} cannot be written ({error.strerror}); "
            "choose another with --data-dir"
        ) from error
    return settings.with_key(file, key)
