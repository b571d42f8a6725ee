"""Who is calling: a key names a user, and no key is needed where nobody has one.

Rule: what was sent is compared with every user's key, whole and in constant time; how long an
answer takes says neither whose key is nearly right, nor how long it is.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from http import HTTPStatus
from secrets import token_bytes

from pydantic import SecretStr

from tinker_claw.config import DEFAULT_USER, User
from tinker_claw.errors import RequestError


class Keys:
    """The keys of all users, as digests under a secret of this process."""

    def __init__(self, api_key: SecretStr | None, users: Sequence[User]) -> None:
        """`api_key`: of the default user."""
        given = [(user.name, user.key) for user in users]
        if api_key is not None:
            given.append((DEFAULT_USER, api_key))
        self._secret = token_bytes(32)
        self._digests = [(name, self._digest(key.get_secret_value())) for name, key in given]

    @property
    def needed(self) -> bool:
        """Callers must send one."""
        return bool(self._digests)

    @property
    def users(self) -> Sequence[str]:
        """All who may call."""
        return [name for name, _ in self._digests] or [DEFAULT_USER]

    def user(self, authorization: str) -> str:
        """The user behind an Authorization header; "" where none was sent.

        Raises:
            RequestError: the key is missing or wrong.
        """
        if not self.needed:
            return DEFAULT_USER
        scheme, _, sent = authorization.partition(" ")
        digest = self._digest(sent.strip())
        found: str | None = None
        for name, expected in self._digests:
            if hmac.compare_digest(digest, expected):
                found = name
        if found is None or scheme.lower() != "bearer":
            raise RequestError(
                "The API key is missing or wrong; send it as Authorization: Bearer.",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")
