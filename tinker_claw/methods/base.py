"""What a method is: a record that says what it weighs, what its teacher is told, what that costs.

Rule: a method is a record, and pure. It computes the advantages of a batch once; training, retries
and whoever tells of them read what it returned. Nobody else knows a method by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tinker_claw.config.settings import Gateway, Training
from tinker_claw.errors import ConfigError
from tinker_claw.methods.advantages import may_push
from tinker_claw.methods.passes import (
    Advantages,
    BatchItem,
    Prepared,
    corrected,
    loss_passes,
    reward_parts,
    sampled_advantages,
    spread,
)
from tinker_claw.types import HINT_TEMPLATE, Capabilities, NextState, Sample, Verdict

CUT = "cut by its token limit, and not rejected"
"""Why such a turn is not trained."""
HINTED = 0.3
"""Share of judged turns with a hint, assumed before there are any."""


class Signal(StrEnum):
    """What a method needs of a turn."""

    REWARD = "reward"
    """+1 or -1, the verdict."""
    HINT = "hint"
    """What should have been done, as the judge reads it in the next state."""
    NEXT_STATE = "raw next state"
    """The next state itself."""
    DEMONSTRATION = "demonstration"
    """A later reply of the session, which the user accepted after having corrected this one."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a judged turn, and might be told to a teacher."""

    verdict: Verdict
    hints: tuple[str, ...] = ()
    next_state: NextState | None = None
    demonstration: str | None = None
    """None: there is none, or none yet."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """What a teacher is told before it scores the sampled tokens."""

    what: str
    """In a word, for those who read about a turn."""
    tells: Callable[[Evidence], tuple[str, ...]]
    """Texts of which the teacher is told one; (): it is not asked. Pure."""
    words: str
    """How the text stands at the hint's place, as {hint}: data, and named as such."""
    tokens: int
    """About so many, for the estimate."""
    most: int
    """Tokens of a text at most."""
    cuts: bool = True
    """A longer one is told without its middle; False: it is not told."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to learn. Adding one: a file here, and its name in the registry. One that estimates
    otherwise is a subclass with `rewards`, or with `advantages`, of its own."""

    name: str
    learns_from: str
    """A few words, for the table of methods."""
    needs: frozenset[Signal]
    reward: float = 0.0
    """Weight of the reward part, before --w-rl; 0: verdicts give no gradient."""
    distill: float = 0.0
    """Weight of the distillation part, before --w-opd; 0: there is no teacher."""
    teaching: Teaching | None = None
    admitted: float = 1.0
    """Samples per judged turn, assumed before there are any."""
    taught: float = 0.0
    """Share of the samples that a teacher scores, assumed likewise."""

    def __post_init__(self) -> None:
        if (self.distill > 0) != (self.teaching is not None):
            raise ValueError(f"method {self.name}: distillation and its teaching go together")

    def tells(self, evidence: Evidence) -> tuple[str, ...]:
        """Texts of which the teacher is told one; (): it is not asked."""
        return self.teaching.tells(evidence) if self.teaching else ()

    def refuses(
        self, verdict: Verdict, told: Sequence[str], *, cut: bool = False, episode: bool = False
    ) -> str | None:
        """Why a turn with this judgement carries no signal, or None when it is a sample.

        Args:
            told: what the teacher can be told of it.
            cut: its reply was cut by its token limit.
            episode: its outcome will be a part of its reward, whatever the verdict is.
        """
        if episode and self.reward:
            return None
        if not may_push(verdict.value or 0, cut=cut):
            return CUT
        if told or (self.reward and reward_of(verdict)):
            return None
        reasons = [_no_reward(verdict)] if self.reward else []
        if self.teaching:
            reasons.append(f"no {self.teaching.what}")
        return ", ".join(reasons)

    def rewards(
        self, samples: Sequence[Sample], cfg: Training, state: Any
    ) -> tuple[list[float], Any]:
        """One advantage per sample, from its reward, and the state after the step.

        Args:
            samples: oldest first.
            state: what the newest version's step returned, read back from JSON; None at first.
        """
        return reward_parts(samples, cfg), None

    def advantages(
        self, items: Sequence[BatchItem], cfg: Training, state: Any
    ) -> tuple[list[Advantages], Any]:
        """All advantages of a batch, and the state after the step; see `rewards`. A reply that was
        cut is never pushed up."""
        samples = [item.sample for item in items]
        found, state = self.rewards(samples, cfg, state)
        reward, distill = self.reward * cfg.w_rl, self.distill * cfg.w_opd
        return [
            spread(sample, reward * a if may_push(a, cut=sample.cut) else 0.0, distill, cfg)
            for sample, a in zip(samples, found, strict=True)
        ], state

    def prepare(
        self,
        items: Sequence[BatchItem],
        cfg: Training,
        state: Any = None,
        reply_tokens: int = Gateway().max_reply_tokens,
    ) -> Prepared:
        """A batch as one optimizer step trains it. `reply_tokens`: most tokens of a reply."""
        found, state = self.advantages(items, cfg, state)
        found = [corrected(item, one, cfg) for item, one in zip(items, found, strict=True)]
        each = [(item.sample, one) for item, one in zip(items, found, strict=True)]
        stored = [(sample.id, one.sample, sampled_advantages(sample, one)) for sample, one in each]
        passes = loss_passes(items, found, cfg, reply_tokens)
        return Prepared(items, stored, passes, None if state is None else json.dumps(state))


def reward_of(verdict: Verdict) -> float | None:
    """+1 or -1, or what was said outright; None for a neutral verdict and for no verdict at all."""
    return (verdict.value if verdict.score is None else verdict.score) or None


def step_reward(verdict: Verdict) -> float | None:
    """What of an episode's step stands beside its outcome: the mean of the valid votes, 0 included,
    or what was said outright; None: there is neither, and the outcome is all."""
    if verdict.score is not None:
        return verdict.score
    valid = [vote for vote in verdict.votes if vote is not None]
    return sum(valid) / len(valid) if valid else None


def _no_reward(verdict: Verdict) -> str:
    return "no valid vote" if verdict.value is None else "neutral verdict"


def student_topk(method: Method, cfg: Training) -> int:
    """How many candidates per token the sampler has to capture."""
    return cfg.opd_topk if method.teaching and cfg.opd_mode == "topk" else 0


def require(method: Method, cfg: Training, has: Capabilities) -> None:
    """Compare what a method needs of a backend with what that can do.

    Raises:
        ConfigError: names what is missing, and the setting that works without it.
    """
    if "ppo" not in has.losses:
        raise ConfigError(f"the backend of {has.model} has no ppo loss, which every method needs")
    if not student_topk(method, cfg):
        return
    missing = [
        name
        for name, there in (
            ("cross_entropy", "cross_entropy" in has.losses),
            ("[N, K] targets", has.two_d_targets),
            ("top-k logprobs while sampling", has.student_topk),
            ("logprobs of given ids", has.target_logprobs),
        )
        if not there
    ]
    if missing:
        raise ConfigError(
            f"top-k distillation needs {', '.join(missing)}, which the backend of {has.model} "
            "lacks; --opd-topk 0 works without"
        )


# Binary: reinforce what the user accepted, discourage what they rejected.


BINARY = Method("binary", "verdicts", frozenset({Signal.REWARD}), reward=1.0)


# OPD: on-policy distillation from the model that was told, in hindsight, what the user wanted.
#
# A verdict alone teaches nothing here, and its reward is not used.


HINT = Teaching(
    "hint",
    tells=lambda known: known.hints,
    words=HINT_TEMPLATE,
    tokens=40,
    most=256,  # the one to three sentences that the judge is asked for
    cuts=False,
)

OPD = Method(
    name="opd",
    learns_from="hints",
    needs=frozenset({Signal.HINT}),
    distill=1.0,
    teaching=HINT,
    admitted=HINTED,  # without a hint there is nothing to learn from
    taught=1.0,
)


# Combine: rewards and hints in one step, each with its own clip.
#
# A sample may carry a reward, a hint, or both; what it lacks adds no gradient.


COMBINE = Method(
    name="combine",
    learns_from="verdicts and hints",
    needs=frozenset({Signal.REWARD, Signal.HINT}),
    reward=1.0,
    distill=1.0,
    teaching=HINT,
    taught=HINTED,
)
