"""From the body of a request to a job that can be sampled.

Rule: everything that can be refused is refused here, before the first byte of the answer, and what
the chat template would leave out is refused by name, never left out in silence. The current policy
is read once; the job keeps it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from tinker_claw.billing.budget import Spending
from tinker_claw.config.settings import Gateway, User
from tinker_claw.conversation.attribution import asked_by, attribute, last_asked
from tinker_claw.conversation.classify import Identity, RequestKind, identify
from tinker_claw.conversation.history import Conversation, heard
from tinker_claw.conversation.index import Continuation, ConversationIndex, exact_digest
from tinker_claw.conversation.outright import outright
from tinker_claw.errors import ContextLengthError, OutageError, RequestError
from tinker_claw.formats.base import Format, GenerationRequest, ReplyHead, ReplyWriter, Route
from tinker_claw.formats.body import shown
from tinker_claw.gateway.fallback import RETRIES, STAND_IN_S, WAITS, StandIns, nobody
from tinker_claw.gateway.limits import Caller, ComputeRounds, hopeless, no_room
from tinker_claw.gateway.owners import Owners
from tinker_claw.gateway.privacy import AFTERWARDS, SessionPrivacy
from tinker_claw.ledger.feedback import ENDED, LONGEST_TEXT, About, Feedback, FeedbackTable, Given
from tinker_claw.ledger.turns import TurnTable
from tinker_claw.outages import Outages
from tinker_claw.policy import PolicyHolder, Sampler
from tinker_claw.privacy.marker import Privacy
from tinker_claw.render.format import switches
from tinker_claw.render.prompt_cache import Prompt
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Kind, Lost, Message, Piece, SamplingParams, Writer

_LARGE = 200_000
"""Bytes of a body that is read in a thread: on the event loop it would take 5 ms."""
_CHARACTERS_PER_TOKEN = 6
"""Texts have three to five; with more than so many for the whole context the words are counted."""
UNASKED = "it answers a verdict, which asks for nothing"
"""Why a reply is not trained to which nothing but a verdict had led."""
_CONTEXT = ("traceparent", "tracestate")
"""Headers of W3C's Trace Context."""
_NOWHERE = 0
"""The session of a private request, which the ledger does not know."""


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """Everything outside the gateway that it touches, and what it remembers of sessions."""

    settings: Gateway
    served_name: str
    """The model's name in requests; `<served_name>@v8` asks for version 8."""
    policy: PolicyHolder
    open_version: Callable[[int], Awaitable[Sampler]]
    """Sampler of an earlier version. Raises LookupError when there is none of that number."""
    turns: TurnTable
    feedback: FeedbackTable
    index: ConversationIndex
    privacy: SessionPrivacy
    owners: Owners
    compute: ComputeRounds
    """For what requests compute."""
    spending: Spending
    renderer: Renderer
    context_tokens: int
    student_topk: int
    """Candidates to capture per token of a trainable turn; 0: the method needs none."""
    gives_topk: bool
    """Samplers tell candidates."""
    constrains: bool
    """Samplers sample what fits a schema."""
    on_next_state: Callable[[], None]
    """A turn has got its next state or its verdict: there is something to judge or to score."""
    health: Callable[[], Mapping[str, Any]]
    telemetry: Telemetry
    """Sees every turn: figures only, no text."""
    outages: Outages
    """Where the gateway says whether the service answers."""
    waits: Backoff = WAITS
    """Between the attempts of one request while the service is away."""
    retries: Backoff = RETRIES
    """Between the attempts of one request where the sampler failed."""
    stand_ins: StandIns = nobody
    """Who answers in place of a version that cannot."""
    stand_in_s: float = STAND_IN_S
    """How long a stand-in may take to its first token while the service is away, seconds."""
    users: Sequence[User] = ()
    """Who may call, each with a key of their own, besides whoever has the settings' one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be sampled, captured and sent."""

    caller: Caller
    request: GenerationRequest
    identity: Identity
    session_id: int
    version: int
    sampler: Sampler
    prompt: Prompt
    params: SamplingParams
    keeps_topk: int
    """Candidates per token that are recorded; the client may have asked for more."""
    writer: ReplyWriter
    started: float
    """time.monotonic() when the request came in, seconds."""
    privacy: Privacy
    holds: str | None
    """What there is in the request that must not be kept, for a sentence."""
    said: Sequence[Message]
    """The request's messages as later requests will show them, but for those that are volatile."""
    conversation: Conversation | None
    """What they come to; None: of a private request nothing is kept."""
    lost: Lost | None
    """Why what the user said is the next state of no turn, although one waits for it."""
    voices: tuple[Piece, ...]
    """What is new in the request since the last reply, each piece with its writer; () of a private
    one."""
    asked_by: Writer
    """Who wrote the request."""
    context: Mapping[str, str]
    """The trace that it is a part of, as headers; empty where nobody traces."""
    choice: int = 0
    """Which of several replies to one request it is."""

    @property
    def response_id(self) -> str:
        """The reply's name for its client."""
        return f"{self.writer.id}-{self.choice}" if self.choice else self.writer.id

    def choices(self) -> list[Job]:
        """One job for each reply that is asked for."""
        seed = self.params.seed
        return [
            self
            if not n
            else replace(
                self,
                choice=n,
                params=replace(self.params, seed=None if seed is None else seed + n),
            )
            for n in range(self.request.choices)
        ]

    @property
    def untrained_because(self) -> str | None:
        """Why this turn cannot be trained on, as far as the request tells."""
        if self.identity.kind is Kind.SIDE:
            return f"side turn: {self.identity.reason}"
        if self.identity.call is RequestKind.VERDICT:
            return UNASKED
        episode = self.identity.attempt is not None and self.identity.attempt.episode
        if self.identity.done and not episode:  # else its outcome does
            return ENDED
        if self.privacy is Privacy.AFTER:
            return AFTERWARDS
        if self.holds is not None:
            return f"holds {self.holds}"
        return self.params.unfit_because()


async def admit(
    deps: GatewayDeps,
    wire: Format,
    route: Route,
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
    request = await read(deps, wire, route, body, caller)
    version, sampler, pinned = await _choose(deps, request.model)
    identity = identify(request, headers)
    if pinned:
        reason = f"asked for version {version}; {identity.reason}"
        identity = replace(identity, kind=Kind.SIDE, reason=reason, attempt=None)
    if request.choices > 1 and identity.kind is Kind.MAIN:
        raise RequestError(
            "n: a turn of a conversation, or of an episode, has one reply. Several are drawn for "
            "side turns: say X-Turn-Type: side, or send the request again for another.",
            param="n",
        )
    parent = None
    if request.follows is not None:
        parent = deps.turns.of_response(caller.user, request.follows)
    if parent is not None and not identity.named:
        identity = replace(identity, key=parent[1])
    privacy = deps.privacy.privacy(caller.user, identity, headers, request)
    session_id, holds, said = _NOWHERE, None, request.messages
    conversation, link, lost = None, None, None
    is_owner = partial(deps.owners.has, caller.user)
    named = partial(attribute, surface=identity.surface, is_owner=is_owner)
    if privacy is not Privacy.PRIVATE:
        if privacy is Privacy.OPEN:
            wire.remember(request, caller.user)
        await deps.privacy.look_at(request)
        await deps.compute.own_round()
        holds = deps.privacy.holds(request)
        if holds is not None and parent is None and not identity.named:
            opening = deps.privacy.redacted(request)  # of which the key is a digest
            identity = replace(identity, key=identify(opening, headers).key)
        session_id = deps.index.session(caller.user, identity)
        if not pinned:
            answers = deps.policy.of_session(session_id)
            version, sampler = answers.version.id, answers.sampler
        said = deps.index.said(session_id, said)
        conversation = Conversation.of(said)
        if identity.kind is Kind.MAIN or identity.call is RequestKind.UNKNOWN:
            # What was said in private is not known, and might be taken for something else.
            known = privacy is Privacy.OPEN
            if parent is None:
                link = deps.index.find(session_id, conversation, compacted=known)
            else:
                link = deps.index.after(parent[0], conversation)
            if link is None and known:
                lost = deps.index.lost(session_id, conversation)
    if link is not None:
        # Before the prompt: what the user said counts even when it does not fit the context.
        await _attach(deps, link, named, caller.user, session_id, started)
    if privacy is Privacy.AFTER:
        deps.privacy.forget()
    prompt = await _prompt(deps, request, body, link, forget=privacy is not Privacy.OPEN)
    voices, writer = tuple[Piece, ...](), Writer.OWNER
    if privacy is not Privacy.PRIVATE:
        voices = tuple(piece for message in _new(request.messages) for piece in named(message))
        writer = asked_by(said, identity.surface, is_owner)
    head = ReplyHead(version, len(prompt.tokens), int(time.time()))
    try:
        params = _params(deps, request, prompt)
    except ContextLengthError:
        _refuse_without_room(deps, request)
        raise
    fit = identity.kind is Kind.MAIN and params.unfit_because() is None
    keeps_topk = deps.student_topk if fit else 0
    return Job(
        caller=caller,
        request=request,
        identity=identity,
        session_id=session_id,
        version=version,
        sampler=sampler,
        prompt=prompt,
        params=replace(params, student_topk=max(keeps_topk, request.top_logprobs or 0)),
        keeps_topk=keeps_topk,
        writer=wire.reply(request, head),
        started=started,
        privacy=privacy,
        holds=holds,
        said=said,
        conversation=conversation,
        lost=lost,
        voices=voices,
        asked_by=writer,
        context={n: headers[n] for n in _CONTEXT if n in headers} if deps.telemetry.traces else {},
    )


async def count(deps: GatewayDeps, wire: Format, route: Route, body: bytes, caller: Caller) -> int:
    """Tokens of a request's prompt; nothing of it is kept.

    Raises:
        RequestError: it could not be served as asked.
    """
    request = await read(deps, wire, route, body, caller)
    await _choose(deps, request.model)
    return len((await _prompt(deps, request, body, None, forget=True)).tokens)


async def read(
    deps: GatewayDeps, wire: Format, route: Route, body: bytes, caller: Caller
) -> GenerationRequest:
    """The request in a body, with the switches of its prompt.

    Raises:
        RequestError: it is malformed, or the chat template has no place for something in it.
    """

    def parsed() -> GenerationRequest:
        return wire.parse(body, route, caller.user)

    if len(body) >= _LARGE:
        request = await deps.compute.aside(parsed)
        await deps.compute.own_round()
    else:
        await deps.compute.own_round()
        request = parsed()
    _check_names(deps.renderer, request.messages)
    _check_reply(deps, request)
    if not request.template and request.reasoning_effort is None:
        return request
    found = switches(
        deps.renderer.config, request.template, request.reasoning_effort, request.effort_at
    )
    return replace(request, switches=found)


def _check_reply(deps: GatewayDeps, request: GenerationRequest) -> None:
    """Whether model and sampler can do what is asked of the reply."""
    if request.schema is not None:
        at = request.schema[1]
        if not deps.constrains:
            raise RequestError(
                f"{at}: the sampler that serves here cannot constrain a reply to JSON. Offer a "
                "tool with this schema and name it in tool_choice: that works everywhere, and is "
                "trained.",
                param=at,
            )
        if request.tools:
            raise RequestError(
                f"{at}: a reply that may call tools is not constrained; leave one of them out.",
                param=at,
            )
    if request.top_logprobs is not None and not deps.renderer.tells_text:
        raise RequestError(
            "logprobs: in this model's chat format nobody knows which tokens are a reply's text.",
            param="logprobs",
        )
    if request.top_logprobs and not deps.gives_topk:
        raise RequestError(
            "top_logprobs: the sampler that serves here tells the logprobs of sampled tokens only; "
            "0 is what it takes.",
            param="top_logprobs",
        )


def _check_names(renderer: Renderer, messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        # The name of a tool stands in the call that its result answers.
        named = "name" in message and message["role"] != "tool"
        if named and not _shows_names(renderer, message["role"]):
            raise RequestError(
                f"messages[{i}].name: this model's chat format shows no names; "
                "put it into the content.",
                param=f"messages[{i}].name",
            )


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
            sampler = await deps.open_version(version)
            await deps.compute.own_round()
            return version, sampler, True
        except OutageError as error:
            deps.outages.seen("serving", error)
            raise
        except LookupError:
            pass
    raise not_served(deps, model)


def not_served(deps: GatewayDeps, model: str) -> RequestError:
    """What to answer to a request for another model."""
    newest, versions = deps.policy.newest.version.id, f"{deps.served_name}@v0"
    if newest:
        versions = f"one of its versions, {versions} to {deps.served_name}@v{newest}"
    return RequestError(
        f"The model {shown(model)!r} is not served here; ask for {deps.served_name!r}, or for "
        f"{versions}.",
        status=HTTPStatus.NOT_FOUND,
        code="model_not_found",
        param="model",
    )


def _new(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages since the last reply."""
    at = next((n for n, m in enumerate(reversed(messages)) if m["role"] == "assistant"), None)
    return messages if at is None else messages[len(messages) - at :]


async def _attach(
    deps: GatewayDeps,
    link: Continuation,
    named: Callable[[Message], Sequence[Piece]],
    user: str,
    session_id: int,
    started: float,
) -> None:
    """Record what the request says of the turn before it."""
    found = heard(link.new, named, link.reply, others=deps.owners.hears_others)
    if found.unknown:
        deps.turns.stop_waiting(link.turn_id)
    state = found.state
    if state is None:
        return
    said = outright(state.text) if state.role == "user" else None
    redact = deps.privacy.redact_any
    beside = [(writer, await redact(text)) for writer, text in state.beside]
    state = replace(state, text=await redact(state.text), beside=tuple(beside))
    reason = await deps.privacy.redact_any(said.reason[:LONGEST_TEXT]) if said else ""
    if deps.index.has_forgotten(session_id, started):  # while its words were searched
        return
    if said is not None:
        # Before the next state, with which the judge would be asked. Agents send requests again;
        # no client's key begins with the end of a line.
        name = f"\nmessage after turn {link.turn_id}: {said.score} {_digest(reason)}"
        feedback = Feedback(float(said.score), reason, key=name)
        record(deps, user, About("turn", link.turn_id), feedback)
    if deps.turns.add_next_state(link.turn_id, state):
        deps.on_next_state()


def record(deps: GatewayDeps, user: str, about: About, said: Feedback) -> Given | None:
    """Record what a user has said outright, and let it count; None: they have no such turn.

    Raises:
        KeyReusedError: its key came with something else before.
        LedgerError: it cannot be written.
    """
    given = deps.feedback.give(user, about, said)
    if given is not None and not given.repeated:
        deps.telemetry.feedback(
            user=user,
            turn=given.turn_id,
            score=said.score,
            source=said.source,
            final=said.final,
            counts=given.unused is None,
        )
        deps.on_next_state()
    return given


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def _prompt(
    deps: GatewayDeps,
    request: GenerationRequest,
    body: bytes,
    link: Continuation | None,
    *,
    forget: bool,
) -> Prompt:
    """What the model is given: the request, and how its reply begins where it must be a call.

    Args:
        forget: nothing that was new in it stays in memory.

    Raises:
        RequestError: the chat template refuses these messages, they are far too long, or it is not
            known how such a reply begins.
    """
    begun = _begun(deps, request)
    prompt = await _asked(deps, request, body, link, forget=forget)
    return prompt.followed_by(begun) if begun else prompt


def _begun(deps: GatewayDeps, request: GenerationRequest) -> tuple[int, ...]:
    """The part of the reply that is given to the model."""
    if request.schema is not None:
        text = deps.renderer.begin_text(request.switches)
        if text is None:
            at = request.schema[1]
            raise RequestError(
                f"{at}: in this model's chat format it is not known how a reply begins without "
                "thinking.",
                param=at,
            )
        return text
    if not request.must_call:
        return ()
    begun = deps.renderer.begin_call(request.must_call, request.switches)
    if begun is None:
        raise RequestError(
            "tool_choice: a call cannot be begun for this model. Its chat format is not known to "
            "have calls, or not of tools with such names; auto is what it takes.",
            param="tool_choice",
        )
    return begun


async def _asked(
    deps: GatewayDeps,
    request: GenerationRequest,
    body: bytes,
    link: Continuation | None,
    *,
    forget: bool,
) -> Prompt:
    """The exact extension of the sampled stream where it holds, else a full render."""
    if len(body) > _CHARACTERS_PER_TOKEN * deps.context_tokens:
        await _refuse_what_cannot_fit(deps, request)
    await deps.compute.own_round()
    extended = _extended(deps, request, link)
    if extended is not None:
        return extended
    return await deps.renderer.prompt_aside(
        request.messages,
        request.tools,
        hint_message=last_asked(request.messages),
        switches=request.switches,
        remembers=not forget,
    )


async def _refuse_what_cannot_fit(deps: GatewayDeps, request: GenerationRequest) -> None:
    """What is far too long is refused before it is encoded, which would take seconds."""
    # What was said in replies may be left out of the prompt, and tools have a form of their own.
    said = [m for m in request.messages if m["role"] != "assistant"]
    first = [m for m in said if m["role"] == "system"]

    def too_many(messages: Sequence[Message]) -> bool:
        fewest = sum(deps.renderer.fewest_tokens(m["content"]) for m in messages)
        return fewest > deps.context_tokens

    far_too_long = (
        sum(len(m["content"]) for m in said) > _CHARACTERS_PER_TOKEN * deps.context_tokens
    )
    if far_too_long and await deps.compute.aside(lambda: too_many(said)):
        raise (no_room if too_many(first) else hopeless)(deps.context_tokens)


def _refuse_without_room(deps: GatewayDeps, request: GenerationRequest) -> None:
    """Raise RequestError where what comes with every request leaves no room for a conversation."""
    first = [m for m in request.messages if m["role"] == "system"]
    nothing: Message = {"role": "user", "content": ""}
    prompt = deps.renderer.prompt([*first, nothing], request.tools, switches=request.switches)
    if len(prompt.tokens) >= deps.context_tokens:
        raise no_room(deps.context_tokens)


def _extended(
    deps: GatewayDeps, request: GenerationRequest, link: Continuation | None
) -> Prompt | None:
    """None: the sampled stream does not begin this prompt."""
    if link is None or link.stream is None:
        return None
    messages, tools, switches = request.messages, request.tools, request.switches
    first_new = len(messages) - len(_new(messages))
    if exact_digest(messages[: first_new - 1], tools, switches) != link.stream.exact:
        return None
    at = last_asked(messages)
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


def _params(deps: GatewayDeps, request: GenerationRequest, prompt: Prompt) -> SamplingParams:
    """Raises ContextLengthError when not even one token of a reply fits."""
    asked = request.max_tokens or deps.settings.max_reply_tokens
    left = deps.context_tokens - len(prompt.tokens)
    if left < 1:
        raise ContextLengthError(len(prompt.tokens), asked, deps.context_tokens)
    return SamplingParams(
        # Agents ask for the same allowance always; near the end of the context less is left.
        max_tokens=min(asked, left),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop_tokens=deps.renderer.stop_tokens,
        stop=request.stop,
        schema=None if request.schema is None else request.schema[0],
    )
