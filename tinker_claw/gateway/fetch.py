"""Fetch images by URL, from the hosts that --image-hosts names.

Rule: anyone who can write to the agent may write the URL (SSRF). So no other host is asked, none
with a private address, and the connection goes to the very address that was checked: resolved
again, a name may give another. Only a host that is named as loopback may be on loopback.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from http import HTTPStatus
from ipaddress import ip_address
from ssl import SSLContext
from typing import Final

import httpx

from tinker_claw.images import FORMATS, AwayError
from tinker_claw.origin import is_loopback

FETCH_S: Final = 10.0
"""Seconds for one image."""
MOST_FETCHED: Final = 8
"""Most images by URL in one request."""
_TYPES: Final = {f"image/{format.lower()}" for format in FORMATS}

Resolve = Callable[[str, int], Awaitable[Collection[str]]]


async def _resolved(host: str, port: int) -> Collection[str]:
    """Return a host's addresses of IPv4, where it is plain which are private."""
    loop, family = asyncio.get_running_loop(), socket.AF_INET
    found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found}


@cache
def _trusted() -> SSLContext:
    """Return the TLS context, cached: its certificates take long to load."""
    return httpx.create_ssl_context(trust_env=False)


async def fetch(
    away: AwayError,
    hosts: Collection[str],
    most: int,
    *,
    seconds: float = FETCH_S,
    resolve: Resolve = _resolved,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """Fetch the file of an image.

    Args:
        hosts: as --image-hosts has them.
        most: bytes of the file.
        seconds: from the host's name to the last byte.

    Raises:
        RequestError: it must not be fetched, or is not an image within bounds.
    """
    try:
        url = httpx.URL(away.url)
        named = url.netloc.decode()
    except (httpx.InvalidURL, ValueError) as error:
        raise away from error
    if named not in hosts or url.userinfo:
        raise away
    local = is_loopback(url.host)
    if url.scheme != "https" and not local:
        raise away.wrong("is at an http:// URL, and only https is asked")
    try:
        async with asyncio.timeout(seconds):
            address = url.host if local else await _address(away, url, resolve)
            async with (
                # No proxy, which would resolve the name again, and no cookies.
                httpx.AsyncClient(trust_env=False, verify=_trusted(), transport=transport) as http,
                http.stream(
                    "GET",
                    url.copy_with(host=address),
                    headers={
                        "host": named,
                        "accept": ", ".join(sorted(_TYPES)),
                        "accept-encoding": "identity",
                        "user-agent": "tinker-claw",
                    },
                    extensions={"sni_hostname": url.host},
                ) as reply,
            ):
                return await _read(away, reply, most)
    except TimeoutError as error:
        raise away.wrong(f"did not come within {seconds:g} seconds") from error
    except (OSError, httpx.HTTPError) as error:
        raise away.wrong(f"could not be fetched: {error or type(error).__name__}") from error


async def _address(away: AwayError, url: httpx.URL, resolve: Resolve) -> str:
    """Return an address of a host, if all of its addresses are public."""
    found = sorted(await resolve(url.host, url.port or 443))
    known = [ip_address(one) for one in found]
    if not known or not all(one.is_global and not one.is_multicast for one in known):
        raise away.wrong("is at an address inside a network, which is not asked")
    return found[0]


async def _read(away: AwayError, reply: httpx.Response, most: int) -> bytes:
    """Return the body of a reply that is an image."""
    if reply.is_redirect:
        raise away.wrong("is at an address that redirects, which is not followed")
    if reply.status_code != HTTPStatus.OK:
        raise away.wrong(f"could not be fetched: its host answers {reply.status_code}")
    kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES or reply.headers.get("content-encoding", "identity") != "identity":
        raise away.wrong(f"is not a plain image that is read here: {kind!r}")
    file = bytearray()
    async for piece in reply.aiter_raw():
        file += piece
        if len(file) > most:
            raise away.wrong(f"is a file of more than the {most:,} bytes left for it")
    return bytes(file)
