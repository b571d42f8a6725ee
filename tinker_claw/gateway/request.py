"""Turn the body of a request into a job that can be sampled.

Rule: everything that can be refused is refused here, before the first byte of the answer. The
current version is read once; the job keeps it.
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
from tinker_claw.conversation.openclaw import Sender
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
from tinker_claw.gateway.parsing import is_large, parse
from tinker_claw.gateway.privacy import Kept
from tinker_claw.gateway.prompt import build_prompt, new_messages, refuse_without_room
from tinker_claw.images import images_in
from tinker_claw.ledger.feedback import LONGEST_TEXT, SESSION_DONE, About, Feedback
from tinker_claw.ledger.lessons import Lesson
from tinker_claw.policy import Policy, Sampler
from tinker_claw.privacy.marker import Privacy
from tinker_claw.served import Identity, Place, Prompt, RequestKind
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import (
    Images,
    Kind,
    Piece,
    PlacedImage,
    PolicyVersion,
    SamplingParams,
    Writer,
)

PICTURED = TurnRefusal(Reason.IMAGES)
"""Why a turn with images is not trained with --images serve."""
NOT_THEIRS = TurnRefusal(Reason.OTHERS_IMAGE)
"""Why a turn with somebody else's image is not trained with --images train."""
ONLY_A_RATING = TurnRefusal(Reason.RATING)
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
    started, large = time.monotonic(), is_large(body)
    # 1. Read it, and open the version that it asks for by name.
    request = await parse(deps, wire, route, body, caller)
    named_version = await open_named_version(deps, request.model)
    # 2. Identify its session and purpose, and who wrote what.
    incoming = _identify(
        deps, request, headers, caller, named_version, started=started, large=large
    )
    # 3. Decide what of it is kept, before anything is written.
    kept = await deps.privacy.decide(
        caller.user, incoming.identity, headers, incoming.request, incoming.writers_of
    )
    if kept.is_open:
        await deps.compute.aside(partial(wire.remember, incoming.request, caller.user), when=large)
    # 4. Place it in its conversation, and let it rate the turn before.
    answering = named_version or deps.policy.current
    placed = await _place(deps, incoming, kept, answering.version.id)
    # 5. Render its prompt.
    return await _job(
        deps, wire, incoming, kept, answering, placed, by_name=named_version is not None
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be sampled, captured and sent."""

    caller: Caller
    request: GenerationRequest
    """As the model is shown it, lessons included."""
    place: Place
    kept: Kept
    version: int
    by_name: bool
    """Whether the request asks for this version by name."""
    sampler: Sampler
    prompt: Prompt
    params: SamplingParams
    writer: ReplyWriter
    started: float
    """time.monotonic() when the request came in, seconds."""
    own_answer: str | None = None
    """The reply, where the model is not asked and nothing is kept; None: it is sampled."""

    @property
    def untrained_because(self) -> TurnRefusal | None:
        """Reason why this turn cannot be trained on, as far as the request tells."""
        who = self.place.identity
        if who.kind is Kind.SIDE:
            return TurnRefusal(Reason.SIDE, who.reason)
        if who.request_kind is RequestKind.VERDICT:
            return ONLY_A_RATING
        if who.done and not who.episode:  # which is trained on its outcome
            return SESSION_DONE
        return self.kept.reason or self.place.images_refused or self.params.unfit_because()

    @property
    def images(self) -> Images:
        """The images in its prompt."""
        if not self.prompt.images:
            return ()
        pairs = zip(self.prompt.images, images_in(self.request.messages), strict=True)
        return tuple(PlacedImage(*at, image.clean(), image.format) for at, image in pairs)


# Step 1, beside `parsing.parse`: the version


def is_current(deps: GatewayDeps, model: str) -> bool:
    """Return whether a request names the model, and no version of it."""
    return model == deps.served_name or deps.settings.is_alias(model)


def version_named(deps: GatewayDeps, model: str) -> PolicyVersion | None:
    """Return the version that a request asks for by name; None: it asks for the current one.

    Raises:
        RequestError: the model is not served here.
    """
    if is_current(deps, model):
        return None
    name, _, number = model.rpartition("@v")
    if name == deps.served_name and _ID.fullmatch(number):
        version = deps.ledger.versions.get(int(number))
        if version is not None:
            return version
    newest = deps.policy.newest.version.id
    raise RequestError(
        f"The model {shorten_name(model)!r} is not served here; ask for {deps.served_name!r}, or "
        f"for a version of it, of which {deps.served_name}@v{newest} is the newest. "
        "--models gives it other names.",
        status=HTTPStatus.NOT_FOUND,
        code="model_not_found",
        param="model",
    )


async def open_named_version(deps: GatewayDeps, model: str) -> Policy | None:
    """Open the version that a request asks for by name; None: it asks for the current one.

    Raises:
        RequestError: the model is not served here.
        BackendError: the version cannot be opened.
    """
    version = version_named(deps, model)
    if version is None:
        return None
    current = deps.policy.current
    if version.id == current.version.id:
        return current
    try:
        sampler = await deps.serving.open_version(version.id)
    except OutageError as error:
        deps.serving.outages.seen("serving", error)
        raise
    await deps.compute.own_round()
    return Policy(version, sampler)


# Step 2: who asks


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A request whose session, purpose and writers are known."""

    request: GenerationRequest
    """Without its owner's commands."""
    caller: Caller
    identity: Identity
    """Its key may hold a secret; that of its `Place` does not."""
    writers_of: Attribute
    """Gives every piece of a message its writer."""
    strangers: Sequence[Sender]
    """Senders, of the messages whose writers were asked for so far, who are no owners."""
    command: always.Always | None
    """The command in its newest message."""
    started: float
    """time.monotonic() when it came in, seconds."""
    large: bool
    """See `is_large`."""


def _identify(
    deps: GatewayDeps,
    request: GenerationRequest,
    headers: Mapping[str, str],
    caller: Caller,
    named_version: Policy | None,
    *,
    started: float,
    large: bool,
) -> _Incoming:
    """Identify session, purpose and writers, and take the owner's commands out."""
    inferred = deps.secrets.identity(identify(request, headers), headers)
    if named_version is not None:
        reason = f"asked for version {named_version.version.id}; {inferred.reason}"
        inferred = replace(inferred, kind=Kind.SIDE, reason=reason, attempt=None)
    identity = replace(inferred, surface=deps.owners.of(inferred.surface))
    strangers = list[Sender]()

    def is_owner(sender: Sender) -> bool:
        owner = deps.owners.is_owner(sender)
        if not owner:
            strangers.append(sender)
        return owner

    writers_of = partial(
        attribute,
        surface=identity.surface,
        is_owner=is_owner,
        carried=carried(request.messages),
    )
    obeys = identity.kind is Kind.MAIN and _is_personal(identity)
    sent = request.messages
    messages, command = always.take_out(sent, writers_of) if obeys else (sent, None)
    bare = request if messages is sent else replace(request, messages=messages)
    return _Incoming(bare, caller, identity, writers_of, strangers, command, started, large)


def _is_personal(who: Identity) -> bool:
    """Return whether a conversation is one person's, and no episode."""
    return not (who.episode or who.surface.group)


# Step 3 is `privacy.SessionPrivacy.decide`
# Step 4: its place in a conversation


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request's place, and what follows from it."""

    place: Place
    link: Continuation | None = None
    """The turn that it continues; None: none."""
    lessons: Sequence[Lesson] = ()
    """The lessons in its session's prompts."""
    own_answer: str | None = None
    """See `Job`."""


async def _place(deps: GatewayDeps, incoming: _Incoming, kept: Kept, version: int) -> _Placed:
    """Place a request in its conversation, and record it as what came after the turn before."""
    if kept.privacy is Privacy.PRIVATE:
        nowhere = Place(incoming.identity)
        return _Placed(nowhere, own_answer=await _obey(deps, incoming, kept, nowhere))
    place, link = await _find(deps, incoming, kept)
    if kept.is_open and link is None and _rates_nothing(deps, incoming, place):
        return _Placed(place, own_answer=NOTHING_TO_RATE)
    # Before a wish is held: it holds from the next session on.
    lessons = _lessons(deps, incoming, place, version) if kept.is_open else ()
    own_answer = await _obey(deps, incoming, kept, place)
    if link is not None and own_answer is None:
        # Before the prompt: what the user said counts even when it does not fit the context.
        await _attach(deps, incoming, kept, link, place)
    return _Placed(place, link, lessons, own_answer)


async def _find(
    deps: GatewayDeps, incoming: _Incoming, kept: Kept
) -> tuple[Place, Continuation | None]:
    """Return the request's place in its conversation, and the turn that it continues."""
    request, writers_of, index = incoming.request, incoming.writers_of, deps.index
    who, key = incoming.identity, kept.key
    identity = who if key is None else replace(who, key=key)
    converse = partial(Conversation.of, request.messages)
    conversation = await deps.compute.aside(converse, when=incoming.large)
    named_id = index.open_session(incoming.caller.user, identity)
    session_id = index.anew(named_id, identity, conversation) if kept.is_open else named_id
    is_main, link = identity.kind is Kind.MAIN, None
    if is_main:
        link = index.find(session_id, conversation, behind_summary=kept.is_open)
    last, new = newest_message_with_words(request.messages), new_messages(request.messages)
    place = Place(
        identity,
        session_id,
        history=conversation.digests,
        text=await deps.secrets.redact_any(read(last).words, kept.secrets) if last else "",
        holds_secret=bool(kept.secrets),
        lost=kept.is_open and is_main and link is None and index.is_lost(session_id, conversation),
        voices=await _new_pieces(deps, [piece for m in new for piece in writers_of(m)]),
        asked_by=asked_by(writers_of(last)) if last else Writer.OWNER,
        images_refused=_images_refused(deps, incoming),
    )
    for stranger in incoming.strangers if kept.is_open else ():
        deps.owners.note_stranger(incoming.caller.user, stranger)
    return place, link


async def _obey(deps: GatewayDeps, incoming: _Incoming, kept: Kept, place: Place) -> str | None:
    """Hold the wish of an owner's command; return the answer, if the message asks nothing else."""
    command = incoming.command
    if command is None:
        return None
    answer = always.PRIVATE
    if kept.is_open:
        answer = await always.hold(deps, incoming.caller.user, place.session_id, command)
    return answer if command.alone else None


async def _new_pieces(deps: GatewayDeps, pieces: list[Piece]) -> tuple[Piece, ...]:
    """Return pieces with names that may be kept: one whose writer is unknown is named by its first
    line, which may hold a secret."""
    for at, piece in enumerate(pieces):
        if piece.writer is Writer.UNKNOWN:
            name = await deps.secrets.redact_any(piece.what)
            pieces[at] = replace(piece, what=name[:_LONGEST_NAME])
    return tuple(pieces)


def _images_refused(deps: GatewayDeps, incoming: _Incoming) -> TurnRefusal | None:
    """Return why nothing after a request's images is trained; None: it is, or there are none."""
    messages = incoming.request.messages
    if not images_in(messages):
        return None
    if deps.settings.images != "train":
        return PICTURED
    own = all(shows_own(message, incoming.writers_of(message)) for message in messages)
    return None if own else NOT_THEIRS


def _is_owners(place: Place) -> bool:
    """Return whether an owner of the gateway opens a conversation of their own here."""
    return place.asked_by is Writer.OWNER and _is_personal(place.identity)


def _rates_nothing(deps: GatewayDeps, incoming: _Incoming, place: Place) -> bool:
    """Return whether an owner rates although no reply of the model is there."""
    is_main = incoming.identity.kind is Kind.MAIN and incoming.command is None
    if not (is_main and _is_owners(place) and outright(place.text)):
        return False
    asking = ("system", "developer", "user")
    replies = (m for m in without_volatile(incoming.request.messages) if m["role"] not in asking)
    if any(reply["content"] != NOTHING_TO_RATE for reply in replies):
        return False
    return not deps.ledger.turns.latest(place.session_id, most=1)


def _lessons(
    deps: GatewayDeps, incoming: _Incoming, place: Place, version: int
) -> Sequence[Lesson]:
    """Return the lessons in the session's prompts."""
    if deps.lessons is None or incoming.identity.kind is not Kind.MAIN:
        return ()
    opener = incoming.caller.user if _is_owners(place) else None
    return deps.lessons.for_session(place.session_id, opener, version)


async def _attach(
    deps: GatewayDeps, incoming: _Incoming, kept: Kept, link: Continuation, place: Place
) -> None:
    """Record the request as the next state, or a rating, of the turn before it."""
    others = deps.settings.chats.others_judge
    followup = find_next_state(link.new, incoming.writers_of, link.reply, others=others)
    if followup.unknown:
        deps.ledger.turns.stop_waiting(link.turn_id)
    state = followup.state
    if state is None:
        return
    rating = outright(state.text) if state.role == "user" else None
    redact = partial(deps.secrets.redact_any, secrets=kept.secrets)
    text = await redact(state.text)
    beside = tuple([(writer, await redact(words)) for writer, words in state.beside])
    reason = await redact(rating.reason[:LONGEST_TEXT]) if rating else ""
    # While its words were searched.
    if deps.index.has_forgotten(place.session_id, incoming.started):
        return
    if rating is not None:
        # Before the next state, which would go to the judge. Agents retry requests, so it has a
        # key; no client's key begins with a newline.
        short = hashlib.sha256(reason.encode()).hexdigest()[:16]
        name = f"\nmessage after turn {link.turn_id}: {rating.score} {short}"
        feedback = Feedback(float(rating.score), reason, key=name)
        record(deps, incoming.caller.user, About("turn", link.turn_id), feedback)
    if deps.ledger.turns.add_next_state(link.turn_id, replace(state, text=text, beside=beside)):
        deps.wake_judging()


# Step 5: what the model is shown


async def _job(
    deps: GatewayDeps,
    wire: WireFormat,
    incoming: _Incoming,
    kept: Kept,
    answering: Policy,
    placed: _Placed,
    *,
    by_name: bool,
) -> Job:
    """Render the prompt, and make the job."""
    request, lesson_request = incoming.request, None
    if placed.lessons:
        as_system = deps.renderer.takes_system
        messages = with_lessons(request.messages, placed.lessons, as_system=as_system)
        lesson_request = replace(request, messages=messages)
    prompt = await build_prompt(
        deps,
        request,
        placed.link,
        lesson_request=lesson_request,
        lessons=[lesson.id for lesson in placed.lessons],
        forget=not kept.is_open,
        large=incoming.large,
    )
    return Job(
        caller=incoming.caller,
        request=lesson_request or request,
        place=placed.place,
        kept=kept,
        version=answering.version.id,
        by_name=by_name,
        sampler=answering.sampler,
        prompt=prompt,
        params=await _params(deps, request, prompt, placed.place),
        writer=wire.reply(
            request, ReplyHead(answering.version.id, len(prompt.tokens), int(time.time()))
        ),
        started=incoming.started,
        own_answer=placed.own_answer,
    )


async def _params(
    deps: GatewayDeps, request: GenerationRequest, prompt: Prompt, place: Place
) -> SamplingParams:
    """Return the parameters of a reply; notes those that keep it from being trained.

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
    who, because = place.identity, params.unfit_because()
    if who.kind is not Kind.MAIN:
        return params
    topk = 0 if place.images_refused else deps.student_topk
    if because is None:
        return replace(params, student_topk=topk)
    if deps.settings.sampling == "ours":
        return replace(params, temperature=1.0, top_p=1.0, top_k=None, student_topk=topk)
    client = who.client or "a client without a name"
    deps.unfit.note(
        [f"{client} has replies sampled at {because.detail}: they train nothing. {UNFIT}"]
    )
    return params


# Beside turns


async def count(
    deps: GatewayDeps, wire: WireFormat, route: Route, body: bytes, caller: Caller
) -> int:
    """Count the tokens of a request's prompt; nothing of it is kept.

    Raises:
        RequestError: it could not be served as asked.
    """
    request = await parse(deps, wire, route, body, caller)
    version_named(deps, request.model)
    prompt = await build_prompt(deps, request, None, forget=True, large=is_large(body))
    return len(prompt.tokens)
