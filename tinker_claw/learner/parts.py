"""Objects that judging, learning, recovery and rollback of one run share.

Rule: one record, made once at start-up. What only one of them needs is passed separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinker_claw.billing.budget import Spending
from tinker_claw.config.settings import Gateway, Training
from tinker_claw.learner.health import Health
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods.base import Method
from tinker_claw.policy import PolicyHolder, Sampler, Trainer
from tinker_claw.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class LoopParts:
    """Shared objects of one run."""

    ledger: Ledger
    trainer: Trainer
    base: Sampler
    """The frozen base model."""
    method: Method
    policy: PolicyHolder
    telemetry: Telemetry
    health: Health
    spending: Spending
    training: Training
    reply_tokens: int = Gateway().max_reply_tokens
    """Most tokens of a reply where a request names no limit."""


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """Result of a step or a practice that is about to be committed."""

    sampler: Sampler
    metrics: dict[str, Any]
    published_at: float
    """When its version was published, by the monotonic clock."""
