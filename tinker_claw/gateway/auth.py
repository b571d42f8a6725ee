"""Authentication: a key identifies a user; if no user has a key, none is needed.

Rule: keys are looked up by a digest under a secret of this process. Response times therefore reveal
neither whose key is nearly right, nor its length. Keys are too long to be guessed. The owner of the
settings' own key runs this gateway and is an admin; so is a caller from this machine where no key
is needed.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from secrets import token_bytes

from pydantic import SecretStr

from tinker_claw.config.settings import DEFAULT_USER, User
from tinker_claw.errors import RequestError


@dataclass(frozen=True, slots=True)
class Principal:
    """The user who sends a request."""

    name: str
    admin: bool
    """May also see what concerns other users."""
    cache_salt: str | None
    """Prompt-cache salt of the user's group, a secret; None: there is one group only."""


class Keys:
    """The keys of all users, as digests under a secret of this process."""

    def __init__(
        self, api_key: SecretStr | None, users: Sequence[User], file: Path | None = None
    ) -> None:
        """`api_key`: of the default user; `file`: where it stands, if the gateway made it."""
        everybody = [*users]
        if api_key is not None:
            everybody.append(User(name=DEFAULT_USER, key=api_key, role="admin", group=None))
        self.needed = bool(everybody)
        """Callers must send a key."""
        self._secret = token_bytes(32)
        self._file = file
        groups = {(user.group, user.group or user.name) for user in everybody}
        self._principals = {
            self._digest(user.key.get_secret_value()): Principal(
                user.name,
                user.role == "admin",
                # A user without a group differs from a group of the same name.
                self._digest(f"{user.group} {user.group or user.name}").hex()
                if len(groups) > 1
                else None,
            )
            for user in everybody
        }

    @property
    def key_header(self) -> str | None:
        """Words for the key of this gateway's owner; None: no key is needed."""
        file = f"what stands in {self._file.absolute()}" if self._file else "the key"
        return file if self.needed else None

    @property
    def users(self) -> Sequence[str]:
        """Names of all users."""
        return [principal.name for principal in self._principals.values()] or [DEFAULT_USER]

    def principal(
        self, *keys: str, place: str = "Authorization: Bearer", local: bool = False
    ) -> Principal:
        """Return the user of the first key that is right.

        Args:
            keys: those that a request has; "" for none.
            place: where a key belongs, for the error message.
            local: whether the caller is on this machine; then the message names the key's file.

        Raises:
            RequestError: the key is missing or wrong.
        """
        if not self.needed:
            return Principal(DEFAULT_USER, admin=True, cache_salt=None)
        for key in keys:
            if key and (user := self._principals.get(self._digest(key))) is not None:
                return user
        where = f" The key stands in {self._file.absolute()}." if local and self._file else ""
        raise RequestError(
            f"The API key is missing or wrong; send it as {place}.{where}",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")
