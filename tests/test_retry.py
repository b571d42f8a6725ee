"""Waits between attempts: they double up to a bound, are spread, and come to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from tinker_claw.retry import Backoff


def test_waits_double_up_to_a_bound() -> None:
    waits = Backoff(first_s=5, longest_s=300)
    assert [waits.after(n) for n in (1, 2, 3, 7, 8, 10_000)] == [5, 10, 20, 300, 300, 300]


def test_jitter_only_shortens_and_tells_those_who_failed_together_apart() -> None:
    waits = Backoff(first_s=8, longest_s=8, jitter=0.25)
    drawn = {waits.after(1) for _ in range(100)}
    assert 6 < min(drawn) <= max(drawn) <= 8
    assert len(drawn) > 50


def test_attempts_are_counted_with_the_first() -> None:
    assert [Backoff(1, 1, attempts=3).ends_after(n) for n in (1, 2, 3)] == [False, False, True]
    assert not Backoff(1, 1).ends_after(10_000)


class Fails:
    """A call that raises TimeoutError a number of times, and then succeeds."""

    def __init__(self, times: int, error: type[Exception] = TimeoutError) -> None:
        self.left, self.error, self.asked = times, error, 0

    def __call__(self) -> Awaitable[int]:
        return self._asked()

    async def _asked(self) -> int:
        self.asked += 1
        if self.asked <= self.left:
            raise self.error(str(self.asked))
        return self.asked


async def test_a_call_is_asked_again_until_it_answers_or_attempts_are_used_up() -> None:
    assert await Backoff(0, 0).call(Fails(4), TimeoutError) == 5
    backoff = Backoff(0, 0, attempts=3)
    both = asyncio.gather(*(backoff.call(Fails(2), TimeoutError) for _ in range(2)))
    assert await both == [3, 3], "each counts for itself"
    with pytest.raises(TimeoutError, match="3"):
        await backoff.call(Fails(9), TimeoutError)


@pytest.mark.parametrize(
    ("backoff", "error"), [(Backoff(0, 0, within_s=0.0), TimeoutError), (Backoff(0, 0), KeyError)]
)
async def test_no_attempt_follows_the_end_of_the_time_or_another_error(
    backoff: Backoff, error: type[Exception]
) -> None:
    fails = Fails(9, error)
    with pytest.raises(error, match="1"):
        await backoff.call(fails, TimeoutError)
    assert fails.asked == 1
