"""Whether what a teacher is told teaches: pure statistics over how it changes what it thinks.

The gain of a reply is what a told teacher gives it more than the same teacher untold, per token and
bounded as distillation bounds it. A text that teaches raises the replies that its user accepts, and
not those that they reject: what counts is the difference of the two. Either alone would measure how
a text disturbs a prompt, and a preference under the text alone would measure base and prompt.

All replies are compared behind prompts that hold no correction yet. Behind one, a rejected reply is
often a damaged one, which any text makes less likely; counted, it would speak for every hint
(measured on the demo's model, for one that lowers acceptance from .15 to .01: +.10 with those, and
-.03 without).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tinker_claw.evidence import CLAIM, Mean, odds
from tinker_claw.methods.advantages import token_advantages

PAIRS = 32
"""Of replies, after which nothing being known counts as an answer."""
EVERY = 8
"""Once it is known, so many taught turns pass between two that are measured."""


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
    """Nats per token, the median over the pairs, which a few damaged replies do not move; None: of
    one kind there are none."""
    helps: float
    """E-value that the accepted reply of a pair gains more."""
    harms: float
    """E-value that it gains less."""
    evidence: float
    """Of either."""

    @property
    def teaches(self) -> bool | None:
        """None: not known."""
        return None if self.evidence < CLAIM else self.helps > self.harms

    def weight(self, *, rewards: bool) -> float:
        """What distillation is multiplied by: the probability that what is told helps, where a
        quarter of all texts do, a quarter harm, and the others do neither.

        Args:
            rewards: they count beside it. Alone a small weight moves the policy as far as a large
                one, since the optimizer divides scale out; so what rather pulls away, as far as is
                known, counts for nothing.
        """
        if self.teaches is not None:
            return float(self.teaches)
        if self.harms > self.helps and not rewards:
            return 0.0
        return self.helps / (self.helps + self.harms + 2)

    @property
    def settled(self) -> bool:
        """Measuring more would hardly change it."""
        return self.teaches is not None or min(self.accepted, self.rejected) >= PAIRS

    def __str__(self) -> str:
        words = {True: "they help", False: "they do not help", None: "not known yet"}
        of = f"{self.accepted} accepted and {self.rejected} rejected replies"
        gain = "" if self.difference is None else f", {self.difference:+z.3f} nats a token"
        return f"{words[self.teaches]}{gain} ({of}; {odds(self.evidence)})"


def teachability(accepted: Sequence[float], rejected: Sequence[float]) -> Teachability:
    """From the gains of replies, the newest first.

    The first accepted reply is compared with the first rejected one, and so on. What changes the
    gains of both alike, as training does, hardly shows in pairs, and one damaged reply is one pair.
    """
    pairs = zip(reversed(accepted), reversed(rejected), strict=False)
    differences, wins = [good - bad for good, bad in pairs], Mean()
    for one in differences:
        wins.add((1 + (one > 0) - (one < 0)) / 2)
    middle = median(differences) if differences else None
    return Teachability(
        len(accepted), len(rejected), middle, wins.e_above, wins.e_below, wins.e_value
    )
