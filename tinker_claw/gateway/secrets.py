"""Search what clients send for secrets and personal data, and cut them out of what is kept.

Rule: a text is searched once. Every request repeats its history, so results are cached by a hash of
the text.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from threading import Lock
from typing import Any

from cachetools import LRUCache

from tinker_claw.conversation.attribution import Attribute, request_indexes
from tinker_claw.formats.base import GenerationRequest
from tinker_claw.gateway.rounds import ComputeRounds
from tinker_claw.privacy.redact import Redactor, name_digest
from tinker_claw.served import Identity
from tinker_claw.types import Message, Tool, Writer, cached, is_cached

TEXTS = 28_000
"""Texts whose results are cached, in 16 MB."""
_BARE = 6
"""Fewest characters of a secret that is sought without the form in which it stood."""
OF_THE_SYSTEM = "a secret of the system prompt"
_LONG = 20_000
"""Characters that are searched in a thread: on the event loop they would take 10 ms."""
_EACH = 100
"""Characters of a long text that take as long as the search of a short one."""
_Key = tuple[int, int]


class SecretSearch:
    """Search for secrets and personal data, and cache of what was found in which text."""

    def __init__(self, redactor: Redactor, compute: ComputeRounds) -> None:
        self._redactor = redactor
        self._compute = compute
        self._descriptions = LRUCache[_Key, str](TEXTS)
        self._lock = Lock()  # large requests are searched in a thread

    async def search(
        self, request: GenerationRequest, writers_of: Attribute
    ) -> tuple[str | None, tuple[str, ...]] | None:
        """Search a request, much new text in a thread; then wait for a round of the event loop.

        Return None where it holds none; else the description of one in its words, results or tools
        (None: there is none), and the secrets that stand before the conversation. A secret in the
        words keeps this turn and the later ones of its session from being trained. Those before the
        conversation are only redacted: an agent whose workspace has a key in it shows it in every
        prompt.

        Args:
            writers_of: gives every piece of a message its writer.
        """
        new = (m for m in request.messages if not is_cached(self._secret_in_message, m))
        size = sum(_EACH + len(text) for message in new for text in _texts(message))
        tools = bool(request.tools) and not is_cached(self._secret_in_tools, request.tools)
        if tools or size >= _LONG:
            await self._compute.aside(lambda: self.secret_in(request))
        await self._compute.own_round()
        if self.secret_in(request) is None:
            return None
        before, others = _before_the_conversation(request.messages, writers_of)
        each = map(self._redactor.values, filter(self.secret_in_text, before))
        secrets = tuple(dict.fromkeys(value for value in chain(*each) if len(value) >= _BARE))
        texts = (self.secret_in_text(text, secrets) for text in chain(request.stop, others))
        return next(filter(None, texts), None) or self._in_tools(request.tools), secrets

    def secret_in(self, request: GenerationRequest) -> str | None:
        """Describe a secret or personal data in a request; None: there is none."""
        stops = map(self.secret_in_text, request.stop)
        messages = (cached(self._secret_in_message, message) for message in request.messages)
        description = next(filter(None, chain(stops, messages)), None)
        return description or self._in_tools(request.tools)

    def secret_in_text(self, text: str, secrets: Iterable[str] = ()) -> str | None:
        """Describe a secret or personal data in a text; None: there is none.

        Args:
            secrets: those of the system prompt, which may stand in it without their form.
        """
        # Not the text itself: eighty system prompts as keys would fill the cache by themselves.
        # Python's hash has a new key in every process, and is computed once per string object.
        description = self._secret_in((hash(text), len(text)), [text])
        if description is None and any(secret in text for secret in secrets):
            return OF_THE_SYSTEM
        return description

    def redact(self, text: str, secrets: Iterable[str] = ()) -> str:
        """Redact a text so that it may be kept. `secrets`: those of the system prompt."""
        kept = text if self.secret_in_text(text) is None else self._redactor.redact(text)
        return _without(kept, secrets)

    async def redact_any(self, text: str, secrets: Iterable[str] = ()) -> str:
        """Redact a text so that it may be kept; a long one is searched in a thread."""
        if len(text) < _LONG:
            return self.redact(text, secrets)
        redacted = await self._compute.aside(lambda: self._redactor.redact(text))
        return _without(redacted, secrets)

    async def redact_messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with redacted contents, to name a session by."""
        texts = [await self.redact_any(m["content"]) for m in messages]
        return tuple(
            message if text == message["content"] else {**message, "content": text}
            for message, text in zip(messages, texts, strict=True)
        )

    def name(self, name: str) -> str:
        """Return a client's name for something as it may be kept, the same for the same name."""
        return name if self.secret_in_text(name) is None else name_digest(name)

    def identity(self, identity: Identity, headers: Mapping[str, str]) -> Identity:
        """Return an identity that may be kept: without secrets in what the client names."""
        name, attempt, surface = self.name, identity.attempt, identity.surface
        # The program's name is a piece of the header, which may be cut within a secret.
        program = self.secret_in_text(headers.get("user-agent", ""))
        return replace(
            identity,
            key=name(identity.key),
            reason=self.redact(identity.reason),
            attempt=attempt
            and replace(
                attempt,
                task=attempt.task and name(attempt.task),
                group=attempt.group and name(attempt.group),
            ),
            surface=replace(
                surface,
                because=self.redact(surface.because),
                channel=surface.channel and name(surface.channel),
            ),
            client=identity.client if program is None else "",
        )

    def _secret_in_message(self, message: Message) -> str | None:
        return next(filter(None, map(self.secret_in_text, _texts(message))), None)

    def _in_tools(self, tools: Sequence[Tool]) -> str | None:
        return cached(self._secret_in_tools, tools) if tools else None

    def _secret_in_tools(self, tools: Sequence[Tool]) -> str | None:
        # This takes a tenth of what JSON takes.
        packed = marshal.dumps([dict(tool) for tool in tools], 2)
        return self._secret_in((hash(packed), len(packed)), _strings(tools))

    def _secret_in(self, key: _Key, texts: Iterable[str]) -> str | None:
        with self._lock:
            cached_description = self._descriptions.get(key)
        if cached_description is not None:
            return cached_description or None
        description = next(filter(None, map(self._redactor.holds, texts)), "")
        with self._lock:
            self._descriptions[key] = description
        return description or None


def _without(text: str, secrets: Iterable[str]) -> str:
    """Return a text in which known secrets are cut out."""
    for secret in secrets:
        text = text.replace(secret, f"[redacted: {OF_THE_SYSTEM}]")
    return text


def _before_the_conversation(
    messages: Sequence[Message], writers_of: Attribute
) -> tuple[list[str], list[str]]:
    """Return the texts that stand before the conversation, and all others."""
    before, others, opening = list[str](), list[str](), True
    first = next(iter(request_indexes(messages)), 0)
    for at, message in enumerate(messages):
        opening = opening and message["role"] in ("system", "user") and at <= first
        if not opening:
            others += _texts(message)
        elif message["role"] == "system":
            before.append(message["content"])
        else:
            rest = message["content"]
            for piece in writers_of(message):
                if piece.writer is Writer.HARNESS:
                    before.append(piece.text)
                    rest = rest.replace(piece.text, "\n", 1)
            others.append(rest)
    return before, others


def _texts(message: Message) -> Iterator[str]:
    yield message["content"]
    if thought := message.get("reasoning_content"):
        yield thought
    for call in message.get("tool_calls", ()):
        yield call["function"]["arguments"]


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in a value, names included; with a stack, because tools may be deep."""
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
