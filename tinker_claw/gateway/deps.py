"""What the gateway needs, handed in by the wirer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinker_claw.billing.budget import Spending
from tinker_claw.config.settings import Gateway, User
from tinker_claw.gateway.fallback import RETRIES, STAND_IN_S, WAITS, StandIns, nobody
from tinker_claw.gateway.limits import ComputeLock
from tinker_claw.ledger.turns import TurnTable
from tinker_claw.outages import Outages
from tinker_claw.policy import PolicyHolder, Sampler
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import SECRETS
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff


class TurnObserver(Protocol):
    """Is told of every captured turn: figures only, no text."""

    def turn_captured(
        self,
        *,
        user: str,
        session: int,
        turn: int,
        kind: str,
        reason: str,
        version: int,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        seconds: float,
        first_token_s: float | None,
        usd: float | None,
        lost: str | None,
        misfit: bool,
    ) -> None:
        """
        Args:
            usd: what it cost; None where nothing was billed, or the price is not known.
            lost: why it is the next state of no turn, although one waits for it.
            misfit: a call breaks the schema of a strict tool.
        """
        ...

    def turn_forgotten(self, *, prompt_tokens: int, completion_tokens: int) -> None:
        """A private turn was served."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """Everything outside the gateway that it touches."""

    settings: Gateway
    served_name: str
    """The model's name in requests; `<served_name>@v8` asks for version 8."""
    policy: PolicyHolder
    open_version: Callable[[int], Awaitable[Sampler]]
    """Sampler of an earlier version. Raises LookupError when there is none of that number."""
    turns: TurnTable
    spending: Spending
    renderer: Renderer
    context_tokens: int
    student_topk: int
    """Candidates to capture per token of a trainable turn; 0: the method needs none."""
    on_next_state: Callable[[], None]
    """A turn has got its next state: there is something to judge."""
    health: Callable[[], Mapping[str, Any]]
    metrics: Callable[[], bytes]
    """Prometheus' text format."""
    observer: TurnObserver
    outages: Outages
    """Where the gateway says whether the service answers."""
    redactor: Redactor = field(default_factory=lambda: Redactor([SECRETS]))
    """What is not kept of texts."""
    waits: Backoff = WAITS
    """Between the attempts of one request while the service is away."""
    retries: Backoff = RETRIES
    """Between the attempts of one request where the sampler failed."""
    turnstile: ComputeLock = field(default_factory=ComputeLock)
    """For what requests compute."""
    stand_ins: StandIns = nobody
    """Who answers in place of a version that cannot."""
    stand_in_s: float = STAND_IN_S
    """How long a stand-in may take to its first token while the service is away, seconds."""
    users: Sequence[User] = ()
    """Who may call, each with a key of his own, besides whoever has the settings' one."""
