"""Access to the page: everybody on this machine where no key is needed, else visitors with a login.

Rule: a browser sends what other people's pages make it send. So a login is a cookie that no script
reads and no other site's request carries, every change needs a token that only our own pages show,
and a request with a foreign origin is refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from secrets import token_bytes, token_urlsafe
from time import monotonic
from typing import Final

from cachetools import TTLCache

from tinker_claw.errors import RequestError
from tinker_claw.gateway.auth import Keys, Principal

LASTS_S: Final = 12 * 3600
"""Seconds that a login lasts."""
MOST: Final = 1000
"""Most logins at the same time; one more ends the one unused for longest."""
_LOCAL: Final = "local"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A user of the page."""

    who: Principal
    token: str
    """Token of the login; the same for everybody where no login is needed."""

    @property
    def user(self) -> str | None:
        """User whose turns the visitor sees; None: everybody's."""
        return None if self.who.admin else self.who.name


class Access:
    """Logins, and the tokens that forms carry."""

    def __init__(self, keys: Keys, port: int, clock: Callable[[], float] = monotonic) -> None:
        """Set up access. `port`: the gateway's; all ports of a host share its cookies."""
        self._keys = keys
        self._cookie = f"tinker-claw-{port}"
        self._secret = token_bytes(32)
        self._logins: TTLCache[str, Principal] = TTLCache(MOST, LASTS_S, timer=clock)
        """Logged-in principals, by cookie value."""

    @property
    def needed(self) -> bool:
        """Whether visitors must log in."""
        return self._keys.needed

    def visitor(self, cookies: Mapping[str, str]) -> Visitor | None:
        """Return the visitor who sent a request with these cookies; None: nobody is logged in."""
        if not self.needed:
            return Visitor(self._keys.principal(""), _LOCAL)
        token = cookies.get(self._cookie, "")
        who = self._logins.get(token)
        return None if who is None else Visitor(who, token)

    def log_in(self, key: str, *, secure: bool) -> str:
        """Log in with a key; return the header value that sets the cookie.

        Args:
            secure: whether the browser came over TLS, so that cookies are sent over TLS only.

        Raises:
            RequestError: 401, the key is nobody's.
        """
        try:
            who = self._keys.principal(key)
        except RequestError as error:
            raise RequestError(
                "No user has this key: give the one that your agent sends.", status=error.status
            ) from error
        token = token_urlsafe(32)
        self._logins[token] = who
        return self._set(token, LASTS_S) + ("; Secure" if secure else "")

    def log_out(self, visitor: Visitor) -> str:
        """Log a visitor out; return the header value that deletes the cookie."""
        self._logins.pop(visitor.token, None)
        return self._set("", 0)

    def _set(self, value: str, lasts_s: int) -> str:
        return f"{self._cookie}={value}; Path=/ui; Max-Age={lasts_s}; HttpOnly; SameSite=Strict"

    def form_token(self, visitor: Visitor | None) -> str:
        """Return the token for this visitor's forms, or for the login form where there is none."""
        token = "" if visitor is None else visitor.token
        return hmac.digest(self._secret, token.encode(), "sha256").hex()

    def check(self, visitor: Visitor | None, sent: str) -> None:
        """Refuse a form that none of our pages has shown to this visitor.

        Raises:
            RequestError: 403.
        """
        if not hmac.compare_digest(self.form_token(visitor).encode(), sent.encode()):
            raise RequestError(
                "This form is not of this page, or the gateway was started anew since it was "
                "shown: load the page again.",
                status=HTTPStatus.FORBIDDEN,
                code="forbidden",
            )
