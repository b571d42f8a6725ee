"""What a wire format is, and the neutral records on its inner side.

Rule: a format is one class. It alone knows paths, keys, fields, events and errors of its clients;
all behind it sees a `GenerationRequest` and gives back deltas and a `FinishedReply`. Formats do no
I/O and know nothing of the model: what depends on that is judged behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import msgspec

from tinker_claw.errors import RequestError
from tinker_claw.types import Attempt, Delta, Message, Reply, Tool

Json = dict[str, Any]

Finish = Literal["stop", "stop string", "length", "calls"]
"""Why a reply ended: the model ended it, the request's stop string did, there was no room for more,
or the model waits for what it has called."""


class Joined(str):
    """Text that came in several parts. To the model it is one; the agent's own words may be a part.

    `starts`: where each part begins.
    """

    __slots__ = ("starts",)

    starts: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[str]) -> Joined:
        """Without a separator, as the renderers join them."""
        joined = cls("".join(parts))
        joined.starts = (0, *accumulate(len(part) for part in parts[:-1]))
        return joined


def parts_of(text: str) -> list[str]:
    """As the client sent them; a string is one part."""
    if not isinstance(text, Joined):
        return [text]
    return [text[begin:end] for begin, end in pairwise((*text.starts, len(text)))]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that can be honoured in full, as far as that does not depend on the model."""

    model: str
    messages: tuple[Message, ...]
    """At least one. Whatever a format keeps outside of its messages (a system text) stands here."""
    tools: tuple[Tool, ...] = ()
    """Those that the model is shown; empty also where the client allows no call."""
    may_call: bool = True
    """False: the client allows no call, and whatever looks like one is text."""
    must_call: tuple[str, ...] = ()
    """Names of tools: the reply is begun for the model, and calls one of them; (): it may do
    otherwise."""
    one_call: bool = False
    """The reply ends before a second call."""
    stream: bool = False
    wants_usage: bool = False
    """The client has asked that a stream should end with the counts of tokens."""
    max_tokens: int | None = None
    """None: the client set no limit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """The reply's text ends before the first of these."""
    schema: tuple[str, str] | None = None
    """JSON Schema that the reply's text must fit, as JSON, and the field where it stands."""
    top_logprobs: int | None = None
    """So many of the likeliest tokens are told beside each token of the text, with logprobs; None:
    no logprobs are told."""
    choices: int = 1
    """Replies that are drawn."""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the client says to the model's chat template, enable_thinking for one."""
    reasoning_effort: str | None = None
    """One of EFFORTS; None: the model's default."""
    effort_at: str = "reasoning_effort"
    """The field that says so, for a sentence."""
    switches: tuple[tuple[str, Any], ...] = ()
    """What these two come to with the model's chat template, once that was asked."""
    session: tuple[str, str] | None = None
    """The client's name for the session, and the field where it stands; None: the body has none."""
    follows: str | None = None
    """The name of the reply that it goes on from; None: the history tells."""
    attempt: Attempt = field(default_factory=Attempt)
    """What the body says of task and group."""
    own: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """What the format itself needs again later; nobody else reads it."""


LARGEST_GROUP = 1000
"""Sessions of a group."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Of one request."""

    prompt: int
    completion: int
    cached: int
    """Tokens of the prompt that were not computed again."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a reply's text."""

    text: str
    logprob: float
    """Nats; -9999 for one that was as good as impossible, as OpenAI has it."""
    top: tuple[tuple[str, float], ...] = ()
    """The likeliest tokens in its place, the likeliest first."""


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A reply that is complete and recorded."""

    reply: Reply
    finish: Finish
    tokens: TokenCounts
    version: int
    """The policy version that has answered."""
    stop_string: str | None = None
    """Which of the request's it ended before."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of its text; None: nobody has asked."""
    others: tuple[FinishedReply, ...] = ()
    """Where several replies were asked for, the further ones."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known of a reply before it begins."""

    version: int
    """The policy version that is asked; another one may answer."""
    prompt_tokens: int
    created: int
    """Unix time, seconds."""


class ReplyWriter(Protocol):
    """One reply on its way out: either `whole`, or `begin`, `deltas` ... and `end` or `error`."""

    id: str
    """Names the reply to its client, and in the header X-Request-Id."""

    def whole(self, done: FinishedReply) -> Json:
        """The reply as one object."""
        ...

    def begin(self) -> bytes:
        """The first events of a stream."""
        ...

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        """The events of these pieces; `version` answers from here on."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life that clients of this format count as one."""
        ...

    def end(self, done: FinishedReply) -> bytes:
        """The last events of a stream that went well."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The last events of a stream that broke off: no client takes the fragment for a reply."""
        ...


Purpose = Literal["turn", "count", "models", "model"]
"""What a route is for: a body comes in and a reply goes out; or the number of its prompt's tokens,
and nothing is sampled or kept; the list of what is served; one of them, whose path ends in
{name:path}."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path that clients of a format call."""

    method: str
    path: str
    purpose: Purpose


class Format(ABC):
    """How one kind of client speaks."""

    about: str
    """What is spoken, and how a client is set up for it; for those who call another address."""
    routes: Sequence[Route]
    media_type = "text/event-stream"
    """Of a streamed reply."""
    body_types: Sequence[str] = ()
    """Content types of bodies that are read besides JSON: what clients send that name none."""
    key_place = "Authorization: Bearer"
    """Where clients put their key, for a sentence."""

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request is one of this format's clients', by its path or its headers.

        Asked where several formats have a path, or none has it. Whatever nobody claims is for the
        first format.
        """
        return any(route.path == path for route in self.routes)

    def key(self, headers: Mapping[str, str]) -> str:
        """The caller's key; "" where none was sent. `headers`: names in lower case."""
        return bearer(headers)

    @abstractmethod
    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        """Read a body that came by this route from this user. May be called in a thread.

        Raises:
            RequestError: names the first field that is malformed or cannot be honoured.
        """

    def remember(self, request: GenerationRequest, user: str) -> None:  # noqa: B027 - optional
        """What this user may send again; called of requests of which something may be kept."""

    def forget(self) -> None:  # noqa: B027 - optional
        """Remember nothing of earlier requests."""

    @abstractmethod
    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        """What writes the reply to a request."""

    @abstractmethod
    def error(self, error: RequestError) -> Json:
        """The body of an answer that is an error. Its codes are ours; see `RequestError`."""

    def counted(self, tokens: int) -> Json:
        """The answer of a `count` route."""
        raise NotImplementedError

    def models(self, names: Sequence[str], since: int) -> Json:
        """The answer of a `models` route. `since`: Unix time."""
        raise NotImplementedError

    def model(self, name: str, since: int) -> Json:
        """The answer of a `model` route."""
        raise NotImplementedError


def data(fields: Json) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event whose data are a JSON object of its type."""
    return f"event: {kind}\n".encode() + data({"type": kind} | fields)


def bearer(headers: Mapping[str, str]) -> str:
    """The key in an Authorization header; "" where there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
