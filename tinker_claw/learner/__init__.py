"""Learning: judge next states, queue samples, take steps, publish versions."""

from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging, JudgingDeps
from tinker_claw.learner.learner import Learner, LearnerDeps
from tinker_claw.learner.restore import restore
from tinker_claw.learner.scoring import HintScorer

__all__ = ["Health", "HintScorer", "Judging", "JudgingDeps", "Learner", "LearnerDeps", "restore"]
