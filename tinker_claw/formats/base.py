"""Interface of a wire format, and the neutral records on its inner side.

Rule: a format is one class. It alone knows paths, keys, fields, events and errors of its clients;
the code behind it gets a `GenerationRequest` and returns deltas and a `FinishedReply`. Formats do
no I/O and know nothing of the model: what depends on that is checked later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from tinker_claw.errors import RequestError
from tinker_claw.types import Delta, Message, Reply, Tool

Json = dict[str, Any]

Finish = Literal["stop", "stop string", "length", "calls"]
"""Why a reply ended: the model ended it, the request's stop string did, there was no room for more,
or the model waits for the results of its calls."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that can be honoured in full, as far as that does not depend on the model."""

    model: str
    messages: tuple[Message, ...]
    """At least one. What a format keeps outside of its messages (a system text) is included."""
    places: tuple[str, ...] = field(default=(), compare=False)
    """Where each message stands in the body; (): as messages[i]."""
    tools: tuple[Tool, ...] = ()
    """Tools that the model is shown; empty also where the client allows no call."""
    may_call: bool = True
    """False: the client allows no call, and whatever looks like one is text."""
    must_call: tuple[str, ...] = ()
    """Names of tools: the reply is begun for the model, and calls one of them; (): no call is
    required."""
    one_call: bool = False
    """The reply ends before a second call."""
    stream: bool = False
    wants_usage: bool = False
    """The client asked for token counts at the end of a stream."""
    max_tokens: int | None = None
    """None: the client set no limit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """The reply's text ends before the first of these."""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The client's arguments to the model's chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """One of EFFORTS; None: the model's default."""
    effort_at: str = "reasoning_effort"
    """Name of the field that sets it, for error messages."""
    switches: tuple[tuple[str, Any], ...] = ()
    """Arguments of the chat template for `template` and `reasoning_effort`, once resolved."""
    session: tuple[str, str] | None = None
    """The client's name for the session, and the field that holds it; None: the body has none."""
    left_out: tuple[str, ...] = ()
    """Sentences about what was asked for and is left out, such as a service's own tools."""
    own: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """Data of the format's own, which nothing else reads."""

    def place(self, at: int) -> str:
        """Return the place of a message in the body. `at`: its index."""
        return self.places[at] if self.places else f"messages[{at}]"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of one request."""

    prompt: int
    completion: int
    cached: int
    """Tokens of the prompt that were not computed again."""
    thought: int = 0
    """Tokens of the completion that are thinking, without its marks."""


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A reply that is complete and recorded."""

    reply: Reply
    finish: Finish
    tokens: TokenCounts
    version: int
    """The policy version that has answered."""
    stop_string: str | None = None
    """The request's stop string that ended the reply; None: none did."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Metadata of a reply that is known before it begins."""

    version: int
    """The policy version that is asked; a stand-in may answer."""
    prompt_tokens: int
    created: int
    """Unix time, seconds."""


class ReplyWriter(Protocol):
    """Writer of one reply: either `whole`, or `begin`, `deltas` ... and `end` or `error`."""

    id: str
    """Id of the reply for its client, also in the header X-Request-Id."""

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
        """Keep-alive event that clients of this format accept."""
        ...

    def end(self, done: FinishedReply) -> bytes:
        """The last events of a stream that went well."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The last events of a stream that broke off: no client takes the fragment for a reply."""
        ...


Purpose = Literal["turn", "count", "models", "model"]
"""Purpose of a route. `turn`: reply to a body; `count`: count the tokens of its prompt, and sample
and keep nothing; `models`: list the served models; `model`: describe one of them, whose path ends
in {name:path}."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path that clients of a format call."""

    method: str
    path: str
    purpose: Purpose


class WireFormat(ABC):
    """Wire format of one kind of client."""

    about: str
    """Name of the protocol and how to set up a client, shown to callers of unknown paths."""
    routes: Sequence[Route]
    media_type = "text/event-stream"
    """Content type of a streamed reply."""
    body_types: Sequence[str] = ()
    """Content types of bodies that are read besides JSON: the defaults of clients that set none."""
    key_header = "Authorization: Bearer"
    """Header in which clients send their key, for error messages."""

    def claims(self, path: str, headers: Mapping[str, str]) -> bool:
        """Return whether a request comes from this format's clients, by its path or its headers.

        Called where several formats have a path, or none has it. A request that none claims goes to
        the first format.
        """
        return any(route.path == path for route in self.routes)

    def keys(self, headers: Mapping[str, str]) -> Sequence[str]:
        """The caller's keys, of which one must be right. `headers`: names in lower case."""
        return (bearer(headers),)

    @abstractmethod
    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        """Read a body that came by this route from this user. May be called in a thread.

        Raises:
            RequestError: names the first field that is malformed or cannot be honoured.
        """

    def remember(self, request: GenerationRequest, user: str) -> None:  # noqa: B027 - optional
        """Cache what this user may send again; called only for requests that may be kept."""

    def forget(self) -> None:  # noqa: B027 - optional
        """Forget all earlier requests."""

    @abstractmethod
    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        """Return the writer of the reply to a request."""

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
