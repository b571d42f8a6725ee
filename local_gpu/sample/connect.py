"""Connect to a server by its address, in the dialect that it speaks.

Rule: the server is asked, its address is not parsed: both kinds name themselves in their list of
models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from local_gpu.sample.dialect import HttpServer
from local_gpu.sample.http import Deadlines, HttpClient
from local_gpu.sample.sglang import SglangServer
from local_gpu.sample.vllm import VllmServer
from tinker_claw.errors import ConfigError, OutageError

Known = Literal["vllm", "sglang"]
Kind = Literal["auto"] | Known
_DIALECTS: Final[Mapping[str, type[HttpServer]]] = {"vllm": VllmServer, "sglang": SglangServer}


async def connect(url: str, kind: Kind = "auto", *, api_key: str | None = None) -> HttpServer:
    """Connect to a server. With a given kind nothing is sent yet: it may still be starting.

    Raises:
        ConfigError: it is neither.
        OutageError: it does not answer.
    """
    (server,) = await connect_all([url], kind, api_key)
    return server


async def connect_all(
    urls: Sequence[str], kind: Kind = "auto", api_key: str | None = None
) -> list[HttpServer]:
    """Connect to all servers, which are of the kind of the first that answers. One that is away
    does not keep the others from starting.

    Raises:
        ConfigError: that one is neither vLLM nor SGLang.
        OutageError: none answers.
    """
    failure: OutageError | None = None
    for url in urls:
        if kind == "auto":
            try:
                kind = await _kind(url, api_key)
            except OutageError as error:
                failure = failure or error
    if kind == "auto" and failure is not None:
        raise failure
    return [_DIALECTS[kind](url, api_key=api_key) for url in urls]


async def _kind(url: str, api_key: str | None) -> Known:
    link = HttpClient(url, Deadlines(), api_key)
    try:
        answer = await link.ask("/v1/models")
    finally:
        await link.aclose()
    if answer.away:
        raise link.outage(answer)
    body: Any = answer.body
    try:
        owner: str | None = body["data"][0]["owned_by"]
    except (KeyError, TypeError, IndexError):
        owner = None
    if owner == "vllm" or owner == "sglang":
        return owner
    if owner == "tinker-claw":
        raise ConfigError(f"{url} is a gateway of this project; give the address of vLLM or SGLang")
    raise ConfigError(
        f"{url} is neither a vLLM nor an SGLang server, as far as /v1/models says: check the "
        "address."
    )
