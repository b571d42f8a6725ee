"""Combine: rewards and hints in one step, each with its own clip.

A sample may carry a reward, a hint, or both; what it lacks adds no gradient.
"""

from __future__ import annotations

from tinker_claw.methods.base import HINTED, Method, Signal
from tinker_claw.methods.opd import HINT

COMBINE = Method(
    name="combine",
    learns_from="verdicts and hints",
    needs=frozenset({Signal.REWARD, Signal.HINT}),
    reward=1.0,
    distill=1.0,
    teaching=HINT,
    taught=HINTED,
)
