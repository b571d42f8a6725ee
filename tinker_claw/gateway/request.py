"""Turn the body of a request into a job that can be sampled.

Rule: everything that can be refused is refused here, before the first byte of the answer, and what
the chat template would leave out is refused by name, never dropped silently. The current policy is
read once; the job keeps it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from cachetools import LRUCache

from tinker_claw.billing.budget import Spending
from tinker_claw.config.settings import Gateway
from tinker_claw.conversation.attribution import (
    Attribute,
    asked_by,
    attached_to,
    attribute,
    last_said,
    newest_asked,
    read,
    shows_own,
)
from tinker_claw.conversation.classify import Identity, RequestKind, identify
from tinker_claw.conversation.history import Conversation, digest, heard
from tinker_claw.conversation.index import Continuation, ConversationIndex, exact_digest
from tinker_claw.conversation.lessons import Lessons
from tinker_claw.conversation.openclaw import Carried, Sender, Surface, carried
from tinker_claw.conversation.outright import outright
from tinker_claw.errors import ContextLengthError, OutageError, RequestError
from tinker_claw.formats.base import (
    Format,
    GenerationRequest,
    ReplyHead,
    ReplyWriter,
    Route,
    parts_of,
)
from tinker_claw.formats.body import shown, without_halves
from tinker_claw.formats.parts import READS_TEXT, UNREAD, without_images
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.fallback import Serving
from tinker_claw.gateway.limits import (
    ALWAYS_READ,
    CHARS_PER_TOKEN,
    Caller,
    ComputeRounds,
    hopeless,
)
from tinker_claw.gateway.owners import Owners
from tinker_claw.gateway.privacy import AFTERWARDS, SessionPrivacy, note_marks
from tinker_claw.gateway.prompt import build_prompt, new_messages, refuse_without_room
from tinker_claw.images import Image, images_in, placed
from tinker_claw.ledger.feedback import ENDED, LONGEST_TEXT, About, Feedback, Given
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.lessons import Lesson
from tinker_claw.policy import PolicyHolder, Sampler
from tinker_claw.privacy.marker import Privacy
from tinker_claw.render.format import ASKED, SOUGHT, switches
from tinker_claw.render.prompt_cache import Prompt
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry, log
from tinker_claw.types import (
    Capabilities,
    Images,
    Kind,
    KnownMessage,
    Lost,
    Message,
    Piece,
    PlacedImage,
    SamplingParams,
    Tool,
    Writer,
    has_note,
    noted,
)

_LARGE = 200_000
"""Bytes of a body that is read and rendered in a thread: on the event loop it would take 5 ms."""
_MANY = 1_000
"""Objects in a body that is, too: messages, parts of messages, calls and tools. Agents' bodies of
50 kB have some 130."""
_UNREAD = 100_000
"""Characters of new messages that are read in a thread: on the event loop they would take 50 ms."""
_EACH = 300
"""Characters of a long text that take as long as a part of a message."""
PICTURED = "holds an image, on which --images serve does not train"
NOT_THEIRS = "holds an image that neither an owner nor a tool has sent"
"""Why a turn with images is not trained with --images serve, or with --images train."""
UNASKED = "reply to a rating; nothing to learn from"
"""Why a reply is not trained on if the user's message was nothing but a verdict."""
_ID = re.compile(r"[0-9]{1,18}")
"""Number of a version; a longer one is invalid."""
_MOST_LEFT_OUT = 30
"""Most kinds of things left out that are named: clients may call them anything."""
_HALF = "half_surrogate (a text): half of an emoji or the like was read as U+FFFD"
_NOWHERE = 0
"""The session of a private request, which the ledger does not know."""


class LeftOut:
    """What requests asked for that is left out: each kind once in the log, and in `status`."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        """Sentence about each, by its kind."""

    def note(self, sentences: Sequence[str]) -> None:
        """Note what a request asked for. `sentences`: begin with the kind, before a blank."""
        for sentence in sentences:
            kind = sentence.partition(" ")[0]
            if kind not in self.kinds and len(self.kinds) < _MOST_LEFT_OUT:
                self.kinds[kind] = sentence
                log.warning("request.left_out", what=sentence)


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """The gateway's dependencies, and its memory of sessions."""

    settings: Gateway
    keys: Keys
    served_name: str
    """The model's name in requests; `<served_name>@v8` asks for version 8."""
    renderer: Renderer
    can: Capabilities
    student_topk: int
    """Candidates to capture per token of a trainable turn; 0: the method needs none."""
    policy: PolicyHolder
    serving: Serving
    ledger: Ledger
    index: ConversationIndex
    privacy: SessionPrivacy
    owners: Owners
    compute: ComputeRounds
    """Runs what requests compute, one request per round of the event loop."""
    spending: Spending
    telemetry: Telemetry
    """Sees every turn: figures only, no text."""
    health: Callable[[], Mapping[str, Any]]
    on_next_state: Callable[[], None]
    """Called when a turn got its next state or its verdict, and can be judged or scored."""
    lessons: Lessons | None = None
    """None: nothing is told in prompts."""
    left_out: LeftOut = field(default_factory=LeftOut)
    refused: LRUCache[tuple[str, str], int] = field(default_factory=lambda: LRUCache(4096))
    """Hash of the message in which something was refused first, by user and what it was."""

    def figures(self) -> dict[str, Any]:
        """Return the body of /healthz, as an admin sees it."""
        here = {"private_near_misses": self.privacy.near_misses}
        return {**self.health(), **here, "left_out": [*self.left_out.kinds.values()]}


@dataclass(frozen=True, slots=True)
class Said:
    """A request as a part of its conversation; empty for a private one."""

    session_id: int = _NOWHERE
    history: tuple[str, ...] | None = None
    """Digests of the messages as later requests will show them; None: nothing is kept."""
    text: str = ""
    """Last words that were said to the agent, redacted."""
    holds: str | None = None
    """Description of a secret or personal data found in the request, or None."""
    link: Continuation | None = None
    """The turn that it continues; None: none is known."""
    lost: Lost | None = None
    """Why what the user said is the next state of no turn, although one waits for it."""
    voices: tuple[Piece, ...] = ()
    """New pieces of the request since the last reply, each with its writer."""
    asked_by: Writer = Writer.OWNER
    """Who wrote the request."""
    pictured: str | None = None
    """Why nothing after its images is trained; None: there are none, or they are trained."""


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be sampled, captured and sent."""

    caller: Caller
    request: GenerationRequest
    identity: Identity
    said: Said
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
    choice: int = 0
    """Index of this reply among several to one request."""

    @property
    def response_id(self) -> str:
        """Id of the reply for its client."""
        return f"{self.writer.id}-{self.choice}" if self.choice else self.writer.id

    def choices(self) -> list[Job]:
        """Return one job per requested reply."""
        seed = self.params.seed
        return [
            replace(
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
        if self.identity.done and not self.identity.episode:  # which is trained on its outcome
            return ENDED
        if self.privacy is Privacy.AFTER:
            return AFTERWARDS
        if self.said.holds is not None:
            return f"holds {self.said.holds}"
        return self.said.pictured or self.params.unfit_because()

    @property
    def images(self) -> Images:
        """The images in its prompt."""
        shown = zip(self.prompt.images, images_in(self.request.messages), strict=True)
        return tuple(PlacedImage(*at, image.clean(), image.format) for at, image in shown)


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
    started, user, large = time.monotonic(), caller.user, is_large(body)
    request = await parse(deps, wire, route, body, caller)
    version, sampler, pinned = await choose(deps, request.model)
    identity, parent = _identify(deps, request, headers, user, version if pinned else None)
    named = partial(
        _attributed,
        surface=identity.surface,
        is_owner=partial(deps.owners.has, user),
        trusted=identity.trusted,
        carried=carried(request.messages),
    )
    privacy = deps.privacy.privacy(user, identity, headers, request, named)
    said, told = Said(), list[Lesson]()
    if privacy is not Privacy.PRIVATE:
        if privacy is Privacy.OPEN and large:
            await deps.compute.aside(partial(wire.remember, request, user))
        elif privacy is Privacy.OPEN:
            wire.remember(request, user)
        await deps.privacy.look_at(request)
        holds = deps.privacy.holds(request)
        if holds is not None and not parent and not identity.named:
            opening = await deps.privacy.redacted(request)  # the key is its digest
            identity = replace(identity, key=identify(opening, headers).key)
        session_id = deps.index.session(user, identity)
        if not pinned:
            answers = deps.policy.of_session(session_id)
            version, sampler = answers.version.id, answers.sampler
        # What was said in private is not known, and might be taken for something else.
        known = privacy is Privacy.OPEN
        said = await _place(
            deps, request, identity, named, session_id, parent, known=known, large=large
        )
        said = replace(said, holds=holds, pictured=_pictured(deps, request, named))
        if known and deps.lessons is not None and identity.kind is Kind.MAIN:
            opener = user if _is_owners(identity, said) else None
            told = deps.lessons.told(session_id, opener, version)
        if said.link is not None:
            # Before the prompt: what the user said counts even when it does not fit the context.
            await _attach(deps, said.link, named, user, session_id, started)
    forget = privacy is not Privacy.OPEN
    prompt = await build_prompt(deps, request, said.link, told, forget=forget, large=large)
    params = await _params(deps, request, prompt)
    fit = identity.kind is Kind.MAIN and (said.pictured or params.unfit_because()) is None
    keeps_topk = deps.student_topk if fit else 0
    return Job(
        caller=caller,
        request=request,
        identity=identity,
        said=said,
        version=version,
        sampler=sampler,
        prompt=prompt,
        params=replace(params, student_topk=max(keeps_topk, request.top_logprobs or 0)),
        keeps_topk=keeps_topk,
        writer=wire.reply(request, ReplyHead(version, len(prompt.tokens), int(time.time()))),
        started=started,
        privacy=privacy,
    )


def is_large(body: bytes) -> bool:
    """Whether reading or rendering a request takes so long that a thread does it."""
    return len(body) >= _LARGE or body.count(b"{") >= _MANY


async def _read_ahead(deps: GatewayDeps, request: GenerationRequest) -> None:
    """Read many new messages in a thread, so that all that follows finds them read."""
    new = [message for message in request.messages if not has_note(digest, message)]
    if sum(map(_reading_costs, new)) < _UNREAD:
        return

    def read_them() -> None:
        for message in new:
            noted(digest, message)
            note_marks(message)
            if message["role"] == "tool":
                noted(_result, message)
        exact_digest(request.messages, request.tools, request.switches)

    await deps.compute.aside(read_them)
    await deps.compute.own_round()


def _reading_costs(message: Message) -> int:
    """How long reading a message takes, in characters."""
    pieces = len(parts_of(message["content"])) + len(message.get("tool_calls", ()))
    return _EACH * pieces + len(message["content"])


def _attributed(
    message: Message,
    surface: Surface,
    is_owner: Callable[[Sender], bool],
    *,
    trusted: bool,
    carried: Carried | None,
) -> tuple[Piece, ...]:
    """See `attribute`: a tool's result is read once."""
    if message["role"] == "tool":
        return noted(_result, message)
    return attribute(message, surface, is_owner, trusted=trusted, carried=carried)


def _result(message: Message) -> tuple[Piece, ...]:
    """The pieces of a tool's result, which depend on nothing else."""
    return attribute(message, Surface(), lambda sender: False)


def _pictured(deps: GatewayDeps, request: GenerationRequest, named: Attribute) -> str | None:
    """Why nothing after a request's images is trained; None: it is, or there are none."""
    shown = [one for one in request.messages if placed(one["content"])]
    if shown and deps.settings.images != "train":
        return PICTURED
    return None if all(shows_own(one, named(one)) for one in shown) else NOT_THEIRS


def _is_owners(identity: Identity, said: Said) -> bool:
    """Whether an owner of the gateway opens a conversation of their own with this request."""
    attempt, chat = identity.attempt, identity.surface
    tried = identity.episode or (attempt is not None and attempt.group is not None)
    return said.asked_by is Writer.OWNER and not (tried or chat.group)


def _identify(
    deps: GatewayDeps,
    request: GenerationRequest,
    headers: Mapping[str, str],
    user: str,
    pinned: int | None,
) -> tuple[Identity, tuple[int, str] | None]:
    """Identify the session, and the turn that the request continues by id, with its session.

    Args:
        pinned: the version that it asks for by name.
    """
    identity = deps.privacy.identity(identify(request, headers), headers)
    if pinned is not None:
        reason = f"asked for version {pinned}; {identity.reason}"
        identity = replace(identity, kind=Kind.SIDE, reason=reason, attempt=None)
    if request.choices > 1 and identity.kind is Kind.MAIN:
        raise RequestError(
            "n must be 1 for a main turn, which has one reply. For several send X-Turn-Type: side, "
            "or send the request again for another.",
            param="n",
        )
    parent = None
    if request.follows is not None:
        parent = deps.ledger.turns.of_response(user, request.follows)
    if parent is not None and not identity.named:
        identity = replace(identity, key=parent[1])
    return identity, parent


async def _place(
    deps: GatewayDeps,
    request: GenerationRequest,
    identity: Identity,
    named: Attribute,
    session_id: int,
    parent: tuple[int, str] | None,
    *,
    known: bool,
    large: bool,
) -> Said:
    """Find the request's place in its conversation.

    Args:
        named: gives every piece of a message its writer.
        parent: the turn that it says to go on from, with the key of its session.
        known: all that was said in the session is known.
        large: see `is_large`.
    """
    messages = deps.index.said(session_id, request.messages)
    conversed = partial(Conversation.of, messages)
    conversation = await deps.compute.aside(conversed) if large else conversed()
    link, lost = None, None
    if identity.kind is Kind.MAIN or identity.call is RequestKind.UNKNOWN:
        if parent:
            link = deps.index.after(parent[0], conversation)
        else:
            link = deps.index.find(session_id, conversation, compacted=known)
        if link is None and known:
            lost = deps.index.lost(session_id, conversation)
    last = last_said(messages)
    return Said(
        session_id,
        conversation.digests,
        await deps.privacy.redact_any(read(last).said) if last else "",
        link=link,
        lost=lost,
        voices=tuple(
            piece for message in new_messages(request.messages) for piece in named(message)
        ),
        asked_by=asked_by(named(last)) if last else Writer.OWNER,
    )


async def count(deps: GatewayDeps, wire: Format, route: Route, body: bytes, caller: Caller) -> int:
    """Count the tokens of a request's prompt; nothing of it is kept.

    Raises:
        RequestError: it could not be served as asked.
    """
    request = await parse(deps, wire, route, body, caller)
    await choose(deps, request.model)
    large = is_large(body)
    prompt = await build_prompt(deps, request, None, (), forget=True, large=large)
    return len(prompt.tokens)


async def parse(
    deps: GatewayDeps, wire: Format, route: Route, body: bytes, caller: Caller
) -> GenerationRequest:
    """The request in a body, with the switches of its prompt.

    Raises:
        RequestError: it is malformed, or the chat template has no place for something in it.
    """
    sent, large = body, is_large(body)

    def parsed() -> tuple[GenerationRequest, bool]:
        body = without_halves(sent)
        found = wire.parse(body, route, caller.user)
        _check_shown(deps.renderer, found.messages)
        _refuse_hopeless(found, deps.can.context_tokens)
        newest_asked(found.messages)  # reads the newest messages here, for all that ask later
        return found, body != sent

    if large:
        request, mended = await deps.compute.aside(parsed)
        await deps.compute.own_round()
    else:
        await deps.compute.own_round()
        request, mended = parsed()
    deps.left_out.note((*request.left_out, *([_HALF] if mended else [])))
    request = replace(request, messages=await _look(deps, caller.user, request.messages))
    _check_reply(deps, request)
    await _read_ahead(deps, request)
    if not request.template and request.reasoning_effort is None:
        return request
    found = switches(
        deps.renderer.config, request.template, request.reasoning_effort, request.effort_at
    )
    return replace(request, switches=found)


async def _look(deps: GatewayDeps, user: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages as the model is shown them: with a line in place of each image that it
    cannot be shown. Images are decoded outside the event loop.

    Raises:
        RequestError: the user has just sent what cannot be shown.
    """
    asked = newest_asked(messages)
    for part in attached_to(asked) if asked else ():
        if asked and part.refusal and _just_sent(deps, user, part, asked):
            raise RequestError(str(part.refusal), param=part.refusal.param)
    images, theirs = images_in(messages), images_in([asked] if asked else [])
    if not images:
        return tuple(messages)
    if (blind := blind_because(deps)) is not None:
        for image in theirs:
            if asked and _just_sent(deps, user, image.digest, asked):
                raise image.wrong(blind)
        return tuple(noted(_unseen, m) if placed(m["content"]) else m for m in messages)
    unfit = await _unfit(deps, images)
    for image in theirs:
        error = unfit.get(image)
        if error and asked and _just_sent(deps, user, image.digest, asked):
            raise error
    if not unfit:
        return tuple(messages)
    return tuple(
        _without(m, lambda image: UNREAD if image in unfit else None) if placed(m["content"]) else m
        for m in messages
    )


def _just_sent(deps: GatewayDeps, user: str, what: str, message: Message) -> bool:
    """Whether a user sends this with no other message before. An agent may put a message that was
    refused into one with the user's next words, which would be refused for ever."""
    words = hash(message["content"])
    return deps.refused.setdefault((user, what.strip()), words) == words


async def _unfit(deps: GatewayDeps, images: Sequence[Image]) -> Mapping[Image, RequestError]:
    """Decode images; return those that the model cannot be shown, and why."""
    eyes = deps.renderer.eyes
    assert eyes is not None
    unfit, taken = dict[Image, RequestError](), 0
    for image in images:  # before one is decoded: there may be many
        try:
            taken += eyes.tokens(image)
        except RequestError as error:
            unfit[image] = error
    if taken >= deps.can.context_tokens:
        raise ContextLengthError(taken, 1, deps.can.context_tokens)

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
    return _without(message, lambda image: READS_TEXT)


def _without(message: Message, whys: Callable[[Image], str | None]) -> Message:
    return KnownMessage({**message, "content": without_images(message["content"], whys)})


def blind_because(deps: GatewayDeps) -> str | None:
    """Why images cannot be shown to the model, as the rest of a sentence; None: they can."""
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


def _check_reply(deps: GatewayDeps, request: GenerationRequest) -> None:
    """Raise RequestError unless model and sampler can do what is asked of the reply."""
    if request.schema is not None:
        at = request.schema[1]
        if not deps.can.constrains:
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
            "logprobs: in this model's chat format it is unknown which tokens are a reply's text; "
            "leave it out.",
            param="logprobs",
        )
    if request.top_logprobs and not deps.can.student_topk:
        raise RequestError(
            "top_logprobs: the sampler that serves here returns the logprobs of sampled tokens "
            "only; send 0.",
            param="top_logprobs",
        )


def _refuse_hopeless(request: GenerationRequest, context_tokens: int) -> None:
    """Refuse a prompt that cannot fit before it is rendered, which takes seconds. What the model is
    shown as a line (images, packed documents) is counted as that."""
    most = max(ALWAYS_READ, CHARS_PER_TOKEN * context_tokens)
    said = sum(_said_chars(message) for message in request.messages)
    if said > most or noted(_written_chars, request.tools) > most:
        raise hopeless(context_tokens)


def _said_chars(message: Message) -> int:
    calls = message.get("tool_calls", ())
    called = sum(len(call["function"]["arguments"]) for call in calls)
    return CHARS_PER_TOKEN * (1 + len(calls)) + len(message["content"]) + called


def _written_chars(tools: Sequence[Tool]) -> int:
    return len(str(tools))


def _check_shown(renderer: Renderer, messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        role = message["role"]
        for name in ("content", "name"):
            # The name of a tool is in the call that its result answers.
            said = name in message and (role, name) != ("tool", "name")
            if said and not _shows(renderer, role, name):
                at = f"messages[{i}].{'role' if name == 'content' else name}"
                raise RequestError(
                    f"{at}: this model's chat format shows no {name} of messages whose role is "
                    f"{shown(role)!r}; put it into the content of a user's.",
                    param=at,
                )


@lru_cache(maxsize=64)
def _shows(renderer: Renderer, role: str, field: str) -> bool:
    """Whether a field of a message changes the prompt, found by rendering two of its values."""
    said = {"role": role, "content": "Well.", "tool_call_id": "a1"}
    before = () if role in ("system", "user") else (ASKED, SOUGHT)
    after = (ASKED,) if role == "system" else ()
    both = ((*before, said | {field: text}, *after) for text in ("Ann", "Zoe"))
    try:
        return len({renderer.prompt(one).tokens for one in both}) > 1
    except RequestError:  # the request's own prompt says what of its content is refused
        return field == "content"


def is_current(deps: GatewayDeps, model: str) -> bool:
    """Return whether a request names the model, and no version of it."""
    return model == deps.served_name or deps.settings.is_alias(model)


async def choose(deps: GatewayDeps, model: str) -> tuple[int, Sampler, bool]:
    """Version, sampler, and whether the request pinned the version by name.

    Raises:
        RequestError: the model is not served here.
        BackendError: the version cannot be opened.
    """
    current = deps.policy.current
    if is_current(deps, model):
        return current.version.id, current.sampler, False
    name, _, number = model.rpartition("@v")
    if name == deps.served_name and _ID.fullmatch(number):
        version = int(number)
        if version == current.version.id:
            return version, current.sampler, True
        try:
            sampler = await deps.serving.open_version(version)
            await deps.compute.own_round()
            return version, sampler, True
        except OutageError as error:
            deps.serving.outages.seen("serving", error)
            raise
        except LookupError:
            pass
    newest = deps.policy.newest.version.id
    raise RequestError(
        f"The model {shown(model)!r} is not served here; ask for {deps.served_name!r}, or for a "
        f"version of it, of which {deps.served_name}@v{newest} is the newest. "
        "--models gives it other names.",
        status=HTTPStatus.NOT_FOUND,
        code="model_not_found",
        param="model",
    )


async def _attach(
    deps: GatewayDeps,
    link: Continuation,
    named: Attribute,
    user: str,
    session_id: int,
    started: float,
) -> None:
    """Record the request as the next state, or a rating, of the turn before it."""
    found = heard(link.new, named, link.reply, others=deps.settings.chats.others_judge)
    if found.unknown:
        deps.ledger.turns.stop_waiting(link.turn_id)
    state = found.state
    if state is None:
        return
    said = outright(state.text) if state.role == "user" else None
    redact = deps.privacy.redact_any
    beside = [(writer, await redact(text)) for writer, text in state.beside]
    state = replace(state, text=await redact(state.text), beside=tuple(beside))
    reason = await redact(said.reason[:LONGEST_TEXT]) if said else ""
    if deps.index.has_forgotten(session_id, started):  # while its words were searched
        return
    if said is not None:
        # Before the next state, which would go to the judge. Agents retry requests, so it has a
        # key; no client's key begins with a newline.
        short = hashlib.sha256(reason.encode()).hexdigest()[:16]
        name = f"\nmessage after turn {link.turn_id}: {said.score} {short}"
        feedback = Feedback(float(said.score), reason, key=name)
        record(deps, user, About("turn", link.turn_id), feedback)
    if deps.ledger.turns.add_next_state(link.turn_id, state):
        deps.on_next_state()


def record(deps: GatewayDeps, user: str, about: About, said: Feedback) -> Given | None:
    """Record a user's explicit rating, and let it count; None: they have no such turn.

    Raises:
        KeyReusedError: its key was used for other feedback before.
        LedgerError: it cannot be written.
    """
    given = deps.ledger.feedback.give(user, about, said)
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


async def _params(deps: GatewayDeps, request: GenerationRequest, prompt: Prompt) -> SamplingParams:
    """Raises ContextLengthError when not even one token of a reply fits."""
    asked = request.max_tokens or deps.settings.max_reply_tokens
    left = deps.can.context_tokens - len(prompt.tokens)
    if left < 1:
        await refuse_without_room(deps, request)
        raise ContextLengthError(len(prompt.tokens), asked, deps.can.context_tokens)
    return SamplingParams(
        # Agents always ask for the same limit; near the end of the context less is left.
        max_tokens=min(asked, left),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop_tokens=deps.renderer.stop_tokens,
        stop=request.stop,
        schema=None if request.schema is None else request.schema[0],
    )
