"""The prompt of a request.

Rule: the exact extension of the sampled stream where it holds, else a full render. Long text that
is new is encoded in a thread; the rest is done under the turnstile, one request at a time.
"""

from __future__ import annotations

from contextlib import nullcontext

from tinker_claw.gateway.book import Link, exact_digest
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.render import Prompt
from tinker_claw.sessions import last_user_index, without_volatile
from tinker_claw.wire import ChatRequest


async def prompt_for(
    deps: GatewayDeps, request: ChatRequest, link: Link | None, *, forget: bool = False
) -> Prompt:
    """Render a request that goes on from `link`.

    Args:
        forget: nothing that was new in it stays in memory.

    Raises:
        RequestError: the model's chat format refuses these messages.
    """
    async with deps.turnstile:
        extended = _extended(deps, request, link)
        if extended is not None:
            return extended
        layout = deps.renderer.lay_out(
            request.messages,
            request.tools,
            hint_message=last_user_index(request.messages),
            switches=request.switches,
        )
    with layout.forgetting() if forget else nullcontext():
        await layout.prepare()
        async with deps.turnstile:
            return layout.prompt()


def _extended(deps: GatewayDeps, request: ChatRequest, link: Link | None) -> Prompt | None:
    """None: the sampled stream does not begin this prompt."""
    if link is None or link.stream is None:
        return None
    messages, tools, switches = request.messages, request.tools, request.switches
    reply_at = len(without_volatile(messages)) - len(link.new) - 1
    if exact_digest(messages[:reply_at], tools, switches) != link.stream.exact:
        return None
    first_new = reply_at + 1
    at = last_user_index(messages)
    said_since = at is not None and at >= first_new
    extended = deps.renderer.extend(
        link.stream.prompt,
        link.stream.tokens,
        messages[first_new:],
        tools,
        hint_message=at - first_new if at is not None and said_since else None,
        switches=switches,
    )
    if extended is None or said_since:
        return extended
    return Prompt(extended.tokens, link.stream.hint_at)
