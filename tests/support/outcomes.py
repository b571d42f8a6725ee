"""Outcomes of requests from the columns that the ledger gives them."""

from __future__ import annotations

from typing import Any

from tinker_claw.served import Identity, Outcome, Place, Prompt
from tinker_claw.types import Completion, Kind, Told


def outcome(
    *,
    session_id: int,
    prompt: tuple[int, ...],
    completion: Completion,
    kind: Kind = Kind.MAIN,
    kind_reason: str = "test",
    policy_version: int = 0,
    hint_at: int | None = None,
    told: Told | None = None,
    request_text: str = "",
    history: tuple[str, ...] = (),
    **more: Any,
) -> Outcome:
    """Return an outcome with these values, whichever of its records holds them."""
    who: Any = {name: more.pop(name) for name in ("trace", "client") if name in more}
    place = {n: more.pop(n) for n in ("lost", "voices", "asked_by") if n in more}
    identity = Identity("key", kind, kind_reason, more.pop("call", ""), **who)
    return Outcome(
        Place(identity, session_id, history, request_text, **place),
        more.pop("user", "me"),
        policy_version,
        Prompt(prompt, hint_at, told=told),
        completion,
        **more,
    )
