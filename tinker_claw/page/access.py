"""Who looks at the page: whoever calls from this machine where no key is needed, or has logged in.

Rule: a browser sends what a page of somebody else's makes it send. So a login is a cookie that
no script reads and no other site's request carries, every change needs a token that only our own
pages show, and a request that names another origin than ours is refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from secrets import token_bytes, token_urlsafe
from typing import Final

from cachetools import TTLCache

from tinker_claw.errors import RequestError
from tinker_claw.gateway.auth import Keys, Principal

LASTS_S: Final = 12 * 3600
"""A login."""
MOST: Final = 1024
"""Logins at the same time; one more ends the oldest."""
_LOCAL: Final = "local"


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks."""

    who: Principal
    token: str
    """Of the login; the same for everybody where none is needed."""

    @property
    def user(self) -> str | None:
        """Whose turns they see; None: everybody's."""
        return None if self.who.admin else self.who.name


class Access:
    """Logins, and the tokens that forms carry."""

    def __init__(self, keys: Keys, port: int) -> None:
        """`port`: of the gateway; cookies of one host are shared by all its ports."""
        self._keys = keys
        self._cookie = f"tinker-claw-{port}"
        self._secret = token_bytes(32)
        self._logins = TTLCache[str, Principal](MOST, LASTS_S)

    @property
    def needed(self) -> bool:
        """Somebody who wants to look must log in."""
        return self._keys.needed

    def visitor(self, headers: Mapping[str, str]) -> Visitor | None:
        """Who sends this; None: nobody is logged in.

        Args:
            headers: names in lower case.
        """
        if not self.needed:
            return Visitor(self._keys.principal(""), _LOCAL)
        try:
            sent = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return None
        who = None if sent is None else self._logins.get(sent.value)
        return None if sent is None or who is None else Visitor(who, sent.value)

    def log_in(self, key: str, *, secure: bool) -> str:
        """The cookie of a new login, as a header's value.

        Args:
            secure: the browser came over TLS, and shall send it back so only.

        Raises:
            RequestError: 401, it is nobody's key.
        """
        who, token = self._keys.principal(key, "the key of a user"), token_urlsafe(32)
        self._logins[token] = who
        return self._set(token, LASTS_S) + ("; Secure" if secure else "")

    def log_out(self, visitor: Visitor) -> str:
        """The header's value that takes the cookie away."""
        self._logins.pop(visitor.token, None)
        return self._set("", 0)

    def _set(self, token: str, lasts_s: int) -> str:
        return f"{self._cookie}={token}; Path=/ui; Max-Age={lasts_s}; HttpOnly; SameSite=Strict"

    def form_token(self, visitor: Visitor | None) -> str:
        """What a form of this visitor carries; of the login itself where there is none."""
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
