"""Advantages of the methods: pure functions over floats, no I/O.

Shapes: B samples in a batch, T sampled tokens of one sample, k candidates per token. Logprobs are
in nats. Signs: a positive advantage raises the probability of its token. Sources: OpenClaw-RL
(arXiv 2603.10165) for the methods, PPO (arXiv 1707.06347) for the clipped ratio.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from tinker_claw.errors import same_length

UNANIMOUS_SCALE = 0.25
"""Factor on r where all of a batch was accepted, since a mean baseline would leave nothing."""
EQUAL = 1e-6
"""Largest standard deviation that counts as equal rewards, up to rounding."""
MAX_RATIO = 2.0
"""Largest ratio of a token of a rescored sample; above it the token is left out, since ppo does not
bound it for A < 0."""
RATIOS = (0.8, 1.28)
"""Bounds of the ratio, absolute; those of OpenClaw-RL."""
_FARTHEST = 9999.0
"""Largest difference in nats without a clip: services tell of an impossible token with -9999."""


def reward_advantages(
    rewards: Sequence[float | None], weights: Sequence[float], cut: Sequence[bool]
) -> list[float]:
    """Return one advantage per sample from its reward r and weight w: A = w (r - mean), the mean
    weighted over the batch; if all rewards agree 0.25 w r where r > 0 or the reply was cut, else 0.
    A sample without a reward (None) has A = 0 and does not count in the mean.

    A rejection does not say what would be better: without better replies to compare with, a batch
    of rejections pushes towards anything, and above all towards replies that do not end. Of a reply
    cut by its limit it does: to end sooner, and there is no end token to push down.

    Args:
        rewards: (B,)
        weights: (B,) above 0.
        cut: (B,) whether the reply was cut by its token limit.
    Returns:
        (B,) advantages.
    """
    same_length("rewards", rewards=rewards, weights=weights, cut=cut)
    if len({*rewards} - {None}) <= 1:
        return [
            UNANIMOUS_SCALE * w * r if r is not None and (r > 0 or was_cut) else 0.0
            for r, w, was_cut in zip(rewards, weights, cut, strict=True)
        ]
    rated = [(r, w) for r, w in zip(rewards, weights, strict=True) if r is not None]
    # Summed exactly, so that the order of the samples makes no difference at all.
    mean = math.fsum(r * w for r, w in rated) / math.fsum(weight for _, weight in rated)
    return [w * (r - mean) if r is not None else 0.0 for r, w in zip(rewards, weights, strict=True)]


def group_advantages(rewards: Sequence[float | None], buckets: Sequence[Hashable]) -> list[float]:
    """Return one advantage per sample of a group: A = (r - mean) / sd over the samples of its
    bucket.

    A bucket is one step of one group: the sessions of a group try the same task, and their steps
    of one index are compared with one another (OpenClaw-RL 3.3). sd is the population's, as there.
    A bucket of one reward stays raw, A = r; one whose rewards all agree has A = 0. A sample without
    a reward (None) has A = 0 and does not count.

    Args:
        rewards: (n,)
        buckets: (n,) equal where samples are compared.
    Returns:
        (n,) advantages.
    """
    same_length("grouped rewards", rewards=rewards, buckets=buckets)
    by_bucket = defaultdict[Hashable, list[float]](list)
    for reward, bucket in zip(rewards, buckets, strict=True):
        if reward is not None:
            by_bucket[bucket].append(reward)
    return [
        0.0 if reward is None else _standardised(reward, by_bucket[bucket])
        for reward, bucket in zip(rewards, buckets, strict=True)
    ]


def _standardised(reward: float, among: Sequence[float]) -> float:
    if len(among) == 1:
        return reward
    mean = math.fsum(among) / len(among)
    sd = math.sqrt(math.fsum((r - mean) ** 2 for r in among) / len(among))
    return (reward - mean) / sd if sd > EQUAL else 0.0


def may_push(reward: float, *, cut: bool) -> bool:
    """Return whether a reward or an advantage may be applied to a reply. A reply cut by its token
    limit is only ever pushed down: reinforcing it would teach text without a stop."""
    return reward < 0 or not cut


def spread_reward(advantage: float, behaviour_T: Sequence[float]) -> list[float]:
    """Return the advantage on each token of a reply, (T,): A_t = A; where A is negative, A (1 -
    p_t), with p_t the probability that the token was sampled with.

    A token that was nearly certain was hardly a choice, so a rejection says little about it;
    pushing it down damages every reply, above all the end token. The factor is that of the focal
    loss (arXiv 1708.02002) with gamma = 1.

    Args:
        behaviour_T: (T,) the sampler's logprobs of the tokens.
    """
    if advantage >= 0:
        return [advantage] * len(behaviour_T)
    return [advantage * -math.expm1(min(q, 0.0)) for q in behaviour_T]


def token_advantages(
    teacher_T: Sequence[float], behaviour_T: Sequence[float], clip: float
) -> list[float]:
    """Token-level distillation: A_t = clip(log pi_T(y_t | hinted prompt) - q_t, -C, C).

    Args:
        teacher_T: (T,) the teacher's logprobs of the sampled tokens, given the hint.
        behaviour_T: (T,) the sampler's own.
        clip: C in nats; 0: none, but that an impossible token's -inf counts as -9999.
    """
    same_length("token distillation", teacher=teacher_T, behaviour=behaviour_T)
    return [
        _bound(teacher - own, clip) for teacher, own in zip(teacher_T, behaviour_T, strict=True)
    ]


def topk_advantages(
    teacher_k: Sequence[float], behaviour_k: Sequence[float], clip: float
) -> list[float]:
    """Top-k distillation at one position: A_v = w_v * clip(log pi_T(v) - b_v, -C, C).

    w = softmax over the student's k candidates of b, so the weights of one position sum to 1.

    Args:
        teacher_k: (k,) the teacher's logprobs at the student's candidates, given the hint.
        behaviour_k: (k,) b, the student's logprobs of them when it sampled.
    """
    same_length("top-k distillation", teacher=teacher_k, behaviour=behaviour_k)
    top = max(behaviour_k)
    masses = [math.exp(b - top) for b in behaviour_k]
    total = sum(masses)
    return [
        mass / total * _bound(teacher - own, clip)
        for mass, teacher, own in zip(masses, teacher_k, behaviour_k, strict=True)
    ]


def unproposed_advantages(teacher_k: Sequence[float], least: float, clip: float) -> list[float]:
    """Return the advantages of the teacher's candidates that the student did not propose, at one
    position: A_v = p_v * clip(log p_v - b, 0, C), p the teacher's probability and b = `least`.

    Without them, an unlearned token never comes back: the student no longer proposes it, so no
    weight on its own candidates can raise it. Its probability under the student is unknown, but at
    most that of the student's last candidate, so the difference is a lower bound; none is pushed
    down.

    Args:
        teacher_k: (n,) the teacher's logprobs of these candidates, given the hint.
        least: the smallest logprob of the student's k candidates when it sampled.
    """
    return [math.exp(p) * max(0.0, _bound(p - least, clip)) for p in teacher_k]


def stale_weight(advantage: float, current: float, behaviour: float) -> float:
    """Return the weight of one candidate of a rescored sample, for a loss without a ratio of its
    own.

    rho = exp(current - behaviour). Returns A rho where the clipped objective has a gradient, else
    0: the gradient of max(-A rho, -A clip(rho)) is -A rho grad(log pi) inside the bounds.
    """
    if current - behaviour > math.log(MAX_RATIO):  # exp overflows on a -9999
        return 0.0
    rho = math.exp(current - behaviour)
    clipped = rho > RATIOS[1] if advantage > 0 else rho < RATIOS[0]
    return 0.0 if clipped else advantage * rho


def keep_bounded(
    advantages_T: Sequence[float], current_T: Sequence[float], behaviour_T: Sequence[float]
) -> list[float]:
    """Set the advantages of a rescored sample to 0 where rho = exp(current - behaviour) is above
    2."""
    same_length(
        "rescored sample", advantages=advantages_T, current=current_T, behaviour=behaviour_T
    )
    return [
        0.0 if current - behaviour > math.log(MAX_RATIO) else advantage
        for advantage, current, behaviour in zip(advantages_T, current_T, behaviour_T, strict=True)
    ]


def _bound(value: float, clip: float) -> float:
    """Bound to +-clip, or with 0 to what is finite: a -inf times a weight of 0 would be NaN."""
    clip = clip or _FARTHEST
    return max(-clip, min(clip, value))
