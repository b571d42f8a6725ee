"""Protection against requests of web pages in the user's browser (CSRF).

Rule: no page but our own, and those that the user named, may use a server of ours. Any page may
try, since a browser sends its requests to loopback, too. It keeps the answer from the page, but by
then the reply is paid for and the turn recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address

from tinker_claw.errors import RequestError


@lru_cache(maxsize=64)  # nearly all requests call the same name
def is_loopback(host: str) -> bool:
    """Return whether a host name or address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False  # a name may resolve to any address
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def refuse_pages(
    headers: Mapping[str, str],
    *,
    local: bool,
    own: str | None = None,
    allowed: Collection[str] = (),
) -> None:
    """Refuse requests of web pages other than our own.

    Args:
        headers: names in lower case.
        local: whether the server is bound to loopback and needs no key. A page whose name resolves
            to this machine (DNS rebinding) is then recognised by its Host header; elsewhere the
            key keeps it out.
        own: origin of our own page, which is allowed.
        allowed: origins of other pages that are, letter for letter.

    Raises:
        RequestError: 403.
    """
    if "origin" in headers and headers["origin"] not in (own, *allowed):
        raise _forbidden(
            "Web pages may not use this server: the request has an Origin header. A desktop app "
            "may, with a key, once its origin is named: --allow-origin."
        )
    host = headers.get("host", "")
    if local and not is_loopback(_name(host)):
        raise _forbidden(
            "This server answers to names of this machine only (127.0.0.1, localhost), because it "
            "asks for no key; give it one to call it by another name."
        )


def refuse_forms(headers: Mapping[str, str], *others: str) -> None:
    """Refuse bodies that are not declared as JSON; a page can send forms and plain text without a
    preflight.

    Args:
        headers: names in lower case.
        others: content types that are accepted besides JSON.

    Raises:
        RequestError: 415.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in ("application/json", *others) and not kind.endswith("+json"):
        raise RequestError(
            "The body must be JSON; send Content-Type: application/json.",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            code="unsupported_media_type",
        )


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _forbidden(message: str) -> RequestError:
    return RequestError(message, status=HTTPStatus.FORBIDDEN, code="forbidden")
