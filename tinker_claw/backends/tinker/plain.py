"""One plain question to the service, without the SDK: it tries for minutes before it says why not.

Rule: the question costs nothing, and the answer comes within seconds, whatever it is.
"""

from __future__ import annotations

from typing import Final

import httpx

_PATIENCE_S: Final = 10.0


class Unreachable(Exception):
    """There was no answer; the text is a part of a sentence."""


async def ask_what_it_has(base_url: str, key: str | None) -> httpx.Response:
    """The answer to get_server_capabilities, whatever its status.

    Raises:
        Unreachable: there was none.
    """
    headers = {"X-API-Key": key} if key else {}
    try:
        async with httpx.AsyncClient(timeout=_PATIENCE_S, headers=headers) as client:
            return await client.get(f"{base_url}/api/v1/get_server_capabilities")
    except httpx.ConnectError as error:
        raise Unreachable(f"{base_url} cannot be reached") from error
    except httpx.TimeoutException as error:
        raise Unreachable(f"{base_url} does not answer at all") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{base_url} cannot be asked ({type(error).__name__})") from error
