"""Read the body of a request into what the model can be shown.

Rule: what the chat template would leave out is refused by name, never dropped silently. Of images
and other parts only those that the user has just sent are refused; a line stands for the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tinker_claw.conversation.attribution import attached_to, newest_request, read
from tinker_claw.conversation.history import digest
from tinker_claw.errors import ContextLengthError, RequestError
from tinker_claw.formats.base import GenerationRequest, Route, WireFormat
from tinker_claw.formats.body import shorten_name, without_halves
from tinker_claw.formats.parts import READS_TEXT, UNREAD, without_images
from tinker_claw.gateway.deps import HALF, GatewayDeps
from tinker_claw.gateway.limits import ALWAYS_READ, CHARS_PER_TOKEN, Caller, hopeless
from tinker_claw.gateway.privacy import note_marks
from tinker_claw.gateway.prompt import exact_digest
from tinker_claw.images import Image, images_in, parts_of
from tinker_claw.render.format import ASKED, SOUGHT
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Message, Tool, cached, is_cached

_LARGE = 200_000
"""Bytes of a body that is read and rendered in a thread: on the event loop it would take 5 ms."""
_MANY = 1_000
"""Objects in a body (messages, parts of messages, calls, tools) from which on it is read in a
thread. Agents' bodies of 50 kB have some 130."""
_PLACE = re.compile(r"\w+\[\d+\]")
"""Where a message stands in a body."""
_UNREAD = 100_000
"""Characters of new messages that are read in a thread: on the event loop they would take 50 ms."""
_EACH = 300
"""Characters of a long text that take as long as a part of a message."""


BEGUN = (
    "prefill: a reply is not begun for the model, so another message follows the assistant's; to "
    "begin a call, name the tool in tool_choice"
)
"""Note on a history that ends with the assistant."""


def is_large(body: bytes) -> bool:
    """Return whether reading or rendering a request takes so long that a thread does it."""
    return len(body) >= _LARGE or body.count(b"{") >= _MANY


async def parse(
    deps: GatewayDeps, wire: WireFormat, route: Route, body: bytes, caller: Caller
) -> GenerationRequest:
    """The request in a body, with the switches of its prompt.

    Raises:
        RequestError: it is malformed, or the chat template has no place for something in it.
    """

    def parsed() -> tuple[GenerationRequest, bool]:
        whole = without_halves(body)
        incoming = wire.parse(whole, route, caller.user)
        _check_shown(deps.renderer, incoming)
        _refuse_hopeless(incoming, deps.can.context_tokens)
        newest_request(incoming.messages)  # reads the newest messages here, for all that ask later
        return incoming, whole != body

    if is_large(body):
        sent, mended = await deps.compute.aside(parsed)
        await deps.compute.own_round()
    else:
        await deps.compute.own_round()
        sent, mended = parsed()
    begun = [BEGUN] if sent.messages[-1]["role"] == "assistant" else []
    deps.left_out.note((*sent.left_out, *begun, *([HALF] if mended else [])))
    messages, decides = await _look(deps, caller.user, sent), deps.settings.thinking
    switches, overruled = deps.renderer.thinking.switches(
        sent.template, sent.reasoning_effort, sent.effort_at, decides
    )
    if overruled:
        deps.left_out.note([f"thinking: as --thinking {decides} says, whatever a client asks"])
    request = replace(sent, messages=messages, switches=switches)
    await _read_ahead(deps, request)
    return request


async def _read_ahead(deps: GatewayDeps, request: GenerationRequest) -> None:
    """Read many new messages in a thread, so that all that follows finds them read."""
    new = [message for message in request.messages if not is_cached(digest, message)]
    if sum(map(_reading_costs, new)) < _UNREAD:
        return

    def read_them() -> None:
        for message in new:
            cached(digest, message)
            note_marks(message)
            if message["role"] == "user":
                _ = read(message).odd
        exact_digest(request.messages, request.tools, request.switches)

    await deps.compute.aside(read_them)
    await deps.compute.own_round()


def _reading_costs(message: Message) -> int:
    """Estimate the cost of reading a message, in characters."""
    pieces = len(parts_of(message)) + len(message.get("tool_calls", ()))
    return _EACH * pieces + len(message["content"])


async def _look(deps: GatewayDeps, user: str, request: GenerationRequest) -> tuple[Message, ...]:
    """Return the messages as the model is shown them: with a line in place of each image that it
    cannot be shown. Images are decoded outside the event loop.

    Raises:
        RequestError: the user has just sent what cannot be shown.
    """
    messages = request.messages
    newest = newest_request(messages)

    def refuse(digest: str, error: RequestError) -> None:
        if newest is not None and _just_sent(deps, user, digest, newest):
            at = next(n for n in reversed(range(len(messages))) if messages[n] is newest)
            raise _moved(error, request.place(at))

    for part in attached_to(newest) if newest else ():
        if part.refusal is not None:
            refuse(part.refusal.digest, part.refusal.error)
    images, theirs = images_in(messages), images_in([newest] if newest else [])
    if not images:
        return tuple(messages)
    if (blind := blind_because(deps)) is not None:
        for image in theirs:
            refuse(image.digest, image.wrong(blind))
        return tuple(cached(_unseen, m) if images_in([m]) else m for m in messages)
    unfit = await _unfit(deps, images)
    for image in theirs:
        if image in unfit:
            refuse(image.digest, unfit[image])
    if not unfit:
        return tuple(messages)
    return tuple(
        without_images(m, lambda image: UNREAD if image in unfit else None) if images_in([m]) else m
        for m in messages
    )


def _moved(error: RequestError, place: str) -> RequestError:
    """An error about a part of a message that stands here now. It may have been read, and cached,
    where it stood elsewhere."""
    param = error.param or ""
    before = _PLACE.match(param)
    if before is None:
        return error
    why = str(error).removeprefix(before[0])
    return RequestError(f"{place}{why}", param=f"{place}{param[before.end() :]}")


def _just_sent(deps: GatewayDeps, user: str, digest: str, message: Message) -> bool:
    """Return whether a user sends this with no other message before.

    An agent may put a message that was refused into one with the user's next words, which would be
    refused for ever.
    """
    words = hash(message["content"])
    return deps.refused.setdefault((user, digest), words) == words


async def _unfit(deps: GatewayDeps, images: Sequence[Image]) -> Mapping[Image, RequestError]:
    """Decode images; return those that the model cannot be shown, and why."""
    eyes = deps.renderer.eyes
    assert eyes is not None
    unfit, token_count = dict[Image, RequestError](), 0
    for image in images:  # before one is decoded: there may be many
        try:
            token_count += eyes.tokens(image)
        except RequestError as error:
            unfit[image] = error
    if token_count >= deps.can.context_tokens:
        raise ContextLengthError(token_count, 1, deps.can.context_tokens)

    def decode() -> None:
        for image in images:
            try:
                image.clean()
            except RequestError as error:
                unfit[image] = error

    await deps.compute.aside(decode)
    await deps.compute.own_round()
    return unfit


def _unseen(message: Message) -> Message:
    """A message as a model that reads text only is shown it."""
    return without_images(message, lambda image: READS_TEXT)


def blind_because(deps: GatewayDeps) -> str | None:
    """Return why images cannot be shown to the model, as the rest of a sentence; None: they can."""
    if deps.settings.images == "off":
        return "is an image, and images are switched off here (--images off)"
    if deps.renderer.eyes is None:
        return (
            f"is an image, and {deps.served_name} reads text only: describe it in words, or have "
            "a model served that sees (docs/images.md)"
        )
    if not deps.can.sees:
        return (
            "is an image, and what samples here does not take images yet: docs/images.md says "
            "which samplers do"
        )
    return None


def _refuse_hopeless(request: GenerationRequest, context_tokens: int) -> None:
    """Refuse a prompt that cannot fit before it is rendered, which takes seconds. What the model is
    shown as a line (images, packed documents) is counted as that."""
    most = max(ALWAYS_READ, CHARS_PER_TOKEN * context_tokens)
    chars = sum(map(_said_chars, request.messages))
    if chars > most or cached(_written_chars, request.tools) > most:
        raise hopeless(context_tokens)


def _said_chars(message: Message) -> int:
    calls = message.get("tool_calls", ())
    called = sum(len(call["function"]["arguments"]) for call in calls)
    return CHARS_PER_TOKEN * (1 + len(calls)) + len(message["content"]) + called


def _written_chars(tools: Sequence[Tool]) -> int:
    return len(str(tools))


def _check_shown(renderer: Renderer, request: GenerationRequest) -> None:
    for i, message in enumerate(request.messages):
        role = message["role"]
        if not _shows(renderer, role):
            at = request.place(i)
            if _PLACE.match(at):
                at = f"{at}.role"
            raise RequestError(
                f"{at}: this model's chat format shows no content of messages whose role is "
                f"{shorten_name(role)!r}; put it into the content of a user's.",
                param=at,
            )


@lru_cache(maxsize=64)
def _shows(renderer: Renderer, role: str) -> bool:
    """Return whether a role's content is in the prompt, found by rendering two contents."""
    before = () if role in ("system", "user") else (ASKED, SOUGHT)
    after = (ASKED,) if role == "system" else ()
    both = (
        (*before, {"role": role, "content": text, "tool_call_id": "a1"}, *after)
        for text in ("Ann", "Zoe")
    )
    try:
        return len({renderer.prompt(messages).tokens for messages in both}) > 1
    except RequestError:  # the request's own prompt says what of its content is refused
        return True
