"""How far this machine's clock is off, by the answer of a server that is asked anyway.

Rule: certificates are not checked, because a wrong clock is what makes them look wrong; so no key
is sent, and nothing is believed but the time.
"""

from __future__ import annotations

import ssl
import time
import urllib.request
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.error import HTTPError

_PATIENCE_S = 5.0


def ahead_of(url: str) -> float | None:
    """By how many seconds this clock is ahead of the server's; None: the server does not tell."""
    anyone = ssl.create_default_context()
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(url, method="HEAD")
    asked = time.time()
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S, context=anyone) as answer:
            headers: Message[str, str] = answer.headers
    except HTTPError as error:  # a refusal has a date, too
        with error:
            headers = error.headers
    except (OSError, HTTPException, ValueError):
        return None
    middle = (asked + time.time()) / 2
    try:
        # Whole seconds, cut off: half a second more is the best guess.
        theirs = parsedate_to_datetime(headers.get("Date", "")).timestamp() + 0.5
    except (TypeError, ValueError):
        return None
    return middle - theirs


def span(seconds: float) -> str:
    """A time span in words: 12 s, 4 min, 3 h, 2 d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * size:
            return f"{abs(seconds) / size:.0f} {unit}"
    return f"{abs(seconds):.0f} s"
