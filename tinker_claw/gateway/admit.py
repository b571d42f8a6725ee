"""From the body of a request to a job that can be sampled.

Rule: everything that can be refused is refused here, before the first byte of the answer. The
current policy is read once; the job keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from uuid import uuid4

from tinker_claw.errors import ContextLengthError, OutageError, RequestError
from tinker_claw.gateway.book import Book, Link, exact_digest
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.policy import Sampler
from tinker_claw.render import Prompt
from tinker_claw.sessions import (
    Identity,
    identify,
    last_user_index,
    next_state,
    without_volatile,
)
from tinker_claw.types import Kind, SamplingParams
from tinker_claw.wire import ChatRequest, ReplyHead, parse_chat

USER = "default"
"""The one user of a process, until keys name users."""


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be sampled, captured and sent."""

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

    @property
    def untrained_because(self) -> str | None:
        """Why this turn cannot be trained on, as far as the request tells."""
        if self.identity.kind is Kind.SIDE:
            return f"side turn: {self.identity.reason}"
        return self.params.unfit_because()


async def admit(deps: GatewayDeps, book: Book, body: bytes, headers: Mapping[str, str]) -> Job:
    """Read a request, attach it to the turn before as its next state, and render its prompt.

    Raises:
        RequestError: it cannot be served as asked.
        BackendError: the version it asks for cannot be opened.
    """
    started = time.monotonic()
    request = parse_chat(body)
    identity = identify(request, headers)
    version, sampler, pinned = await _choose(deps, request.model)
    if pinned:
        reason = f"asked for version {version}; {identity.reason}"
        identity = Identity(identity.key, Kind.SIDE, reason, identity.done)
    main = identity.kind is Kind.MAIN
    session_id = deps.turns.session(USER, identity.key)
    link = book.find(session_id, request.messages) if main else None
    if link is not None:
        # Before the prompt: what the user said counts even when it does not fit the context.
        _attach(deps, link)
    prompt = _prompt(deps, request, link)
    params = _params(deps, request, prompt, main)
    head = ReplyHead(f"chatcmpl-{uuid4().hex}", int(time.time()), request.model, version)
    return Job(request, identity, session_id, version, sampler, prompt, params, head, started)


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
    raise RequestError(
        f"The model {model!r} is not served here; ask for {deps.served_name!r}, or for one of "
        f"its versions, {deps.served_name}@v0 to {deps.served_name}@v{current.version.id}.",
        status=HTTPStatus.NOT_FOUND,
        code="model_not_found",
        param="model",
    )


def _prompt(deps: GatewayDeps, request: ChatRequest, link: Link | None) -> Prompt:
    """The exact extension of the sampled stream where it holds, else a full render."""
    messages, tools, thinking = request.messages, request.tools, request.enable_thinking
    at = last_user_index(messages)
    if link is not None and link.stream is not None:
        reply_at = len(without_volatile(messages)) - len(link.new) - 1
        if exact_digest(messages[:reply_at], tools, thinking) == link.stream.exact:
            first_new = reply_at + 1
            extended = deps.renderer.extend(
                link.stream.prompt,
                link.stream.tokens,
                messages[first_new:],
                tools,
                hint_message=at - first_new if at is not None and at >= first_new else None,
                enable_thinking=thinking,
            )
            if extended is not None:
                kept = link.stream.hint_at if at is None or at < first_new else extended.hint_at
                return Prompt(extended.tokens, kept)
    return deps.renderer.prompt(messages, tools, hint_message=at, enable_thinking=thinking)


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
    )
    if main and params.unfit_because() is None:
        return params
    return replace(params, student_topk=0)


def _attach(deps: GatewayDeps, link: Link) -> None:
    state = next_state(link.new, link.reply)
    if state is not None and deps.turns.add_next_state(link.turn_id, state):
        deps.on_next_state()
