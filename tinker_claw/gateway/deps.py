"""Dependencies of the gateway, and its memory of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from tinker_claw.billing.budget import Spending
from tinker_claw.config.settings import Gateway
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.fallback import ServingDeps
from tinker_claw.gateway.index import ConversationIndex
from tinker_claw.gateway.lessons import LessonChooser
from tinker_claw.gateway.owners import Owners
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.gateway.rounds import ComputeRounds
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import PolicyHolder
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import Capabilities

_MOST_LEFT_OUT = 30
"""Most kinds of things left out that are named: clients may call them anything."""


HALF = "half an emoji, or the like, which was read as U+FFFD"


class UnmetRequests:
    """Features that requests asked for in vain: each kind once in the log, and in `status`."""

    def __init__(self, event: str = "request.left_out") -> None:
        self._event = event
        self.kinds: dict[str, str] = {}
        """Sentence about each, by its kind."""

    def note(self, sentences: Sequence[str]) -> None:
        """Note what a request asked for. `sentences`: begin with the kind, before a blank."""
        for sentence in sentences:
            kind = sentence.partition(" ")[0]
            if kind not in self.kinds and len(self.kinds) < _MOST_LEFT_OUT:
                self.kinds[kind] = sentence
                log.warning(self._event, what=sentence)


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """The gateway's dependencies, and its memory of sessions."""

    settings: Gateway
    keys: Keys
    served_name: str
    """The model's name in requests; `<served_name>@v8` asks for version 8."""
    renderer: Renderer
    can: Capabilities
    student_topk: int
    """Candidates to capture per token of a trainable turn; 0: the method needs none."""
    policy: PolicyHolder
    serving: ServingDeps
    ledger: Ledger
    index: ConversationIndex
    secrets: SecretSearch
    privacy: SessionPrivacy
    owners: Owners
    compute: ComputeRounds
    """Runs what requests compute, one request per round of the event loop."""
    spending: Spending
    telemetry: Telemetry
    """Sees every turn: figures only, no text."""
    wake_judging: Callable[[], None]
    """Called when a turn got its next state or its verdict, and can be judged or scored."""
    lessons: LessonChooser | None = None
    """None: nothing is told in prompts."""
    left_out: UnmetRequests = field(default_factory=UnmetRequests)
    unfit: UnmetRequests = field(default_factory=lambda: UnmetRequests("request.unfit"))
    """Clients whose own temperature keeps their replies from being trained."""
    refused: LRUCache[tuple[str, str], int] = field(default_factory=lambda: LRUCache(4096))
    """Hash of the message in which something was refused first, by user and its digest."""
