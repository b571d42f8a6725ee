"""A method of no use to anybody: the teacher is told what the user asked in return."""

from __future__ import annotations

from tinker_claw.methods.base import Method, Signal, Teaching

NUDGE = Method(
    name="nudge",
    learns_from="verdicts, and questions in return",
    needs=frozenset({Signal.REWARD, Signal.NEXT_STATE}),
    reward_weight=0.5,
    distill_weight=2.0,
    teaching=Teaching(
        "question",
        tells=lambda known: (
            (known.next_state.text,)
            if known.next_state is not None and "?" in known.next_state.text
            else ()
        ),
        words="\n\nWhat they asked in return: {hint}",
        tokens=60,
        most=200,
    ),
    admitted=0.5,
    taught=0.25,
)
