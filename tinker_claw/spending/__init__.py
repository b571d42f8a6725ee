"""What a service costs: what was billed, what a step will cost, and the budget that stops it.

    estimate   tokens and dollars of a step, before they are spent; pure
    budget     counts what was billed, and lets work wait that does not fit the budget

Rule: serving never waits for money. Judging, the teacher and steps do.
"""

from tinker_claw.spending.budget import Budget, Spending, check_budget, price_in_force
from tinker_claw.spending.estimate import (
    Estimate,
    Habits,
    assumed,
    estimate,
    measured,
    step_usage,
    teacher_usage,
)

__all__ = [
    "Budget",
    "Estimate",
    "Habits",
    "Spending",
    "assumed",
    "check_budget",
    "estimate",
    "measured",
    "price_in_force",
    "step_usage",
    "teacher_usage",
]
