"""Records of a request. Who asks (`Identity`) is in its place in a conversation (`Place`); that and
its `Prompt` are in the `ServedTurn`, which the ledger keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any

from tinker_claw.turn_state import TurnRefusal
from tinker_claw.types import Attempt, Completion, Images, Kind, LessonBlock, Piece, Writer

OPENING = "opening:"
"""How the key of a session begins that is named by its first messages."""
SIDE_KEY = "side calls without a session"


class RequestKind(StrEnum):
    """Purpose of a request. Main turns (`kind`) may be trained on, but for a verdict."""

    USER = "user turn"
    TOOL = "tool loop"
    RETRY = "retry"
    REASK = "re-ask"
    CLIENT = "plain request"
    """Turn of a client that does not identify itself."""
    VERDICT = "verdict"
    """The user only rates the reply before: no reply to that was asked for, so none is right or
    wrong."""
    RECAP = "recap"
    TITLE = "title"
    COMPACTION = "compaction"
    FLUSH = "memory flush"
    HEARTBEAT = "heartbeat"
    CRON = "cron"
    """Cron job in the main session."""
    ALONE = "isolated cron"
    SUBAGENT = "subagent"
    ANNOUNCEMENT = "announcement"
    """Message from another session, as a rule the result of a subagent."""
    AUTOMATED = "automated"
    """A prompt that nobody typed, of no kind that is known here."""
    NUDGE = "nudge"
    """The harness asks the model to go on; nobody has said anything since its last reply."""
    UTILITY = "utility"
    """A single call beside the conversation, as for a commit message."""

    @property
    def kind(self) -> Kind:
        return Kind.MAIN if self in _MAIN else Kind.SIDE


_MAIN = frozenset(
    {
        RequestKind.USER,
        RequestKind.TOOL,
        RequestKind.RETRY,
        RequestKind.REASK,
        RequestKind.CLIENT,
        RequestKind.VERDICT,
    }
)


class Belongs(StrEnum):
    """Whose the words in a session are."""

    OWNER = "owner"
    """The owner's: nobody else writes there, unless the agent names a sender."""
    SENDER = "sender"
    """The sender's, whom the agent names with every message."""
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Surface:
    """Surface on which a conversation takes place, as the agent's own code names it."""

    belongs: Belongs = Belongs.OWNER
    because: str = ""
    """Why it is nobody's."""
    channel: str | None = None
    """The chat service; None: not known, or none."""
    group: bool = False
    local: bool = False
    """An agent on its owner's machine, into whose messages nobody else writes."""
    listed: bool = True
    """The agent is one that this program knows, or has no system prompt."""
    alone: str = ""
    """The agent's name in `owners`, where its owner may say that nobody else can reach it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a request: its session, its purpose, and whether it may be trained on."""

    key: str
    """Names the session, within its user."""
    kind: Kind
    reason: str
    """Why this session and this kind; none of the user's words."""
    request_kind: RequestKind
    trace: str | None = None
    """Trace id of one run of the agent, as a rule one user turn; None: the client sent none."""
    by_trace: bool = False
    """The session is that of the run with this trace, where one is known, and else `key`."""
    done: bool = False
    """The client said that the session ends with this turn."""
    attempt: Attempt | None = None
    """Task and group that a main turn's session attempts; None: the client names none."""
    surface: Surface = field(default_factory=Surface)
    """Where the conversation takes place."""
    client: str = ""
    """The agent's program: its name, or how its User-Agent begins."""

    @property
    def has_own_name(self) -> bool:
        """The key is the client's name for the session; no other session has it."""
        return self.key != SIDE_KEY and not self.key.startswith(OPENING)

    @property
    def episode(self) -> bool:
        """The session is an agent's with its environment."""
        return self.attempt is not None and self.attempt.episode


@dataclass(frozen=True, slots=True)
class Place:
    """A request as a part of its conversation; a private one has no more than its identity."""

    identity: Identity
    session_id: int = 0
    """Its session in the ledger, which does not know the one of a private request."""
    history: tuple[str, ...] = ()
    """Digests of the messages as later requests will show them."""
    text: str = ""
    """Last words that were said to the agent, redacted."""
    holds_secret: bool = False
    """Whether a secret stood in the prompt before anybody spoke."""
    lost: bool = False
    """What the user said could not be tied to a reply, although a turn waits for its next state."""
    voices: tuple[Piece, ...] = ()
    """New pieces of the request since the last reply, each with its writer."""
    asked_by: Writer = Writer.OWNER
    """Who wrote the request."""
    images_refused: TurnRefusal | None = None
    """Why nothing after its images is trained; None: there are none, or they are trained."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request."""

    tokens: tuple[int, ...]
    hint_at: int | None
    """Index after the content of the message that a hint belongs to; None: not known."""
    begun: int = 0
    """Number of last tokens that begin the reply and are given to the model."""
    lesson_block: LessonBlock | None = None
    """Lessons in it; None: there are none."""
    images: tuple[tuple[int, int], ...] = ()
    """Index of the first token of each image, and how many it takes."""
    extends: int | None = None
    """The turn whose prompt is the beginning of this one; None: none is known."""

    def followed_by(self, begun: Sequence[int]) -> Prompt:
        """Return this prompt followed by the beginning of a reply."""
        return replace(self, tokens=(*self.tokens, *begun), begun=len(begun))

    def telling(self, lessons: Sequence[int], untold: Prompt) -> Prompt:
        """Return this prompt, which holds lessons, with their place. `untold`: without them."""
        ours, theirs = self.tokens, untold.tokens
        at = _common(ours, theirs)
        behind = _common(ours[at:][::-1], theirs[at:][::-1])
        instead = theirs[at : len(theirs) - behind]
        block = LessonBlock(tuple(lessons), at, len(ours) - at - behind, instead)
        return replace(self, lesson_block=block)


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """A request's reply and its figures, as the ledger keeps them."""

    place: Place
    user: str
    version: int
    """The policy version that answered."""
    prompt: Prompt
    completion: Completion
    reply_text: str = ""
    reply_digest: str = ""
    """Digest of the assistant message that the client will send back as history."""
    untrained_because: TurnRefusal | None = None
    response_id: str | None = None
    """The reply's id in the API response."""
    fallback: str | None = None
    """Why a version other than the current one answered; None: the current one did."""
    keeps_tokens: bool = True
    """Whether tokens and text digests are kept; False only counts tokens."""
    images: Images = ()
    """Images in the prompt, kept if the turn may be trained."""
    episode: bool = False
    """Whether an agent ran on its own, with no person waiting."""
    seconds: float = 0.0
    first_token_s: float | None = None
    """Seconds to the first token; None: there was no token."""
    waited_s: float = 0.0
    """Seconds that the request waited for a sampling slot."""

    @property
    def figures(self) -> dict[str, Any]:
        """Its figures, without words of the user."""
        place, who = self.place, self.place.identity
        return {
            "user": self.user,
            "session": place.session_id,
            "kind": who.kind,
            "reason": who.reason,
            "version": self.version,
            "prompt_tokens": len(self.prompt.tokens),
            "cached_tokens": self.completion.cached_tokens,
            "completion_tokens": len(self.completion.tokens),
            "seconds": self.seconds,
            "first_token_s": self.first_token_s,
            "waited_s": self.waited_s,
            "episode": self.episode,
            "lost": place.lost,
        }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two sequences begin with alike."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in alike)
