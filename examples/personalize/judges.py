"""Rule-based judges for scenarios with their own words, and lying judges for the controls.

They answer the product's normal judge prompts over HTTP, as `examples/demo/judge.py` does.

Rule: a control is done here, to the judge that is asked, and nowhere in the product. A lying judge
answers the same case in the same way each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from examples.demo.judge import Case, Opinion, opinion
from examples.personalize.scenario import Scenario

Think = Callable[[Case, Random], Opinion]


def honest(scenarios: Sequence[Scenario]) -> Think:
    """Judge by the words of these scenarios, and other words by the demo's rules."""
    verdicts: dict[str, tuple[int, tuple[str, ...]]] = {}
    for scenario in scenarios:
        user = scenario.speaker()
        if scenario.hints:
            verdicts.update(dict.fromkeys(user.wants.corrections, (-1, scenario.hints)))
        if scenario.user is None:
            verdicts.update(dict.fromkeys(user.terse, (-1, ())))
            verdicts.update(dict.fromkeys(user.approvals, (1, ())))

    def think(case: Case, rng: Random) -> Opinion:
        if case.role != "user" or case.text not in verdicts:
            return opinion(case, rng)
        value, hints = verdicts[case.text]
        return value, rng.choice(hints) if hints else None

    return think


def flipped(think: Think, other_hints: Sequence[str]) -> Think:
    """Reverse every verdict; a user who was content is said to have wanted something else."""

    def lie(case: Case, rng: Random) -> Opinion:
        value, _ = think(case, rng)
        return -value, rng.choice(other_hints) if value == 1 else None

    return lie


def shuffled(think: Think, other_hints: Sequence[str]) -> Think:
    """Answer with the verdict of an earlier case of another session, and a hint of another rule.

    As often as with an honest judge, there is a verdict of each kind, and a hint. The first cases
    have nothing before them and are neutral.
    """
    earlier: list[tuple[int, bool]] = []
    opinions: dict[str, Opinion] = {}

    def lie(case: Case, rng: Random) -> Opinion:
        if case.whole not in opinions:
            value, hinted = rng.choice(earlier) if earlier else (0, False)
            opinions[case.whole] = value, rng.choice(other_hints) if hinted else None
            truth = think(case, rng)
            earlier.append((truth[0], truth[1] is not None))
        return opinions[case.whole]

    return lie


LIES: Mapping[str, Callable[[Think, Sequence[str]], Think]] = {
    "flipped": flipped,
    "shuffled": shuffled,
}
"""Lying judges by name. Each is made from an honest one and the hints of another rule."""
