"""Measure whether hints teach, by how they change the teacher's logprobs of replies. Pure.

The gain of a reply is its logprob per token under a teacher with the hint minus the one without,
bounded as distillation bounds it. A hint that teaches raises the replies that its user accepts, and
not those they reject: the difference of the two counts. Either alone would measure how a text
disturbs a prompt, and a preference under the text alone would measure base and prompt.

All replies are scored after prompts that hold no correction yet. After one, a rejected reply is
often damaged, and any text makes it less likely, so it would count in favour of every hint
(measured on the demo's model, for one that lowers acceptance from .15 to .01: +.10 with those, and
-.03 without).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tinker_claw.evidence import CLAIM, Mean, odds
from tinker_claw.methods.advantages import token_advantages

FADE = 0.95
"""`Mean.fade` over the pairs: users change their minds, and what helped with one wish may harm with
the next. Simulated, of 200 users whose hints do nothing 0.5 % were ever told otherwise over 150
replies, and 3.5 % over 500; hints that help no more weigh less than 0.4 after 21 (median)."""
EVERY = 4
"""Taught turns per measured one, once there is a claim."""


def reply_gain(told_T: Sequence[float], untold_T: Sequence[float], clip: float) -> float:
    """Return the mean over t of clip(log pi_T(y_t | text) - log pi_T(y_t), -C, C), in nats a token.

    Args:
        told_T: (T,) the teacher's logprobs of a reply, with the text.
        untold_T: (T,) the same teacher's, of the same reply after the same prompt without it.
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

    def __str__(self) -> str:
        unknown = "whether they help is not known yet"
        told = {True: "they help", False: "they do not help", None: unknown}[self.teaches]
        if self.difference is not None:
            gain = f"{self.difference:+z.3f} nats a token"
            told += f": with them accepted replies gain {gain} on rejected ones"
        return f"{told} ({self.accepted} accepted, {self.rejected} rejected; {odds(self.evidence)})"


def teachability(gains: Sequence[tuple[bool, float]]) -> Teachability:
    """Compare the gains of accepted replies with those of rejected ones.

    Each is compared with the newest of the other kind that has no partner yet, so that a pair is of
    one time: a change in the gains of both alike, as training causes, hardly shows in pairs, and a
    damaged reply is one pair.

    Args:
        gains: oldest first; whether the reply was accepted, and its gain.
    """
    alone, differences = list[tuple[bool, float]](), list[float]()
    wins = Mean(fade=FADE)
    for good, gain in gains:
        if not alone or alone[-1][0] == good:
            alone.append((good, gain))
            continue
        more = (gain - alone.pop()[1]) * (1 if good else -1)
        differences.append(more)
        wins.add((1 + (more > 0) - (more < 0)) / 2)
    accepted = sum(good for good, _ in gains)
    middle = median(differences) if differences else None
    return Teachability(
        accepted, len(gains) - accepted, middle, wins.e_above, wins.e_below, wins.e_value
    )
