"""Learning: judge next states, queue samples, take steps, publish versions."""

from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging, JudgingDeps
from tinker_claw.learner.learner import Learner, LearnerDeps
from tinker_claw.learner.observing import Observing
from tinker_claw.learner.restore import restore, restore_pin
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.learner.undoing import Undoing

__all__ = [
    "Health",
    "HintScorer",
    "Judging",
    "JudgingDeps",
    "Learner",
    "LearnerDeps",
    "Observing",
    "Undoing",
    "restore",
    "restore_pin",
]
