"""From the body of a request to a job that can be sampled.

Rule: everything that can be refused is refused here, before the first byte of the answer. The
current policy is read once; the job keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from uuid import uuid4

from tinker_claw.errors import ContextLengthError, OutageError, RequestError
from tinker_claw.gateway.book import Book, Link
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.discretion import AFTERWARDS, Discretion
from tinker_claw.gateway.limits import Caller, hopeless
from tinker_claw.gateway.prompt import prompt_for
from tinker_claw.gateway.suit import suited
from tinker_claw.policy import Sampler
from tinker_claw.privacy import Privacy
from tinker_claw.render import Prompt
from tinker_claw.sessions import (
    Identity,
    identify,
    next_state,
)
from tinker_claw.types import Kind, Lost, Message, SamplingParams
from tinker_claw.wire import ChatRequest, ReplyHead, parse_chat
from tinker_claw.wire.values import shown

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
    discretion: Discretion
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
    book: Book,
    discretion: Discretion,
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
        request = suited(deps.renderer, parsed or parse_chat(body))
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


async def _attach(deps: GatewayDeps, discretion: Discretion, link: Link) -> None:
    state = next_state(link.new, link.reply)
    if state is None:
        return
    state = replace(state, text=await discretion.redact_any(state.text))
    if deps.turns.add_next_state(link.turn_id, state):
        deps.on_next_state()
