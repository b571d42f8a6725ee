"""What must not be kept: secrets, personal data, and what was said in private. Pure."""

from __future__ import annotations

from tinker_claw.privacy.marker import NEAR_MISS, Marker, Privacy, marked, may_mark, mentioned
from tinker_claw.privacy.redactor import Redactor
from tinker_claw.privacy.rules import KINDS, SECRETS, Rule

__all__ = [
    "KINDS",
    "NEAR_MISS",
    "SECRETS",
    "Marker",
    "Privacy",
    "Redactor",
    "Rule",
    "marked",
    "may_mark",
    "mentioned",
]
