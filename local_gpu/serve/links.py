"""Download links that work without the key, for an hour.

Rule: a link is good for one file, until its time is over, and only in the process that signed it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

_LASTS_S = 3600


@dataclass(frozen=True, slots=True)
class Links:
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def link(self, root: str, run: str, name: str, file: str) -> str:
        """An absolute address under `root`."""
        until = self.until()
        query = urlencode({"until": until, "signature": self._sign(run, name, file, until)})
        return f"{root}/{quote(run, safe='')}/{quote(name)}/{quote(file)}?{query}"

    def good(self, run: str, name: str, file: str, until: int, signature: str) -> bool:
        wanted = self._sign(run, name, file, until)
        return until > time.time() and hmac.compare_digest(signature.encode(), wanted.encode())

    @staticmethod
    def until() -> int:
        """When a link made now stops working, in Unix seconds."""
        return int(time.time()) + _LASTS_S

    def _sign(self, run: str, name: str, file: str, until: int) -> str:
        text = "\n".join((run, name, file, str(until)))
        return hmac.digest(self.secret, text.encode(), "sha256").hex()
