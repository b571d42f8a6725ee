"""Numbers of one optimizer step, on every backend.

Rule: nothing is read but reports and scores.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.contract import BOUNDS, PLAIN, Ground, pass_of
from tinker_claw.types import Datum, LossPass

RL = ("ppo", "importance_sampling")


async def slopes(ground: Ground, one: LossPass) -> tuple[list[float], float, list[float]]:
    """Logprobs, loss and dloss/dlogprob of a pass with one datum, by the formulas."""
    (datum,) = one.datums
    read = await ground.sampler.logprobs(
        datum.tokens, start=datum.start, targets=datum.targets or None
    )
    if one.loss == "cross_entropy":
        z = [value for row in read.targets or [(z,) for z in read.logprobs] for value in row]
        weights = [value for row in datum.weights for value in row]
        return z, -math.fsum(a * b for a, b in zip(z, weights, strict=True)), [-w for w in weights]
    low, high = BOUNDS.values()
    losses, slope = [], []
    for z_t, q, a in zip(read.logprobs, datum.logprobs, datum.advantages, strict=True):
        ratio = math.exp(z_t - q)
        held = min(max(ratio, low), high)
        bound = one.loss == "ppo" and held * a < ratio * a
        losses.append(-(held if bound else ratio) * a)
        slope.append(0.0 if bound else -ratio * a)
    return list(read.logprobs), math.fsum(losses), slope


def entropy_of(datum: Datum, weights: list[float]) -> LossPass:
    """Cross-entropy of the sampled tokens themselves."""
    rows = tuple((weight,) for weight in weights)
    return pass_of("cross_entropy", Datum(datum.tokens, datum.start, weights=rows))


@pytest.mark.parametrize("loss", RL)
async def test_a_loss_and_its_gradient_are_the_formulas(ground: Ground, loss: str) -> None:
    """Ratios lie on both sides of both bounds, for both signs of the advantage.

    The gradient is that of cross entropy whose weights are minus the slopes.
    """
    one = pass_of(loss, ground.rl(0))
    _, value, slope = await slopes(ground, one)
    report = await ground.step([one])
    moved = await ground.scores(await ground.trainer.publish())
    assert report.losses[0] == pytest.approx(value, abs=10 * ground.backend.tolerance)
    assert ground.far(moved, await ground.scores())
    same = entropy_of(ground.rl(0), [-s for s in slope])
    assert await ground.after([same]) == ground.near(moved)


@pytest.mark.parametrize("soft", [False, True], ids=["sampled tokens", "targets"])
async def test_cross_entropy_is_its_formula_and_a_step_goes_down_its_slope(
    ground: Ground, soft: bool
) -> None:
    """A step of -r g changes the loss by -r |g|^2 to first order only if g is its gradient."""
    hard = entropy_of(ground.rl(0), list(ground.rl(0).advantages))
    one = pass_of("cross_entropy", ground.soft(0, 0, 1, 2)) if soft else hard
    before, value, slope = await slopes(ground, one)
    report = await ground.step([one])
    assert report.losses[0] == pytest.approx(value, abs=10 * ground.backend.tolerance)
    norm = report.grad_norm
    if norm is None:
        pytest.skip("the rest needs the gradient's norm, which this backend does not tell")
    expected, eps = 0.002, 1e4 * norm
    await ground.step([one], replace(PLAIN, learning_rate=eps * expected / norm**2, eps=eps))
    after, _, _ = await slopes(replace(ground, sampler=await ground.trainer.publish()), one)
    fall = -math.fsum(s * (b - a) for s, a, b in zip(slope, before, after, strict=True))
    assert fall == pytest.approx(expected, rel=0.05)


async def test_gradients_of_passes_add_up_in_any_order(ground: Ground) -> None:
    ppo, entropy = pass_of("ppo", ground.rl(0)), pass_of("cross_entropy", ground.soft(1, 0))
    both = await ground.after([ppo, entropy])
    assert await ground.after([entropy, ppo]) == ground.near(both)
    for alone in ([ppo], [entropy]):
        assert ground.far(await ground.after(alone), both)


async def test_two_passes_are_one_pass_that_has_the_terms_of_both(ground: Ground) -> None:
    parts = [pass_of("cross_entropy", ground.soft(0, column)) for column in (0, 1)]
    whole = pass_of("cross_entropy", ground.soft(0, 0, 1))
    assert await ground.after(parts) == ground.near(await ground.after([whole]))
    # At ratio 1 the slopes of ppo and importance sampling are the same.
    one, two = (ground.rl(i, ratios=(1.0,)) for i in (0, 1))
    mixed = await ground.after([pass_of("ppo", one), pass_of("importance_sampling", two)])
    assert mixed == ground.near(await ground.after([pass_of("importance_sampling", one, two)]))


async def test_a_loss_is_a_sum_however_its_datums_are_split(ground: Ground) -> None:
    pairs = {loss: [ground.rl(i) for i in (0, 1)] for loss in RL}
    pairs["cross_entropy"] = [ground.soft(i, 0, 1) for i in (0, 1)]
    together = await ground.after([pass_of(loss, *both) for loss, both in pairs.items()])
    apart = [pass_of(loss, one) for loss, both in pairs.items() for one in reversed(both)]
    assert await ground.after(apart) == ground.near(together), "a sum, not a mean over datums"


async def test_a_datum_without_weight_changes_nothing(ground: Ground) -> None:
    datum, soft = ground.rl(0), ground.soft(0, 0, 1)
    other = pass_of("ppo", ground.rl(1))
    before, expected = await ground.scores(), await ground.after([other])
    nothing = replace(datum, advantages=(0.0,) * len(datum.advantages))
    idle = [pass_of(loss, nothing) for loss in RL]
    idle += [pass_of("cross_entropy", replace(soft, weights=((0.0, 0.0),) * len(soft.weights)))]
    assert await ground.after(idle) == ground.near(before)
    assert await ground.after([other, *idle]) == ground.near(expected)


async def test_gradients_are_clipped_by_the_norm_of_all_of_them(ground: Ground) -> None:
    clipped = replace(PLAIN, grad_clip_norm=1e-2, eps=1e-2)
    small, large = (
        [
            pass_of("importance_sampling", ground.rl(0, scale=scale)),
            pass_of("ppo", ground.rl(1, scale=scale)),
        ]
        for scale in (1, 30)
    )
    expected = await ground.after(small, clipped)
    assert await ground.after(large, clipped) == ground.near(expected)
    free = replace(clipped, grad_clip_norm=0.0)
    assert ground.far(await ground.after(large, free), expected), "0 switches clipping off"
    norms = [(await ground.step(passes, clipped)).grad_norm for passes in (small, large)]
    if norms[0] is not None and norms[1] is not None:
        assert norms[0] > 1e-2, "the norm is told as it was before clipping"
        assert norms[1] == pytest.approx(30 * norms[0], rel=1e-3)


async def test_weight_decay_shrinks_the_adapter_whatever_the_gradient(ground: Ground) -> None:
    """theta -= rate decay theta: with rate = decay = 1 and no gradient, the base is left."""
    wiped = await ground.after(
        [pass_of("ppo", ground.rl(0, scale=0.0))],
        replace(PLAIN, learning_rate=1.0, weight_decay=1.0),
    )
    base = await ground.scores(await ground.trainer.base())
    assert ground.far(await ground.scores(), base)
    assert wiped == ground.near(base)
