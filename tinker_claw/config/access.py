"""Who may call the gateway: loopback, users and their keys.

Rule: an address that other machines can reach needs a key, and no sentence here ever holds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

DEFAULT_USER = "default"
"""Who calls without a key, or with --api-key."""
MIN_KEY_CHARACTERS = 16
_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"
_KEY = re.compile(r"[!-~]{1,512}")
"""What can be sent in a header as it is."""
_MAKE_ONE = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a good one"


class User(BaseModel):
    """One who may call; a table [[users]] of the settings file"""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(
        pattern=_NAME,
        description="a short plain word: it stands in the ledger and in log lines",
    )
    key: SecretStr = Field(description="key that this user's clients send")
    role: Literal["user", "admin"] = Field(
        "user", description="an admin is shown everybody's figures, spending and errors"
    )
    group: str | None = Field(
        None,
        pattern=_NAME,
        description="users of one group share what was computed of their prompts, which is faster; "
        "how fast an answer comes may tell one of them what another has asked",
    )


def check_access(host: str, api_key: SecretStr | None, users: Sequence[User]) -> None:
    """Refuse what would let strangers in, or users be taken for one another.

    Raises:
        ConfigError: says what to set.
    """
    keys = dict(_keys(api_key, users))
    if not is_loopback(host) and not keys:
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --api-key, or give each user a "
            "key ([[users]] in the settings file), or bind to 127.0.0.1"
        )
    names = [user.name for user in users] + ([DEFAULT_USER] if api_key is not None else [])
    for name in names:
        if names.count(name) > 1:
            twice = f"users: the name {name!r} is given twice"
            raise ConfigError(f"{twice}; --api-key is the key of the user {DEFAULT_USER!r}")
    for whose, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{whose}: a key is made of ASCII letters, digits and signs, without blanks, at "
                f"most 512 of them; {_MAKE_ONE}"
            )
        if len(key) < MIN_KEY_CHARACTERS:
            raise ConfigError(
                f"{whose}: a key of fewer than {MIN_KEY_CHARACTERS} characters can be guessed; "
                f"{_MAKE_ONE}"
            )
    if len(set(keys.values())) < len(keys):
        raise ConfigError("users: two users have the same key; a key must name one user")


def _keys(api_key: SecretStr | None, users: Sequence[User]) -> Iterator[tuple[str, str]]:
    """Every key, and how to speak of it."""
    if api_key is not None:
        yield "--api-key", api_key.get_secret_value()
    for n, user in enumerate(users):
        yield f"users[{n}].key", user.key.get_secret_value()
