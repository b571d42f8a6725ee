"""Interface of one inference server, whatever its dialect.

Rule: adapters are known by name, and a name is never loaded with other weights: these servers key
their prefix caches on the name, and would answer from the cache of the old ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tinker_claw.errors import OutageError
from tinker_claw.types import Completion, SamplingParams, TokenChunk, Tokens

if TYPE_CHECKING:
    from local_gpu.sample.hang import Pulse


NEVER_LOADED: Final = "tinker-claw-never-loaded"
"""Name for a trial unload: a server that takes no adapters while it runs refuses it."""


class Busy(OutageError):
    """The server is well but at its limit (429): another may answer, or this one later."""


class NotLoaded(OutageError):
    """The server is well but lacks the adapter, as it was restarted. Load it there, or ask
    another."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server by itself."""

    model: str
    """Base model's name, for requests without an adapter."""
    context_tokens: int
    """Longest prompt and reply together, in tokens."""
    adapters: frozenset[str]
    """Names of the loaded adapters."""


class InferenceServer(Protocol):
    """One server. Every call has a deadline.

    Raises (all calls):
        OutageError: it does not answer, too late, or with 5xx: another server may do it.
        NotLoaded: such an outage, of one adapter only.
        SamplerError, RequestError: it refuses what was asked, or its answer does not add up.
        ContextLengthError: prompt and reply do not fit.
    """

    url: str
    pulse: Pulse
    constrains: bool
    """Whether sampling can be constrained to a JSON schema."""

    async def info(self) -> ServerInfo:
        """Ask the server for its description; also the health check."""
        ...

    async def progress(self) -> str:
        """A string that changes whenever the engine has done something; "" if the server does not
        tell."""
        ...

    async def sees(self, image_token: int) -> bool:
        """Try whether the server takes an image, and keeps this token for it."""
        ...

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter; loading a loaded name again changes nothing.

        Raises:
            BackendError: it cannot be loaded; the server goes on as before.
        """
        ...

    async def unload(self, name: str) -> None:
        """Unload an adapter; a missing one is no error."""
        ...

    def stream(
        self, name: str | None, prompt: Tokens, params: SamplingParams
    ) -> AsyncIterator[TokenChunk]:
        """Sample under an adapter, or the base (None); closing the iterator aborts it there."""
        ...

    async def sample(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int
    ) -> list[Completion]:
        """n completions in one request; with a seed, completion i is drawn with seed + i."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
