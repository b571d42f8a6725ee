"""Measure whether hints teach, by how they change the teacher's logprobs of replies. Pure.

The gain of a reply is its logprob per token under a teacher with the hint minus the one without,
bounded as distillation bounds it. A hint that teaches raises the replies that its user accepts, and
not those they reject: the difference of the two counts. Either alone would measure how a text
disturbs a prompt, and a preference under the text alone would measure base and prompt.

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
"""Pairs of replies after which an undecided result counts as settled."""
EVERY = 8
"""Taught turns per measured one, once the answer is settled."""


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
    """How much more a user's accepted replies gain from hints than the rejected ones."""

    accepted: int
    """Accepted replies that were measured."""
    rejected: int
    difference: float | None
    """Difference in nats per token, the median over the pairs, so that a few damaged replies do not
    move it; None without a pair."""
    helps: float
    """E-value that the accepted reply of a pair gains more."""
    harms: float
    """E-value that the accepted reply of a pair gains less."""
    evidence: float
    """E-value of a difference in either direction."""

    @property
    def teaches(self) -> bool | None:
        """Whether hints teach; None: not known."""
        return None if self.evidence < CLAIM else self.helps > self.harms

    def weight(self, *, rewards: bool) -> float:
        """Return the weight of distillation: the probability that hints help, if a quarter of all
        texts do, a quarter harm, and the rest do neither.

        Args:
            rewards: whether rewards count beside it. Alone, a small weight moves the policy as far
                as a large one, since the optimizer divides scale out; so a hint that probably harms
                counts for nothing.
        """
        if self.teaches is not None:
            return float(self.teaches)
        if self.harms > self.helps and not rewards:
            return 0.0
        return self.helps / (self.helps + self.harms + 2)

    @property
    def settled(self) -> bool:
        """Whether more measurements would hardly change the answer."""
        return self.teaches is not None or min(self.accepted, self.rejected) >= PAIRS

    def __str__(self) -> str:
        words = {True: "they help", False: "they do not help", None: "not known yet"}
        of = f"{self.accepted} accepted and {self.rejected} rejected replies"
        gain = "" if self.difference is None else f", {self.difference:+z.3f} nats a token"
        return f"{words[self.teaches]}{gain} ({of}; {odds(self.evidence)})"


def teachability(accepted: Sequence[float], rejected: Sequence[float]) -> Teachability:
    """Compare the gains of accepted and rejected replies, each newest first.

    The first accepted reply is compared with the first rejected one, and so on. A change in the
    gains of both alike, as training causes, hardly shows in pairs, and a damaged reply is one pair.
    """
    pairs = zip(reversed(accepted), reversed(rejected), strict=False)
    differences, wins = [good - bad for good, bad in pairs], Mean()
    for one in differences:
        wins.add((1 + (one > 0) - (one < 0)) / 2)
    middle = median(differences) if differences else None
    return Teachability(
        len(accepted), len(rejected), middle, wins.e_above, wins.e_below, wins.e_value
    )
