"""Methods as records: the weights of their losses, the texts for their teacher, and their cost.

Rule: a method is a record, and pure. It computes the advantages of a batch once; training, retries
and reports use that result. No other code checks a method's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tinker_claw.config.settings import Gateway, Training
from tinker_claw.errors import ConfigError
from tinker_claw.methods.advantages import may_push
from tinker_claw.methods.passes import (
    Advantages,
    BatchItem,
    Prepared,
    batch_advantages,
    corrected,
    loss_passes,
    sampled_advantages,
    spread,
)
from tinker_claw.types import HINT_TEMPLATE, Capabilities, Lacks, NextState, Sample, Verdict

CUT = "cut by its token limit, and not rejected"
"""Reason why a reply cut by its token limit is not trained."""
HINTED = 0.3
"""Share of judged turns with a hint, assumed before any are known."""


class Signal(StrEnum):
    """Inputs that a method needs from a turn."""

    REWARD = "reward"
    """The verdict, +1 or -1."""
    HINT = "hint"
    """A correction that the judge reads in the next state."""
    NEXT_STATE = "raw next state"
    """The next state itself."""
    DEMONSTRATION = "demonstration"
    """A later reply of the session, which the user accepted after correcting this one."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts about a judged turn that a teacher might be told."""

    verdict: Verdict
    hints: tuple[str, ...] = ()
    next_state: NextState | None = None
    demonstration: str | None = None
    """Reply that shows how to do it; None: there is none, or none yet."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """The text that a teacher is told before it scores the sampled tokens."""

    what: str
    """One word for the kind of text, for views of a turn."""
    tells: Callable[[Evidence], tuple[str, ...]]
    """Returns the texts of which the teacher is told one; () leaves the teacher out. Pure."""
    words: str
    """Template in which the text, {hint}, is inserted, marked as data."""
    tokens: int
    """Expected tokens of the text, for the cost estimate."""
    most: int
    """Most tokens of the text."""
    cuts: bool = True
    """Whether a longer text loses its middle; False leaves it out."""
    writes: bool = False
    """Whether the teacher writes a reply of its own, which the student learns; False: it scores the
    student's. The paper's recipe always scores."""


@dataclass(frozen=True, slots=True)
class Method:
    """A learning method. To add one, write a file here and add it to `METHODS`. One with other
    advantages is a subclass that overrides `reply_advantages` or `advantages`."""

    name: str
    """What `--method` is given; a plug-in's entry point has the same name."""
    learns_from: str
    """Short text for the table of methods."""
    needs: frozenset[Signal]
    reward_weight: float = 0.0
    """Weight of the reward part, before --w-rl; 0: verdicts give no gradient."""
    distill_weight: float = 0.0
    """Weight of the distillation part, before --w-opd; 0: there is no teacher."""
    teaching: Teaching | None = None
    admitted: float = 1.0
    """Samples per judged turn, assumed before any are known."""
    taught: float = 0.0
    """Share of samples that a teacher scores, assumed before any are known."""

    def __post_init__(self) -> None:
        if (self.distill_weight > 0) != (self.teaching is not None):
            raise ValueError(f"method {self.name}: distillation and its teaching go together")

    def writes(self, cfg: Training) -> bool:
        """Return whether the teacher writes a reply of its own, which the student learns."""
        return self.teaching is not None and self.teaching.writes and cfg.recipe != "paper"

    def refuses(
        self, verdict: Verdict, texts: Sequence[str], *, cut: bool = False, episode: bool = False
    ) -> str | None:
        """Return why a turn with this judgement carries no signal, or None when it is a sample.

        Args:
            texts: texts that the teacher can be told about it.
            cut: whether its reply was cut by its token limit.
            episode: whether its outcome will be part of its reward, whatever the verdict.
        """
        if episode and self.reward_weight:
            return None
        if not may_push(verdict.value or 0, cut=cut):
            return CUT
        if texts or (self.reward_weight and reward_of(verdict)):
            return None
        reasons = list[str]()
        if self.reward_weight:
            reasons.append("no valid vote" if verdict.value is None else "neutral verdict")
        if self.teaching:
            reasons.append(f"no {self.teaching.what}")
        return ", ".join(reasons)

    def lacks(
        self, reward: float | None, cfg: Training, *, taught: bool, cut: bool, rated: bool
    ) -> Lacks | None:
        """Return what a sample needs beside it to teach anything; None: nothing.

        Args:
            taught: whether a teacher says what would be better.
            cut: whether its reply was cut by its token limit.
            rated: whether somebody has rated the reply explicitly.
        """
        if not self.reward_weight or cfg.recipe == "paper" or taught:
            return None
        if (reward or 0.0) < 0:
            return None if cut else Lacks.BETTER
        return None if rated else Lacks.REJECTION

    def reply_advantages(
        self, samples: Sequence[Sample], cfg: Training, state: Any
    ) -> tuple[list[float], Any]:
        """Return one advantage per sample, from its reward, and the state after the step.

        Args:
            samples: oldest first.
            state: what the newest version's step returned, read back from JSON; None at first.
        """
        return batch_advantages(samples, cfg), None

    def advantages(
        self, items: Sequence[BatchItem], cfg: Training, state: Any
    ) -> tuple[list[Advantages], Any]:
        """Return all advantages of a batch, and the state after the step, as `reply_advantages`
        does. A cut reply is never reinforced."""
        samples = [item.sample for item in items]
        per_sample, state = self.reply_advantages(samples, cfg, state)
        by_reward, by_teacher = self.reward_weight * cfg.w_rl, self.distill_weight * cfg.w_opd
        return [
            spread(sample, by_reward * a if may_push(a, cut=sample.cut) else 0.0, by_teacher, cfg)
            for sample, a in zip(samples, per_sample, strict=True)
        ], state

    def prepare(
        self,
        items: Sequence[BatchItem],
        cfg: Training,
        state: Any = None,
        reply_tokens: int = Gateway().max_reply_tokens,
    ) -> Prepared:
        """Compute what one optimizer step trains on. `reply_tokens`: most tokens of a reply."""
        per_item, state = self.advantages(items, cfg, state)
        per_item = [
            corrected(item, advantages) for item, advantages in zip(items, per_item, strict=True)
        ]
        stored = [
            (item.sample.id, advantages.sample, sampled_advantages(item.sample, advantages))
            for item, advantages in zip(items, per_item, strict=True)
        ]
        passes = loss_passes(items, per_item, cfg, reply_tokens)
        return Prepared(items, stored, passes, None if state is None else json.dumps(state))


def reward_of(verdict: Verdict) -> float | None:
    """Return +1 or -1, or the explicit rating; None for a neutral verdict and for none at all."""
    return (verdict.value if verdict.score is None else verdict.score) or None


def episode_step_reward(verdict: Verdict) -> float | None:
    """Return the reward of an episode's step beside its outcome: the mean of the valid votes, zeros
    included, or the explicit rating; None where only the outcome counts."""
    if verdict.score is not None:
        return verdict.score
    valid = [vote for vote in verdict.votes if vote is not None]
    return sum(valid) / len(valid) if valid else None


def student_topk(method: Method, cfg: Training) -> int:
    """Number of top-k candidates per token that a served reply is stored with."""
    return cfg.opd_topk if method.teaching and not method.writes(cfg) else 0


def require(method: Method, cfg: Training, has: Capabilities) -> None:
    """Check that a backend can do what a method needs.

    Raises:
        ConfigError: names what is missing, and the setting that works without it.
    """
    if "ppo" not in has.losses:
        raise ConfigError(f"the backend of {has.model} has no ppo loss, which every method needs")
    if method.writes(cfg) and "cross_entropy" not in has.losses:
        raise ConfigError(
            f"the backend of {has.model} has no cross_entropy loss, by which --method "
            f"{method.name} learns what hints ask for; --method binary works without"
        )
    if method.teaching is None or not cfg.opd_topk:
        return
    missing = [
        name
        for name, there in (
            ("cross_entropy", "cross_entropy" in has.losses),
            ("[N, K] targets", has.two_d_targets),
            ("top-k logprobs while sampling", has.student_topk),
            ("logprobs of given ids", has.target_logprobs or method.writes(cfg)),
        )
        if not there
    ]
    if missing:
        raise ConfigError(
            f"top-k distillation needs {', '.join(missing)}, which the backend of {has.model} "
            "lacks; --opd-topk 0 works without"
        )


# Binary: reinforce what the user accepted, discourage what they rejected.


BINARY = Method("binary", "verdicts", frozenset({Signal.REWARD}), reward_weight=1.0)


# OPD: on-policy distillation from the model that was told, in hindsight, what the user wanted.
#
# A verdict alone teaches nothing here, and its reward is not used.


HINT = Teaching(
    "hint",
    tells=lambda evidence: evidence.hints,
    words=HINT_TEMPLATE,
    tokens=40,
    most=256,  # the one to three sentences that the judge is asked for
    cuts=False,
)

OPD = Method(
    name="opd",
    learns_from="hints",
    needs=frozenset({Signal.HINT}),
    distill_weight=1.0,
    teaching=HINT,
    admitted=HINTED,  # without a hint there is nothing to learn from
    taught=1.0,
)


# Combine: verdicts and hints in one step.
#
# A sample may carry a reward, a hint, or both; what it lacks adds no gradient. Told the hint, the
# frozen base writes its own reply, which the student learns behind the prompt without the hint. To
# score the student's reply, as `opd` does, taught a real model nothing where its reply was wrong
# from the first word on (another language), and broke it (docs/proof.md).


COMBINE = Method(
    name="combine",
    learns_from="verdicts and hints",
    needs=frozenset({Signal.REWARD, Signal.HINT}),
    reward_weight=1.0,
    distill_weight=1.0,
    teaching=replace(HINT, writes=True),
    taught=HINTED,
)
