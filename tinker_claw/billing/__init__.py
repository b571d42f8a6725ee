"""Costs of a service: what was billed, what a step will cost, and the budget that limits it.

    estimate   tokens and dollars of a step, before they are spent; pure
    budget     counts what was billed, and lets work wait that does not fit the budget

Rule: serving never waits for money. Judging, the teacher and steps do.
"""
