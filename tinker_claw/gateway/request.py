"""Whether this model can do what a request asks of its chat format.

Rule: what the format would leave out is refused by name, never left out in silence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from uuid import uuid4

from tinker_claw.conversation.classify import Identity, identify
from tinker_claw.conversation.history import next_state
from tinker_claw.conversation.index import Continuation, ConversationIndex, exact_digest
from tinker_claw.conversation.openclaw import last_user_index, without_volatile
from tinker_claw.errors import ContextLengthError, OutageError, RequestError
from tinker_claw.formats.body import shown
from tinker_claw.formats.chat import ChatRequest, parse_chat
from tinker_claw.formats.chat_reply import ReplyHead
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.limits import Caller, hopeless
from tinker_claw.gateway.privacy import AFTERWARDS, SessionPrivacy
from tinker_claw.policy import Sampler
from tinker_claw.privacy.marker import Privacy
from tinker_claw.render.format import switches
from tinker_claw.render.prompt_cache import Prompt
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Kind, Lost, Message, SamplingParams


def check_template(renderer: Renderer, request: ChatRequest) -> ChatRequest:
    """The request, with the switches of its prompt.

    Raises:
        RequestError: the chat format has no place for something in it.
    """
    for i, message in enumerate(request.messages):
        # The name of a tool stands in the call that its result answers.
        named = "name" in message and message["role"] != "tool"
        if named and not _shows_names(renderer, message["role"]):
            raise RequestError(
                f"messages[{i}].name: this model's chat format shows no names; "
                "put it into the content.",
                param=f"messages[{i}].name",
            )
    if not request.template and request.reasoning_effort is None:
        return request
    found = switches(renderer.config, request.template, request.reasoning_effort)
    return replace(request, switches=found)


@lru_cache(maxsize=64)
def _shows_names(renderer: Renderer, role: str) -> bool:
    """Whether a message's name makes a difference to the prompt, by trying it."""

    def tokens(said: dict[str, str]) -> tuple[int, ...]:
        asked = {"role": "user", "content": "So?"}
        return renderer.prompt([said, asked] if said["role"] != "user" else [said]).tokens

    said = {"role": role, "content": "Well."}
    try:
        return tokens(said) != tokens({**said, "name": "Zoe"})
    except RequestError:
        return False


# The prompt of a request.
#
# Rule: the exact extension of the sampled stream where it holds, else a full render. Long text
# that
# is new is encoded in a thread; the rest is done under the turnstile, one request at a time.


async def prompt_for(
    deps: GatewayDeps, request: ChatRequest, link: Continuation | None, *, forget: bool = False
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


def _extended(deps: GatewayDeps, request: ChatRequest, link: Continuation | None) -> Prompt | None:
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


# From the body of a request to a job that can be sampled.
#
# Rule: everything that can be refused is refused here, before the first byte of the answer. The
# current policy is read once; the job keeps it.


_LARGE = 200_000
"""Bytes of a body that is read in a thread: on the event loop it would take 5 ms."""
_CHARACTERS_PER_TOKEN = 6
"""Texts have three to five; with more than so many for the whole context the words are counted."""
_NOWHERE = 0
"""The session of a private request, which the ledger does not know."""


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be sampled, captured and sent."""

    caller: Caller
    request: ChatRequest
    identity: Identity
    session_id: int
    version: int
    sampler: Sampler
    prompt: Prompt
    params: SamplingParams
    head: ReplyHead
    started: float
    """time.monotonic() when the request came in, seconds."""
    discretion: SessionPrivacy
    privacy: Privacy
    holds: str | None
    """What there is in the request that must not be kept, for a sentence."""
    said: Sequence[Message]
    """The request's messages as later requests will show them, but for those that are volatile."""
    lost: Lost | None
    """Why what the user said is the next state of no turn, although one waits for it."""

    @property
    def untrained_because(self) -> str | None:
        """Why this turn cannot be trained on, as far as the request tells."""
        if self.identity.kind is Kind.SIDE:
            return f"side turn: {self.identity.reason}"
        if self.identity.done:
            return "X-Session-Done: the session ended with it, so nothing judges it"
        if self.privacy is Privacy.AFTER:
            return AFTERWARDS
        if self.holds is not None:
            return f"holds {self.holds}"
        return self.params.unfit_because()


async def admit(
    deps: GatewayDeps,
    book: ConversationIndex,
    discretion: SessionPrivacy,
    body: bytes,
    headers: Mapping[str, str],
    caller: Caller,
) -> Job:
    """Read a request, attach it to the turn before as its next state, and render its prompt.

    Raises:
        RequestError: it cannot be served as asked.
        BackendError: the version it asks for cannot be opened.
    """
    started = time.monotonic()
    large = len(body) >= _LARGE
    parsed = await deps.turnstile.aside(lambda: parse_chat(body)) if large else None
    async with deps.turnstile:
        request = check_template(deps.renderer, parsed or parse_chat(body))
        identity = identify(request, headers)
    version, sampler, pinned = await _choose(deps, request.model)
    if pinned:
        reason = f"asked for version {version}; {identity.reason}"
        identity = replace(identity, kind=Kind.SIDE, reason=reason)
    main = identity.kind is Kind.MAIN
    async with deps.turnstile:
        privacy = discretion.privacy(caller.user, identity, headers, request)
    if privacy is not Privacy.PRIVATE:
        await discretion.look_at(request)
    async with deps.turnstile:
        session_id, link, holds, lost = _NOWHERE, None, None, None
        said = request.messages
        if privacy is not Privacy.PRIVATE:
            holds = discretion.holds(request)
            if holds is not None and not identity.named:
                opening = discretion.redacted(request)  # of which the key is a digest
                identity = replace(identity, key=identify(opening, headers).key)
            session_id = book.session(caller.user, identity)
            said = book.said(session_id, said)
        if main and session_id != _NOWHERE:
            # What was said in private is not known, and might be taken for something else.
            known = privacy is Privacy.OPEN
            link = book.find(session_id, said, compacted=known)
            lost = book.lost(session_id, said) if link is None and known else None
    if link is not None:
        # Before the prompt: what the user said counts even when it does not fit the context.
        await _attach(deps, discretion, link)
    if len(body) > _CHARACTERS_PER_TOKEN * deps.context_tokens:
        await _refuse_what_cannot_fit(deps, request)
    prompt = await prompt_for(deps, request, link, forget=privacy is Privacy.PRIVATE)
    params = _params(deps, request, prompt, main)
    head = ReplyHead(f"chatcmpl-{uuid4().hex}", int(time.time()), request.model, version)
    return Job(
        *(caller, request, identity, session_id, version, sampler, prompt, params, head, started),
        *(discretion, privacy, holds, said, lost),
    )


async def _choose(deps: GatewayDeps, model: str) -> tuple[int, Sampler, bool]:
    """Version, sampler, and whether the request pinned the version by name."""
    current = deps.policy.current
    if model == deps.served_name:
        return current.version.id, current.sampler, False
    name, at, number = model.rpartition("@v")
    if at and name == deps.served_name and number.isascii() and number.isdigit():
        # A number too long for an id is no version either; int() would refuse the longest.
        version = int(number) if len(number) < 19 else -1
        if version == current.version.id:
            return version, current.sampler, True
        try:
            return version, await deps.open_version(version), True
        except OutageError as error:
            deps.outages.seen("serving", error)
            raise
        except LookupError:
            pass
    raise not_served(deps, model)


def not_served(deps: GatewayDeps, model: str) -> RequestError:
    """What to answer to a request for another model."""
    newest = deps.policy.newest.version.id
    return RequestError(
        f"The model {shown(model)!r} is not served here; ask for {deps.served_name!r}, or for one "
        f"of its versions, {deps.served_name}@v0 to {deps.served_name}@v{newest}.",
        status=HTTPStatus.NOT_FOUND,
        code="model_not_found",
        param="model",
    )


def _params(deps: GatewayDeps, request: ChatRequest, prompt: Prompt, main: bool) -> SamplingParams:
    """Raises ContextLengthError when not even one token of a reply fits."""
    asked = request.max_tokens or deps.settings.max_reply_tokens
    left = deps.context_tokens - len(prompt.tokens)
    if left < 1:
        raise ContextLengthError(len(prompt.tokens), asked, deps.context_tokens)
    params = SamplingParams(
        # Agents ask for the same allowance always; near the end of the context less is left.
        max_tokens=min(asked, left),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop_tokens=deps.renderer.stop_tokens,
        student_topk=deps.student_topk,
        stop=request.stop,
    )
    if main and params.unfit_because() is None:
        return params
    return replace(params, student_topk=0)


async def _refuse_what_cannot_fit(deps: GatewayDeps, request: ChatRequest) -> None:
    """What is far too long is refused before it is encoded, which would take seconds."""
    # What was said in replies may be left out of the prompt, and tools have a form of their own.
    texts = [m["content"] for m in request.messages if m["role"] != "assistant"]

    def fewest() -> int:
        return sum(deps.renderer.fewest_tokens(text) for text in texts)

    far_too_long = sum(map(len, texts)) > _CHARACTERS_PER_TOKEN * deps.context_tokens
    if far_too_long and await deps.turnstile.aside(fewest) > deps.context_tokens:
        raise hopeless(deps.context_tokens)


async def _attach(deps: GatewayDeps, discretion: SessionPrivacy, link: Continuation) -> None:
    state = next_state(link.new, link.reply)
    if state is None:
        return
    state = replace(state, text=await discretion.redact_any(state.text))
    if deps.turns.add_next_state(link.turn_id, state):
        deps.on_next_state()
