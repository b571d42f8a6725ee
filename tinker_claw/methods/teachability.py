"""Whether what a teacher is told teaches: pure statistics over how it changes what it thinks.

The gain of a reply is what a told teacher gives it more than the same teacher untold, per token and
bounded as distillation bounds it. A text that teaches raises the replies that its user accepts, and
not those that they reject: what counts is the difference of the two. Either alone would measure how
a text disturbs a prompt, and a preference under the text alone would measure base and prompt.

All replies are compared behind prompts that hold no correction yet. Behind one, a rejected reply is
often a damaged one, which any text makes less likely; counted, it would speak for every hint
(measured on the demo's model: for one that lowers acceptance from .15 to .01, +.13 behind
corrections and -.02 without).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from tinker_claw.methods.advantages import token_advantages

FEWEST = 3
"""Replies of each kind below which nothing is concluded."""
NEWEST = 32
"""Replies of each kind that count: a policy changes, and so does what a user wants."""
UNKNOWN_WEIGHT = 0.25
"""Of distillation, until it is known whether it teaches."""
EVERY = 8
"""Once it is known, so many taught turns pass between two that are measured."""
_T95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
    *(1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697),
)
"""Student's t that 5 % exceed, for 1, 2 ... 30 degrees of freedom; beyond, the last one is a little
too wide."""

_ROUNDING = 1e-9


def reply_gain(told_T: Sequence[float], untold_T: Sequence[float], clip: float) -> float:
    """mean over t of clip(log pi_T(y_t | text) - log pi_T(y_t), -C, C), in nats per token.

    Args:
        told_T: (T,) the teacher's logprobs of a reply, told the text.
        untold_T: (T,) the same teacher's, of the same reply behind the same prompt without it.
        clip: C in nats; 0 switches the bound off.
    """
    return fmean(token_advantages(told_T, untold_T, clip))


@dataclass(frozen=True, slots=True)
class Teachability:
    """How much more a user's accepted replies gain than rejected ones, by what is told."""

    accepted: int
    """Replies that were measured."""
    rejected: int
    mean: float | None
    """Nats per token, accepted minus rejected; None: too few replies."""
    interval: tuple[float, float] | None
    """90 %, of Welch's test (Welch 1947, Biometrika 34:28-35)."""

    @property
    def teaches(self) -> bool | None:
        """None: not known."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return None
        return self.interval[0] > 0

    @property
    def weight(self) -> float:
        """What distillation is multiplied by."""
        return UNKNOWN_WEIGHT if self.teaches is None else float(self.teaches)

    @property
    def settled(self) -> bool:
        """Measuring more would hardly change it."""
        return self.teaches is not None or min(self.accepted, self.rejected) >= NEWEST

    def __str__(self) -> str:
        of = f"{self.accepted} accepted and {self.rejected} rejected replies"
        if self.mean is None or self.interval is None:
            return f"not known yet, of {of}"
        low, high = self.interval
        word = {True: "they teach", False: "they teach nothing", None: "not known yet"}
        told = f"{self.mean:+.3f} nats per token ({low:+.3f} to {high:+.3f})"
        return f"{word[self.teaches]}: {told}, of {of}"


def teachability(accepted: Sequence[float], rejected: Sequence[float]) -> Teachability:
    """From the gains of replies, the newest first; those beyond `NEWEST` do not count."""
    good, bad = accepted[:NEWEST], rejected[:NEWEST]
    if min(len(good), len(bad)) < FEWEST:
        return Teachability(len(good), len(bad), None, None)
    mean = fmean(good) - fmean(bad)
    half = _half_width(good, bad)
    return Teachability(len(good), len(bad), mean, (mean - half, mean + half))


def _half_width(a: Sequence[float], b: Sequence[float]) -> float:
    squares = [variance(some) / len(some) for some in (a, b)]
    error = sum(squares)
    if error == 0:
        return 0.0
    shares = (square / error for square in squares)
    freedom = 1 / sum(s**2 / (len(x) - 1) for s, x in zip(shares, (a, b), strict=True))
    return _T95[min(len(_T95), int(freedom + _ROUNDING)) - 1] * math.sqrt(error)
