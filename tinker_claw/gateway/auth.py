"""Authentication: a key identifies a user; if no user has a key, none is needed.

Rule: keys are looked up by a digest under a secret of this process, so response times reveal
neither whose key is nearly right, nor its length. Wrong keys are rate-limited by address. Whoever
has the settings' own key, or calls from this machine where no key is needed, runs this gateway and
is an admin.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from secrets import token_bytes
from time import monotonic
from typing import Final

from cachetools import LRUCache, TTLCache
from pydantic import SecretStr

from tinker_claw.config.settings import DEFAULT_USER, User
from tinker_claw.errors import RequestError

FREE: Final = 10
"""Wrong keys allowed in a row; after them, one per second."""
_TRIED: Final = 4096
"""Entries of each cache of attempts; when a cache is full, a new entry displaces an old one."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The user who sends a request."""

    name: str
    admin: bool
    """May also see what concerns other users."""
    cache_salt: str | None
    """Prompt-cache salt of the user's group, a secret; None: there is one group only."""


class Tries:
    """Rate limit of wrong keys, by client."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._forgiven = TTLCache[str, float](_TRIED, FREE + 1, timer=clock)
        """When all wrong keys of a client are forgiven."""

    def check(self, who: str) -> None:
        """Raise RequestError, 429, if `who` has to wait before another key is checked."""
        if (wait_s := self._until(who) + 1 - self._clock() - FREE) > 0:
            raise RequestError(
                f"Too many wrong keys were tried: try again in {math.ceil(wait_s)} s.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                headers={"retry-after": str(math.ceil(wait_s))},
            )

    def wrong(self, who: str) -> None:
        """Count a wrong key."""
        self._forgiven[who] = self._until(who) + 1

    def _until(self, who: str) -> float:
        now = self._clock()
        return max(self._forgiven.get(who, now), now)


class Keys:
    """The keys of all users, as digests under a secret of this process."""

    def __init__(self, api_key: SecretStr | None, users: Sequence[User]) -> None:
        """`api_key`: of the default user."""
        everybody = [*users]
        if api_key is not None:
            everybody.append(User(name=DEFAULT_USER, key=api_key, role="admin", group=None))
        self._secret = token_bytes(32)
        self._tries = Tries()
        self._tried = LRUCache[tuple[str, bytes], bool](_TRIED)
        """Digests already checked, by address. So a client that guesses does not block one with the
        right key, and a wrong key in a configuration counts once."""
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
    def needed(self) -> bool:
        """Whether callers must send a key."""
        return bool(self._principals)

    @property
    def users(self) -> Sequence[str]:
        """Names of all users."""
        return [one.name for one in self._principals.values()] or [DEFAULT_USER]

    def caller(self, key: str, address: str, place: str = "Authorization: Bearer") -> Principal:
        """Return the user of a key, limiting the wrong keys from this address.

        Raises:
            RequestError: as `principal`; or 429, the key was not checked.
        """
        who, digest = network(address), self._digest(key)
        if self.needed and key and not self._tried.get((who, digest)):
            self._tries.check(who)
            self._tried[who, digest] = True
            if digest not in self._principals:
                self._tries.wrong(who)
        return self.principal(key, place)

    def principal(self, key: str, place: str = "Authorization: Bearer") -> Principal:
        """Return the user of a key.

        Args:
            key: "" where none was sent.
            place: where a key belongs, for the error message.

        Raises:
            RequestError: the key is missing or wrong.
        """
        if not self.needed:
            return Principal(DEFAULT_USER, admin=True, cache_salt=None)
        found = self._principals.get(self._digest(key)) if key else None
        if found is None:
            raise RequestError(
                f"The API key is missing or wrong; send it as {place}.",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")


def network(address: str) -> str:
    """Return the network of an address: a client may have 2^64 addresses of IPv6."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return found.exploded[:19] if found.ipv4_mapped is None else str(found.ipv4_mapped)
    return address
