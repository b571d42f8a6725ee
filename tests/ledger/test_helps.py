"""Benefit of learning: the groups, and the claims on replies before and since the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.stories import Told
from tinker_claw.evidence import CLAIM
from tinker_claw.insight import read_overview
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.figures import FEWEST, Share, groups, trend
from tinker_claw.types import Attempt


def share(version: int, good: int, of: int) -> Share:
    return Share(good, of, version, version)


def grouped(*shares: Share) -> list[str]:
    return [f"{one.versions}: {one.good}/{one.of}" for one in groups(shares)]


def test_versions_with_few_verdicts_are_taken_together() -> None:
    assert grouped(share(0, 5, 10), share(1, 6, 10), share(2, 9, 10)) == ["v0 to v2: 20/30"]
    assert grouped(share(0, 10, 40), share(1, 6, 20), share(2, 9, 20)) == [
        "v0: 10/40",
        "v1 to v2: 15/40",
    ]
    assert grouped(share(0, 1, 5)) == ["v0: 1/5"]
    assert grouped() == []


def test_many_versions_make_few_groups_and_much_that_one_said_stays_its_own() -> None:
    many = [share(n, n % 20, 20) for n in range(1, 101)]
    found = groups([share(0, 9, 500), *many])
    assert (found[0].versions, found[0].of) == ("v0", 500)
    assert len(found) <= 5
    assert sum(one.of for one in found) == 500 + 100 * 20
    assert all(one.of >= FEWEST for one in found)


def test_a_small_rest_at_the_end_belongs_to_the_last_group() -> None:
    assert grouped(share(0, 10, 40), share(1, 20, 40), share(2, 1, 2)) == [
        "v0: 10/40",
        "v1 to v2: 21/42",
    ]


def said(rates: Sequence[float], seed: int, sessions: int = 320) -> list[str]:
    """Claims after every fourth session, where each version answers 16 sessions."""
    rng, shares, claims = Random(seed), list[Share](), list[str]()
    for n in range(sessions):
        version = n // 16
        if n % 16 == 0:
            shares.append(share(version, 0, 0))
        shares[-1].add(rng.random() < rates[min(version, len(rates) - 1)])
        if n % 4 == 3:
            claims.append(str(trend(shares)["meaning"]).partition(":")[0])
    return claims


def test_a_change_is_rarely_claimed_where_nothing_changes_however_often_one_looks() -> None:
    wrong = sum({*said([0.5], seed)} & {"better", "worse"} != set() for seed in range(40))
    assert wrong <= 0.05 * 40


def test_a_change_at_any_version_is_found() -> None:
    for early, late, word in ((0.34, 0.88, "better"), (0.88, 0.34, "worse")):
        for changed in (1, 6):
            rates = [early] * changed + [late]
            claims = [said(rates, seed, 16 * changed + 64) for seed in range(10)]
            assert sum(one[-1] == word for one in claims) >= 7, (early, changed)


def test_the_claim_names_the_versions_that_it_compares() -> None:
    shares = [share(0, 10, 30), share(1, 11, 30), share(2, 28, 30), share(5, 27, 30)]
    told = trend(shares)
    assert told["meaning"] == (
        "better: 92% (76% to 99%) by v2 to v5, 35% (17% to 56%) by v0 to v1; "
        "evidence 1,000,000 to 1"
    )
    assert told["evidence"] > CLAIM
    assert trend(shares[:1]) == trend([]) == {"meaning": "nothing to compare yet", "evidence": None}


def test_episodes_count_by_their_outcomes_and_not_by_what_was_said_of_their_steps(
    tmp_path: Path,
) -> None:
    """Half are solved by their first reply, which has no next state; the others are rejected."""
    story = Told(tmp_path)
    story.step(story.sampled("s", -1)[1])
    story.ledger.pin.to(0, half=True)
    for number in range(40):
        key, version = f"task {number}", number % 4 // 2
        session = story.ledger.turns.session("me", key)
        assert story.ledger.turns.enrol(session, "me", Attempt(episode=True))
        if number % 2:
            story.judged(key, -1, policy_version=version)
        story.turn(key, policy_version=version)
        said = Feedback(-1.0 if number % 2 else 1.0, source="client", final=True)
        assert story.ledger.feedback.give("me", About("session", key), said)
    told = read_overview(tmp_path, 16)
    story.ledger.close()
    shares = {
        name: [(one["good"], one["of"]) for one in found["by_versions"]]
        for name, found in told["helps"].items()
    }
    assert shares == {
        "good_verdicts": [(0, 1)],
        "accepted_first_replies": [(0, 1)],
        "episode_outcomes": [(20, 40)],
    }
    assert told["verdicts"] == {"good": 0, "neutral": 0, "bad": 21, "none": 0}
    assert told["episodes"] == {"running": 0, "over": 40}, "of which nothing is queued yet"
    compared = told["compared"]
    assert [(one["good"], one["of"]) for one in compared["by_versions"]] == [(10, 20), (10, 20)]
    assert compared["of"] == "accepted first replies, and outcomes of episodes"
