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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median

from tinker_claw.methods.advantages import token_advantages

NEWEST = 32
"""Replies of each kind that count: a policy changes, and so does what a user wants."""
UNKNOWN_WEIGHT = 0.25
"""Of distillation, until it is known whether it teaches."""
EVERY = 8
"""Once it is known, so many taught turns pass between two that are measured."""
_TAIL = 0.05
"""Of chance, at each end of the interval."""


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
    difference: float | None
    """Nats per token: the median of all differences of an accepted and a rejected one, which a few
    damaged replies do not move (Hodges and Lehmann 1963, Ann. Math. Stat. 34:598-611); None: too
    few replies."""
    interval: tuple[float, float] | None
    """90 %, by the ranks of those differences."""

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
        if self.difference is None or self.interval is None:
            return f"not known yet, of {of}"
        low, high = self.interval
        word = {True: "they teach", False: "they teach nothing", None: "not known yet"}
        told = f"{self.difference:+.3f} nats per token ({low:+.3f} to {high:+.3f})"
        return f"{word[self.teaches]}: {told}, of {of}"


def teachability(accepted: Sequence[float], rejected: Sequence[float]) -> Teachability:
    """From the gains of replies, the newest first; those beyond `NEWEST` do not count."""
    good, bad = accepted[:NEWEST], rejected[:NEWEST]
    n, m = len(good), len(bad)
    rank = _outer(n, m)
    if not rank:
        return Teachability(n, m, None, None)
    differences = sorted(a - b for a in good for b in bad)
    return Teachability(n, m, median(differences), (differences[rank - 1], differences[-rank]))


@lru_cache(maxsize=NEWEST * NEWEST)
def _outer(n: int, m: int) -> int:
    """How far from both ends of n m sorted differences the interval ends; 0: of so few replies even
    the outermost say nothing, as of 2 and 4.

    Exact: if nothing made a difference, the number of differences below 0 would be spread as the
    coefficients of the Gaussian binomial of n + m over n (Mann and Whitney 1947).
    """
    spread = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            spread[u] -= spread[u - m - i]
        for u in range(i, n * m + 1):
            spread[u] += spread[u - i]
    total, rank, below = sum(spread), 0, 0
    while n * m and (below := below + spread[rank]) <= _TAIL * total:
        rank += 1
    return rank
