"""Turn the body of a request into a job that can be sampled.

Rule: everything that can be refused is refused here, before the first byte of the answer. The
current policy is read once; the job keeps it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from tinker_claw.conversation.attribution import (
    Attribute,
    asked_by,
    attribute,
    carried,
    newest_message_with_words,
    read,
    shows_own,
    without_volatile,
)
from tinker_claw.conversation.classify import identify
from tinker_claw.conversation.history import Conversation, find_next_state
from tinker_claw.conversation.outright import outright
from tinker_claw.errors import ContextLengthError, OutageError, RequestError
from tinker_claw.formats.base import GenerationRequest, ReplyHead, ReplyWriter, Route, WireFormat
from tinker_claw.formats.body import shorten_name
from tinker_claw.gateway import always
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.feedback import record
from tinker_claw.gateway.index import Continuation
from tinker_claw.gateway.lessons import with_lessons
from tinker_claw.gateway.limits import Caller
from tinker_claw.gateway.privacy import AFTERWARDS, without
from tinker_claw.gateway.prompt import build_prompt, new_messages, refuse_without_room
from tinker_claw.gateway.reading import is_large, parse
from tinker_claw.images import images_in, placed
from tinker_claw.ledger.feedback import ENDED, LONGEST_TEXT, About, Feedback
from tinker_claw.ledger.lessons import Lesson
from tinker_claw.policy import Sampler
from tinker_claw.privacy.marker import Privacy
from tinker_claw.served import Identity, Place, Prompt, RequestKind
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import (
    Images,
    Kind,
    Piece,
    PlacedImage,
    SamplingParams,
    Writer,
)

PICTURED = TurnRefusal(Reason.IMAGES)
NOT_THEIRS = TurnRefusal(Reason.OTHERS_IMAGE)
"""Why a turn with images is not trained with --images serve, or with --images train."""
UNASKED = TurnRefusal(Reason.RATING)
"""Why a reply is not trained on if the user's message was nothing but a verdict."""
UNFIT = "Leave that out in its settings, or start with --sampling ours, which goes before them"
_LONGEST_NAME = 120
"""Characters of the name of a piece that are kept."""
_ID = re.compile(r"[0-9]{1,18}")
"""Number of a version; a longer one is invalid."""


NOTHING_TO_RATE = (
    "There is nothing to rate yet: a thumb, /good or /bad rates the reply before it, and this "
    "conversation has none."
)


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be sampled, captured and sent."""

    caller: Caller
    request: GenerationRequest
    place: Place
    version: int
    sampler: Sampler
    prompt: Prompt
    params: SamplingParams
    writer: ReplyWriter
    started: float
    """time.monotonic() when the request came in, seconds."""
    privacy: Privacy
    unasked: str | None = None
    """The reply, where the model is not asked and nothing is kept; None: it is sampled."""

    @property
    def untrained_because(self) -> TurnRefusal | None:
        """Reason why this turn cannot be trained on, as far as the request tells."""
        who = self.place.identity
        if who.kind is Kind.SIDE:
            return TurnRefusal(Reason.SIDE, who.reason)
        if who.call is RequestKind.VERDICT:
            return UNASKED
        if who.done and not who.episode:  # which is trained on its outcome
            return ENDED
        if self.privacy is Privacy.AFTER:
            return AFTERWARDS
        if self.place.holds is not None:
            return TurnRefusal(Reason.HOLDS, self.place.holds)
        return self.place.pictured or self.params.unfit_because()

    @property
    def images(self) -> Images:
        """The images in its prompt."""
        pairs = zip(self.prompt.images, images_in(self.request.messages), strict=True)
        return tuple(PlacedImage(*at, image.clean(), image.format) for at, image in pairs)


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A request, with what is known of it before its place in a conversation is."""

    request: GenerationRequest
    user: str
    identity: Identity
    named: Attribute
    """Gives every piece of a message its writer."""
    privacy: Privacy
    started: float
    """time.monotonic() when it came in, seconds."""
    large: bool
    """See `is_large`."""


async def admit(
    deps: GatewayDeps,
    wire: WireFormat,
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
    started, user = time.monotonic(), caller.user
    request = await parse(deps, wire, route, body, caller)
    version, sampler, pinned = await choose(deps, request.model)
    identity = _identify(deps, request, headers, version if pinned else None)
    named = _writers(deps, request, identity, user)
    request, command = _without_commands(request, identity, named)
    privacy = deps.privacy.privacy(user, identity, headers, request, named)
    large = is_large(body)
    incoming = _Incoming(request, user, identity, named, privacy, started, large)
    place, link, lessons = Place(identity), None, list[Lesson]()
    unasked = always.PRIVATE if command and command.alone else None
    if privacy is not Privacy.PRIVATE:
        await _remember(deps, wire, incoming)
        incoming = await _without_secrets(deps, incoming, headers)
        if not pinned:
            answers = deps.policy.current
            version, sampler = answers.version.id, answers.sampler
        place, link = await _place(deps, incoming)
        if link is None and _rates_nothing(deps, incoming, place):
            unasked = NOTHING_TO_RATE
        else:
            lessons = _lessons(deps, incoming, place, version)
        if command is not None and privacy is Privacy.OPEN:
            # Behind the choice for this session: it holds from the next one on.
            held = await always.hold(deps, user, place.session_id, command)
            unasked = held if command.alone else None
        if link is not None and unasked is None:
            # Before the prompt: what the user said counts even when it does not fit the context.
            await _attach(deps, incoming, link, place)
    forget, sampled = privacy is not Privacy.OPEN, _telling(deps, request, lessons)
    lesson_ids = [lesson.id for lesson in lessons]
    prompt = await build_prompt(
        deps, request, link, lesson_request=sampled, lessons=lesson_ids, forget=forget, large=large
    )
    params = await _params(deps, request, prompt, identity)
    fit = identity.kind is Kind.MAIN and (place.pictured or params.unfit_because()) is None
    return Job(
        caller=caller,
        request=sampled or request,
        place=place,
        version=version,
        sampler=sampler,
        prompt=prompt,
        params=replace(params, student_topk=deps.student_topk if fit else 0),
        writer=wire.reply(request, ReplyHead(version, len(prompt.tokens), int(time.time()))),
        started=started,
        privacy=privacy,
        unasked=unasked,
    )


def _without_commands(
    request: GenerationRequest, identity: Identity, named: Attribute
) -> tuple[GenerationRequest, always.Always | None]:
    """Return the request without its owner's commands, and the newest message's command."""
    if identity.kind is not Kind.MAIN or not _is_personal(identity):
        return request, None
    messages, command = always.take_out(request.messages, named)
    return replace(request, messages=messages), command


def _telling(
    deps: GatewayDeps, request: GenerationRequest, lessons: Sequence[Lesson]
) -> GenerationRequest | None:
    """Return the request with lessons in it; None: there are none."""
    if not lessons:
        return None
    messages = with_lessons(request.messages, lessons, as_system=deps.renderer.takes_system)
    return replace(request, messages=messages)


def _rates_nothing(deps: GatewayDeps, incoming: _Incoming, place: Place) -> bool:
    """Return whether an owner rates although no reply of the model is there."""
    if incoming.privacy is not Privacy.OPEN or not _is_owners(place):
        return False
    if incoming.identity.kind is not Kind.MAIN or outright(place.text) is None:
        return False
    kept = without_volatile(incoming.request.messages)
    replies = [m for m in kept if m["role"] not in ("system", "developer", "user")]
    if any(reply["content"] != NOTHING_TO_RATE for reply in replies):
        return False
    return not deps.ledger.turns.latest(place.session_id, most=1)


def _writers(
    deps: GatewayDeps, request: GenerationRequest, identity: Identity, user: str
) -> Attribute:
    """Return what gives every piece of the request's messages its writer."""
    return partial(
        attribute,
        surface=identity.surface,
        is_owner=partial(deps.owners.has, user),
        carried=carried(request.messages),
    )


async def _remember(deps: GatewayDeps, wire: WireFormat, incoming: _Incoming) -> None:
    """Cache what may be sent again, and search the request for secrets."""
    if incoming.privacy is Privacy.OPEN and incoming.large:
        await deps.compute.aside(partial(wire.remember, incoming.request, incoming.user))
    elif incoming.privacy is Privacy.OPEN:
        wire.remember(incoming.request, incoming.user)
    await deps.privacy.look_at(incoming.request)


async def _without_secrets(
    deps: GatewayDeps, incoming: _Incoming, headers: Mapping[str, str]
) -> _Incoming:
    """Name the session without the secrets that its first messages hold: its key is a digest of
    those."""
    identity = incoming.identity
    if identity.named or deps.privacy.holds(incoming.request) is None:
        return incoming
    opening = await deps.privacy.redacted(incoming.request)
    return replace(incoming, identity=replace(identity, key=identify(opening, headers).key))


def _lessons(deps: GatewayDeps, incoming: _Incoming, place: Place, version: int) -> list[Lesson]:
    """Return the lessons in the session's prompts."""
    # What was said in private is not known, and might be taken for something else.
    is_open = incoming.privacy is Privacy.OPEN
    if not is_open or deps.lessons is None or incoming.identity.kind is not Kind.MAIN:
        return []
    opener = incoming.user if _is_owners(place) else None
    return deps.lessons.for_session(place.session_id, opener, version)


def _pictured(deps: GatewayDeps, incoming: _Incoming) -> TurnRefusal | None:
    """Return why nothing after a request's images is trained; None: it is, or there are none."""
    with_images = [message for message in incoming.request.messages if placed(message["content"])]
    if with_images and deps.settings.images != "train":
        return PICTURED
    own = all(shows_own(message, incoming.named(message)) for message in with_images)
    return None if own else NOT_THEIRS


def _is_owners(place: Place) -> bool:
    """Return whether an owner of the gateway opens a conversation of their own here."""
    return place.asked_by is Writer.OWNER and _is_personal(place.identity)


def _is_personal(who: Identity) -> bool:
    """Return whether a conversation is one person's, and no attempt at a task."""
    tried = who.episode or (who.attempt is not None and who.attempt.group is not None)
    return not (tried or who.surface.group)


def _identify(
    deps: GatewayDeps,
    request: GenerationRequest,
    headers: Mapping[str, str],
    pinned: int | None,
) -> Identity:
    """Identify the session. `pinned`: the version that the request asks for by name."""
    identity = deps.privacy.identity(identify(request, headers), headers)
    identity = replace(identity, surface=deps.owners.of(identity.surface))
    if pinned is not None:
        reason = f"asked for version {pinned}; {identity.reason}"
        identity = replace(identity, kind=Kind.SIDE, reason=reason, attempt=None)
    return identity


async def _place(deps: GatewayDeps, incoming: _Incoming) -> tuple[Place, Continuation | None]:
    """Return the request's place in its conversation, and the turn that it continues."""
    request, identity = incoming.request, incoming.identity
    is_open = incoming.privacy is Privacy.OPEN
    session_id = deps.index.session(incoming.user, identity)
    conversed = partial(Conversation.of, request.messages)
    conversation = await deps.compute.aside(conversed) if incoming.large else conversed()
    link, lost = None, False
    if is_open:
        session_id = deps.index.anew(session_id, identity, conversation)
    if identity.kind is Kind.MAIN:
        link = deps.index.find(session_id, conversation, compacted=is_open)
        if link is None and is_open:
            lost = deps.index.is_lost(session_id, conversation)
    last = newest_message_with_words(request.messages)
    new = new_messages(request.messages)
    holds, secrets = deps.privacy.search(request, incoming.named)
    text = await deps.privacy.redact_any(read(last).words) if last else ""
    voices = [await _kept(deps, piece) for message in new for piece in incoming.named(message)]
    place = Place(
        identity,
        session_id,
        history=conversation.digests,
        text=without(text, secrets),
        holds=holds,
        secrets=secrets,
        lost=lost,
        voices=tuple(voices),
        asked_by=asked_by(incoming.named(last)) if last else Writer.OWNER,
        pictured=_pictured(deps, incoming),
    )
    return place, link


async def _kept(deps: GatewayDeps, piece: Piece) -> Piece:
    """A piece with a name that may be kept: of one that is unclear it holds a line."""
    if piece.writer is not Writer.UNKNOWN:
        return piece
    return replace(piece, what=(await deps.privacy.redact_any(piece.what))[:_LONGEST_NAME])


async def count(
    deps: GatewayDeps, wire: WireFormat, route: Route, body: bytes, caller: Caller
) -> int:
    """Count the tokens of a request's prompt; nothing of it is kept.

    Raises:
        RequestError: it could not be served as asked.
    """
    request = await parse(deps, wire, route, body, caller)
    await choose(deps, request.model)
    large = is_large(body)
    prompt = await build_prompt(deps, request, None, forget=True, large=large)
    return len(prompt.tokens)


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
        f"The model {shorten_name(model)!r} is not served here; ask for {deps.served_name!r}, or "
        f"for a version of it, of which {deps.served_name}@v{newest} is the newest. "
        "--models gives it other names.",
        status=HTTPStatus.NOT_FOUND,
        code="model_not_found",
        param="model",
    )


async def _attach(deps: GatewayDeps, incoming: _Incoming, link: Continuation, place: Place) -> None:
    """Record the request as the next state, or a rating, of the turn before it."""
    others = deps.settings.chats.others_judge
    followup = find_next_state(link.new, incoming.named, link.reply, others=others)
    if followup.unknown:
        deps.ledger.turns.stop_waiting(link.turn_id)
    state = followup.state
    if state is None:
        return
    verdict = outright(state.text) if state.role == "user" else None

    async def redact(text: str) -> str:
        return without(await deps.privacy.redact_any(text), place.secrets)

    beside = [(writer, await redact(text)) for writer, text in state.beside]
    state = replace(state, text=await redact(state.text), beside=tuple(beside))
    reason = await redact(verdict.reason[:LONGEST_TEXT]) if verdict else ""
    # While its words were searched.
    if deps.index.has_forgotten(place.session_id, incoming.started):
        return
    if verdict is not None:
        # Before the next state, which would go to the judge. Agents retry requests, so it has a
        # key; no client's key begins with a newline.
        short = hashlib.sha256(reason.encode()).hexdigest()[:16]
        name = f"\nmessage after turn {link.turn_id}: {verdict.score} {short}"
        feedback = Feedback(float(verdict.score), reason, key=name)
        record(deps, incoming.user, About("turn", link.turn_id), feedback)
    if deps.ledger.turns.add_next_state(link.turn_id, state):
        deps.on_next_state()


async def _params(
    deps: GatewayDeps, request: GenerationRequest, prompt: Prompt, identity: Identity
) -> SamplingParams:
    """The parameters of a reply; notes those that keep it from being trained.

    Raises:
        ContextLengthError: not even one token of a reply fits.
    """
    reply_tokens = request.max_tokens or deps.settings.max_reply_tokens
    left = deps.can.context_tokens - len(prompt.tokens)
    if left < 1:
        await refuse_without_room(deps, request)
        raise ContextLengthError(len(prompt.tokens), reply_tokens, deps.can.context_tokens)
    params = SamplingParams(
        # Agents always ask for the same limit; near the end of the context less is left.
        max_tokens=min(reply_tokens, left),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop_tokens=deps.renderer.stop_tokens,
        stop=request.stop,
    )
    because = params.unfit_because()
    if because is None or identity.kind is not Kind.MAIN:
        return params
    if deps.settings.sampling == "ours":
        return replace(params, temperature=1.0, top_p=1.0, top_k=None)
    client = identity.client or "a client without a name"
    deps.unfit.note(
        [f"{client} has replies sampled at {because.detail}: they train nothing. {UNFIT}"]
    )
    return params
