"""Who answers when the version that should answer cannot.

Rule: first the nearest earlier version with other weights, then the frozen base model. Nobody
stands in for a version that a request has asked for by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tinker_claw.policy import Sampler
from tinker_claw.types import PolicyVersion

STAND_IN_S = 30.0
"""While the service is away, a stand-in that gives no token for so long is given up."""
BASE_VERSION = 0
"""Its adapter changes nothing, so what the base model samples is what version 0 samples."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """Weights that may answer in place of others."""

    version: int
    open: Callable[[], Awaitable[Sampler]]
    """Raises BackendError or LookupError where they cannot be had."""
    base: bool = False
    """The frozen base model, not the sampler that was published of version 0."""

    @property
    def name(self) -> str:
        return "the base model" if self.base else f"v{self.version}"


StandIns = Callable[[int], Sequence[StandIn]]
"""Those for a version, in the order in which they are tried."""


def nobody(version: int) -> Sequence[StandIn]:
    """No version is stood in for."""
    return ()


def lineage(
    known: Callable[[int], PolicyVersion | None],
    open_version: Callable[[int], Awaitable[Sampler]],
    base: Sampler,
) -> StandIns:
    """Stand-ins from a run's own versions. `known`: a version's record, by its id."""

    async def open_base() -> Sampler:
        return base

    def stand_ins(version: int) -> Sequence[StandIn]:
        earlier = _earlier(known, version)
        found = [StandIn(BASE_VERSION, open_base, base=True)]
        if earlier is not None:
            found.insert(0, StandIn(earlier.id, lambda: open_version(earlier.id)))
        return found

    return stand_ins


def _earlier(known: Callable[[int], PolicyVersion | None], version: int) -> PolicyVersion | None:
    """The nearest ancestor with a sampler of its own: a restart repeats its parent's."""
    failed = known(version)
    ancestor = failed
    while failed and ancestor and ancestor.sampler_ref == failed.sampler_ref:
        ancestor = known(ancestor.parent) if ancestor.parent is not None else None
    return ancestor
