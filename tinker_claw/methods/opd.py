"""OPD: on-policy distillation from the model that was told, in hindsight, what the user wanted.

A verdict alone teaches nothing here, and its reward is not used.
"""

from __future__ import annotations

from tinker_claw.methods.base import HINTED, Method, Signal, Teaching
from tinker_claw.types import HINT_TEMPLATE

HINT = Teaching("hint", tells=lambda known: known.hints, words=HINT_TEMPLATE, tokens=40)

OPD = Method(
    name="opd",
    learns_from="hints",
    needs=frozenset({Signal.HINT}),
    distill=1.0,
    teaching=HINT,
    admitted=HINTED,  # without a hint there is nothing to learn from
    taught=1.0,
)
