"""What must not be kept: secrets, personal data, and what was said in private. Pure."""

from __future__ import annotations

from tinker_claw.privacy.marker import Privacy, marked, mentioned
from tinker_claw.privacy.redactor import Redactor
from tinker_claw.privacy.rules import KINDS, SECRETS, Rule

__all__ = ["KINDS", "SECRETS", "Privacy", "Redactor", "Rule", "marked", "mentioned"]
