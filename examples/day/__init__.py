"""A day of a person with an agent: real OpenClaw, the real gateway, and a model from a script.

Rule: nothing here can learn, so no figure of learning may come from it. It gives counts, tokens and
dollars.
"""

from examples import StoppedError


class DayError(StoppedError):
    """Raised when the day cannot go on: a program did not start or did not answer."""
