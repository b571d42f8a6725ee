"""Who is calling: a key names a user, and no key is needed where nobody has one.

Rule: what was sent is compared with every user's key, whole and in constant time; how long an
answer takes says neither whose key is nearly right, nor how long it is. Whoever holds the settings'
own key, or calls from this machine where no key is needed, runs this gateway and is an admin.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from secrets import token_bytes

from pydantic import SecretStr

from tinker_claw.config.settings import DEFAULT_USER, User
from tinker_claw.errors import RequestError


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls."""

    name: str
    admin: bool
    """May see what concerns others, too."""
    cache_salt: str | None
    """Of the group; nobody else can guess it. None: there is one group only."""


class Keys:
    """The keys of all users, as digests under a secret of this process."""

    def __init__(self, api_key: SecretStr | None, users: Sequence[User]) -> None:
        """`api_key`: of the default user."""
        everybody = [*users]
        if api_key is not None:
            everybody.append(User(name=DEFAULT_USER, key=api_key, role="admin", group=None))
        self._secret = token_bytes(32)
        groups = {(user.group, user.group or user.name) for user in everybody}
        self._principals = [
            (
                Principal(
                    user.name,
                    user.role == "admin",
                    # A group of the name of a user who is in none is another group.
                    self._digest(f"{user.group} {user.group or user.name}").hex()
                    if len(groups) > 1
                    else None,
                ),
                self._digest(user.key.get_secret_value()),
            )
            for user in everybody
        ]

    @property
    def needed(self) -> bool:
        """Callers must send one."""
        return bool(self._principals)

    @property
    def users(self) -> Sequence[str]:
        """All who may call."""
        return [one.name for one, _ in self._principals] or [DEFAULT_USER]

    def principal(self, key: str, place: str = "Authorization: Bearer") -> Principal:
        """The user whose key it is.

        Args:
            key: "" where none was sent.
            place: where one belongs, for a sentence.

        Raises:
            RequestError: the key is missing or wrong.
        """
        if not self.needed:
            return Principal(DEFAULT_USER, admin=True, cache_salt=None)
        digest = self._digest(key)
        found: Principal | None = None
        for one, expected in self._principals:
            if hmac.compare_digest(digest, expected):
                found = one
        if found is None or not key:
            raise RequestError(
                f"The API key is missing or wrong; send it as {place}.",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")
