"""The prompt of a request: the exact extension of the sampled stream where that holds, else a full
render, lessons included.

Rule: nothing is sampled and nothing is written here; what cannot be a prompt is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tinker_claw.conversation.attribution import last_request_index
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import GenerationRequest
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.index import Continuation
from tinker_claw.gateway.limits import no_room
from tinker_claw.images import images_in
from tinker_claw.served import Prompt
from tinker_claw.types import Message, cached


async def build_prompt(
    deps: GatewayDeps,
    request: GenerationRequest,
    link: Continuation | None,
    *,
    lesson_request: GenerationRequest | None = None,
    lessons: Sequence[int] = (),
    forget: bool,
    large: bool,
) -> Prompt:
    """Build the prompt: the request, then the first tokens of a reply that must be a call. The
    request is the exact extension of the sampled stream where that holds, else a full render.

    Args:
        lesson_request: the request with lessons in it; None: there are none.
        lessons: ids of those lessons.
        forget: keep nothing of it in memory that was new.
        large: it is built in a thread.

    Raises:
        RequestError: the chat template refuses these messages, or it is not known how such a
            reply begins.
    """
    begun = _begun(deps, request) if request.must_call else ()
    await deps.compute.own_round()
    extend = partial(_extended, deps, lesson_request or request, link)
    extended = await deps.compute.aside(extend, when=large)
    render = partial(_rendered, deps, forget=forget, large=large)
    prompt = extended or await render(request)
    if extended is None and lesson_request is not None:
        longer = await render(lesson_request)
        if len(longer.tokens) < deps.can.context_tokens:
            prompt = longer.telling(lessons, prompt)
    return prompt.followed_by(begun) if begun else prompt


async def _rendered(
    deps: GatewayDeps, request: GenerationRequest, *, forget: bool, large: bool
) -> Prompt:
    return await deps.renderer.prompt_aside(
        request.messages,
        request.tools,
        hint_message=last_request_index(request.messages),
        switches=request.switches,
        remembers=not forget,
        large=large,
    )


def _begun(deps: GatewayDeps, request: GenerationRequest) -> tuple[int, ...]:
    """The part of the reply that is given to the model."""
    begun = deps.renderer.begin_call(request.must_call, request.switches)
    if begun is None:
        raise RequestError(
            "tool_choice: no call can be forced on this model, since how its chat format writes "
            "calls, or tools of such names, is not known; send auto.",
            param="tool_choice",
        )
    return begun


async def refuse_without_room(deps: GatewayDeps, request: GenerationRequest) -> None:
    """Raise RequestError if system prompt and tools leave no room for a conversation."""
    first = [m for m in request.messages if m["role"] == "system"]
    nothing: Message = {"role": "user", "content": ""}
    prompt = await deps.renderer.prompt_aside(
        [*first, nothing],
        request.tools,
        switches=request.switches,
        remembers=False,  # this request may be private
        large=True,
    )
    if len(prompt.tokens) >= deps.can.context_tokens:
        raise no_room(deps.can.context_tokens)


def _extended(
    deps: GatewayDeps, request: GenerationRequest, link: Continuation | None
) -> Prompt | None:
    """Extend the sampled stream; None if it does not begin this prompt."""
    if link is None or link.stream is None:
        return None
    stream, before = link.stream, link.stream.prompt
    messages, tools, switches = request.messages, request.tools, request.switches
    first_new = len(messages) - len(new_messages(messages))
    if exact_digest(messages[: first_new - 1], tools, switches) != stream.exact:
        return None
    if len(images_in(messages[:first_new])) != len(before.images):
        return None  # a text looks like the line of an image
    at = last_request_index(messages)
    said_since = at is not None and at >= first_new
    extended = deps.renderer.extend(
        before.tokens,
        stream.tokens,
        messages[first_new:],
        tools,
        hint_message=at - first_new if at is not None and said_since else None,
        switches=switches,
    )
    if extended is None:
        return None
    begins = extended.tokens[: len(before.tokens)] == before.tokens
    return replace(
        extended,
        hint_at=extended.hint_at if said_since else before.hint_at,
        lesson_block=before.lesson_block,
        images=(*before.images, *extended.images),
        extends=link.turn_id if begins else None,
    )


def new_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages since the last reply."""
    for at in range(len(messages), 0, -1):
        if messages[at - 1]["role"] == "assistant":
            return messages[at:]
    return messages


def exact_digest(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    switches: Sequence[tuple[str, Any]],
) -> str:
    """Digest of everything that a prompt is rendered from, without any normalisation."""
    digest = hashlib.sha256(json.dumps([len(messages), list(switches)]).encode())
    for message in messages:
        digest.update(cached(_written, message))
    digest.update(cached(_written, tools))
    return digest.hexdigest()


def _written(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()
