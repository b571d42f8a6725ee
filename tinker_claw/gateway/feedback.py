"""POST /v1/feedback: explicit ratings of a reply or a session, by a user or their program.

Rule: a turn of another user, a forgotten, a private and a nonexistent one get the same answer,
after the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from tinker_claw.conversation.classify import session_key
from tinker_claw.errors import RequestError
from tinker_claw.formats.body import INT64, Fields, Object, load_body, without_halves
from tinker_claw.gateway.deps import HALF, GatewayDeps
from tinker_claw.gateway.limits import Caller
from tinker_claw.ledger.feedback import LONGEST_TEXT, About, Feedback, Given, KeyReusedError

PATH = "/v1/feedback"
MAX_BYTES: Final = 32_768
"""Largest body: room for the longest text, however it is escaped."""
MAX_NAME = 256
"""Characters of a key, and of other names of a client's."""
FIELDS = Fields("turn response_id session score text source final task group key")
_ABOUT = ("turn", "response_id", "session")


def read(body: bytes, headers: Mapping[str, str]) -> tuple[About, Feedback]:
    """Parse a request into what it is about and the feedback.

    Args:
        headers: names in lower case.

    Raises:
        RequestError: names the first field that is wrong.
    """
    fields = FIELDS.check(load_body(body))
    named = [name for name in _ABOUT if name in fields]
    if len(named) != 1:
        raise RequestError("Give one of turn, response_id and session, to say what is rated.")
    if "score" not in fields:
        raise RequestError("score is missing: a number from -1 to 1.", param="score")
    key = _name(fields, "key")
    sent = headers.get("idempotency-key", "").strip()
    if len(sent) > MAX_NAME or not sent.isprintable() or (key and sent and key != sent):
        raise RequestError(
            f"The header Idempotency-Key must be at most {MAX_NAME} printable characters, and the "
            "body's key, if it has one.",
            param="Idempotency-Key",
        )
    text = fields.text("text")
    if len(text) > LONGEST_TEXT:
        raise fields.wrong(f"has more than {LONGEST_TEXT} characters", "text")
    source = fields.get("source", "user")
    if source not in ("user", "client"):
        raise fields.wrong('must be "user" or "client"', "source")
    feedback = Feedback(
        score=fields.number("score", -1.0, 1.0, 0.0),
        text=text.strip(),
        source=source,
        final=fields.flag("final"),
        task=_name(fields, "task"),
        group=_name(fields, "group"),
        key=key or sent or None,
    )
    return _about(fields, named[0]), feedback


def _about(fields: Object, name: str) -> About:
    if name == "session":
        return About("session", session_key(fields.string(name)))
    if name == "response_id":
        return About("response", _name(fields, name) or "")
    return About("turn", fields.integer(name, 1, INT64) or 0)


def _name(fields: Object, at: str) -> str | None:
    name = fields.string(at) if at in fields else None
    if name and (len(name) > MAX_NAME or not name.isprintable()):
        raise fields.wrong(f"must be at most {MAX_NAME} printable characters", at)
    return name


async def take(
    deps: GatewayDeps, body: bytes, headers: Mapping[str, str], caller: Caller
) -> dict[str, Any]:
    """Record the feedback in a request, and return the answer.

    Raises:
        RequestError: it is malformed, or this user has no such turn.
        LedgerError: it could not be written.
    """
    whole = without_halves(body)
    if whole != body:
        deps.left_out.note([HALF])
    about, feedback = read(whole, headers)
    kept = deps.secrets.name
    if isinstance(about.name, str):
        about = replace(about, name=kept(about.name))
    feedback = replace(
        feedback,
        text=await deps.secrets.redact_any(feedback.text),
        task=feedback.task and kept(feedback.task),
        group=feedback.group and kept(feedback.group),
        key=feedback.key and kept(feedback.key),
    )
    try:
        recorded = record(deps, caller.user, about, feedback)
    except KeyReusedError as error:
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        raise RequestError(str(error), status=status, code="key_reused", param="key") from error
    if recorded is None:
        raise RequestError(
            "You have no such turn, reply or session: it was never recorded, or nothing of it is "
            "kept. `tinker-claw log turns` lists turns.",
            status=HTTPStatus.NOT_FOUND,
            code="not_found",
        )
    return {
        "object": "feedback",
        "id": recorded.id,
        "turn": recorded.turn_id,
        "repeated": recorded.repeated,
        "counts": recorded.unused is None,
        "because": recorded.unused,
    }


def record(deps: GatewayDeps, user: str, about: About, feedback: Feedback) -> Given | None:
    """Record a user's explicit rating, and let it count; None: they have no such turn.

    Raises:
        KeyReusedError: its key was used for other feedback before.
        LedgerError: it cannot be written.
    """
    recorded = deps.ledger.feedback.give(user, about, feedback)
    if recorded is not None and not recorded.repeated:
        deps.telemetry.feedback(
            user=user,
            turn=recorded.turn_id,
            score=feedback.score,
            source=feedback.source,
            final=feedback.final,
            counts=recorded.unused is None,
        )
        deps.wake_judging()
    return recorded
