"""Batches: shares, groups, and an order that does not matter."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.learning import World, world
from tests.support.ledger import sql
from tinker_claw.learner.batch import FILL_S, Choice, choose
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.samples import MOST_PLAIN, QueuedSample, ready
from tinker_claw.turn_state import Reason
from tinker_claw.types import JudgedBy, Lacks

NOW = 1e9


def waits(
    number: int,
    *,
    session: int = 1,
    user: str = "ann",
    judge: JudgedBy = "user",
    reward: float = 1.0,
    bare: bool = False,
    plain: bool = False,
    group: int | None = None,
    age: float = 0.0,
) -> QueuedSample:
    lacks = Lacks.BETTER if bare else Lacks.REJECTION if plain else None
    return QueuedSample(number, session, user, judge, reward, lacks, group, NOW - age)


def chosen(
    waiting: Iterable[QueuedSample],
    *,
    batch_size: int = 16,
    most: int = 128,
    share: float = 0.5,
    now: float = NOW,
) -> Choice:
    return choose(list(waiting), batch_size=batch_size, most=most, share=share, now=now)


def test_a_user_alone_in_one_session_waits_for_nobody() -> None:
    assert chosen(waits(n) for n in range(20)).ids == tuple(range(4, 20)), "the newest"
    assert chosen(waits(n) for n in range(15)) == Choice((), None), "fifteen are not sixteen"


def test_a_user_alone_waits_for_none_of_their_sessions_but_all_come_in() -> None:
    greedy = [waits(n) for n in range(30)]
    other = [waits(100 + n, session=2) for n in range(3)]
    assert chosen([*greedy, *other]).ids == (*range(17, 30), 100, 101, 102)


def test_what_tools_have_judged_makes_no_step_and_is_at_most_half_of_one() -> None:
    tools = [waits(n, judge="tools", age=2 * FILL_S) for n in range(100)]
    assert chosen(tools) == Choice((), None), "however long they wait"
    said = [waits(100 + n) for n in range(20)]
    assert chosen([*tools, *said[:7]]) == Choice((), None)
    assert chosen([*tools, *said[:8]]).ids == (*range(92, 108),)
    assert chosen([*tools, *said[:12]]).ids == (*range(96, 112),)
    assert chosen([*tools, *said]).ids == (*range(104, 120),), "people come first"
    assert chosen(said[:16]).ids == tuple(range(100, 116)), "and wait for no tool"
    outcomes = [waits(200 + n, judge="outcome") for n in range(16)]
    assert chosen(outcomes).ids == tuple(range(200, 216)), "how episodes ended is no tool's word"
    assert chosen([waits(1, judge="tools")], batch_size=1).ids == ()
    assert [ready([*tools, *said[:n]], 16) for n in (0, 7, 8, 20)] == [8, 15, 16, 40]


def test_a_rejection_without_a_hint_waits_for_a_better_reply_of_the_same_judge() -> None:
    bare = [waits(n, reward=-1.0, bare=True) for n in range(40)]
    hinted = [waits(100 + n, reward=-1.0) for n in range(16)]
    tools = [waits(200 + n, judge="tools") for n in range(8)]
    assert chosen(bare) == Choice((), None)
    assert chosen([*bare, *hinted[:8]]) == Choice((), None)
    assert chosen([*bare, *hinted]).ids == tuple(range(100, 116)), "they go without them"
    assert chosen([*bare, *tools]) == Choice((), None), "a tool's success is not better than they"
    assert ready([*bare, *tools], 16) == 8
    for reward in (0.5, -0.5):
        better = waits(0, reward=reward, age=FILL_S)
        assert chosen([better, *bare[1:]]).ids == (0, *range(25, 40)), "however old it is"
    worse = [waits(300 + n, judge="tools", reward=-1.0, bare=True) for n in range(8)]
    eight = [waits(400 + n) for n in range(8)]
    assert chosen([*worse, *eight]) == Choice((), None)
    assert chosen([*worse, *tools[:1], *eight]).ids == (200, *range(301, 308), *range(400, 408))


def test_a_batch_without_a_rejection_hint_or_rating_waits() -> None:
    content = [waits(n, plain=True) for n in range(40)]
    assert chosen(content) == Choice((), None), "however many they are"
    assert ready(content, 16) == 0
    assert chosen([*content, waits(50, reward=-1.0)]).ids == (*range(25, 40), 50), "with the newest"
    older = waits(3, reward=-1.0)
    assert chosen([*content[:3], older, *content[4:]]).ids == (3, *range(25, 40)), "however old"
    bare = waits(50, reward=-1.0, bare=True)
    assert chosen([*content, bare]).ids == (*range(25, 40), 50)
    apart = [replace(one, judge="tools") for one in content[:20]]
    failed = waits(60, judge="tools", reward=-1.0, bare=True)
    assert chosen([*apart, failed, *content[20:]]) == Choice((), None), "each judge for itself"
    assert ready([*apart, failed, *content[20:]], 16) == 8
    said = [waits(70 + n) for n in range(8)]
    assert chosen([*apart, *said]) == Choice((), None)
    assert chosen([*apart, failed, *said]).ids == (*range(13, 20), 60, *range(70, 78))
    group = [waits(80 + n, session=n, judge="outcome", group=1) for n in range(16)]
    assert chosen([*content, *group]).ids == tuple(range(80, 96)), "no group waits"


@pytest.mark.parametrize(
    "greedy",
    [
        [waits(n, session=1, user="bob") for n in range(30)],
        [waits(n, session=n, user="bob") for n in range(30)],
    ],
    ids=["session", "user"],
)
def test_none_fills_more_than_its_share_while_others_are_there(greedy: list[QueuedSample]) -> None:
    others = [waits(100 + n, session=100 + n % 4, user="eve") for n in range(8)]
    assert chosen([*greedy, *others]).ids == (*range(22, 30), *range(100, 108))
    fewer = others[:3]
    assert chosen([*greedy, *fewer]) == Choice((), NOW + FILL_S), "what is over it waits"
    # In time it fills up, the newest first; the others are in that batch.
    later = chosen([*greedy, *fewer], now=NOW + FILL_S)
    assert later.ids == (*range(17, 30), 100, 101, 102)
    assert len(chosen([*greedy, *fewer], share=1.0).ids) == 16


def test_look_again_when_the_next_one_has_waited_long_enough() -> None:
    some = [waits(n, age=FILL_S - 10 * n) for n in range(1, 16)] + [waits(50, user="eve")]
    assert chosen(some) == Choice((), NOW + 10)
    taken = waits(50, user="eve", age=FILL_S)
    assert chosen([*(waits(n) for n in range(15)), taken]) == Choice((), NOW + FILL_S), (
        "not at once"
    )


def test_group_is_taken_whole_and_makes_a_batch_as_large_as_it_is() -> None:
    group = [waits(n, session=n % 4, group=7) for n in range(24)]
    assert chosen(group).ids == tuple(range(24))
    assert chosen(group, most=10).ids == tuple(range(24)), "alone, though it is larger than allowed"
    alone = [waits(100 + n) for n in range(20)]
    assert chosen([*group, *alone]).ids == (*range(24), *range(112, 120)), "one session has half"
    assert chosen(group[:10] + alone[:6]).ids == (*range(10), *range(100, 106))


def test_groups_share_a_batch_up_to_the_bound_and_go_first_where_they_find_no_room() -> None:
    group = [waits(10 + n, session=n, group=1) for n in range(30)]
    other = [waits(50 + n, session=40 + n % 2, group=2) for n in range(10)]
    newer = [waits(100 + n) for n in range(5)]
    assert len(chosen([*group[:10], *other], most=20).ids) == 20
    assert len(chosen([*group[:10], *other], most=19).ids) == 10, "the newer alone, the other next"
    assert chosen([*newer, *group], most=32).ids == tuple(range(10, 40))
    assert chosen([*newer, *group[:14]], most=16).ids == (*range(10, 24), 103, 104)


def test_groups_of_one_user_leave_room_for_the_others() -> None:
    bobs = [waits(n, session=n % 8, user="bob", group=n // 8) for n in range(32)]
    ann = [waits(100 + n) for n in range(8)]
    assert chosen([*bobs, *ann]).ids == (*range(24, 32), *range(100, 108))


def test_group_beyond_its_share_leaves_the_others_theirs() -> None:
    """The group is taken whole, so the step is larger, and nobody is kept out of it."""
    group = [waits(n, session=n % 8, user="bob", group=1) for n in range(64)]
    eve = [waits(100 + n, session=n % 4, user="eve") for n in range(30)]
    for there in (8, 3, 30):
        found = chosen([*group, *eve[:there]]).ids
        assert found == (*range(64), *range(100 + max(0, there - 8), 100 + there))
    assert chosen([*group, *eve], share=1.0).ids == tuple(range(114, 130)), "without shares"
    theirs = [replace(one, id=one.id + 200, user="eve", group=2) for one in group]
    assert len(chosen([*group, *theirs]).ids) == 128
    assert len(chosen([*group, *theirs], most=100).ids) == 64


ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(("user", "tools", "bare", "plain", "outcome")),
        st.none() | st.integers(0, 3),
        st.floats(0, 2 * FILL_S),
    ),
    max_size=40,
)
JUDGE = {"bare": "user", "plain": "user"}


@given(
    ROWS,
    st.integers(1, 8),
    st.integers(0, 12),
    st.floats(0.01, 1.0),
    st.randoms(use_true_random=False),
)
def test_no_order_of_arrival_changes_a_batch_and_no_group_is_cut(
    rows: list[Any], batch_size: int, more: int, share: float, random: Any
) -> None:
    waiting = [
        waits(
            n,
            session=s,
            user="ab"[s % 2],
            judge="outcome" if g is not None else JUDGE.get(kind, kind),
            reward=-1.0 if kind == "bare" else 1.0,
            bare=kind == "bare" and g is None,
            plain=kind == "plain" and g is None,
            group=None if g is None else 10 * g + s % 2,
            age=age,
        )
        for n, (s, kind, g, age) in enumerate(rows)
    ]
    most = batch_size + more

    def ask(some: list[QueuedSample], now: float = NOW) -> Choice:
        return chosen(some, batch_size=batch_size, most=most, share=share, now=now)

    found = ask(waiting)
    shuffled = waiting.copy()
    random.shuffle(shuffled)
    assert ask(shuffled) == found

    taken = [one for one in waiting if one.id in found.ids]
    sizes = Counter(one.group for one in waiting)
    whole = Counter(one.group for one in taken)
    assert all(whole[g] == sizes[g] for g in whole if g is not None)
    assert len(taken) <= most or {one.group for one in taken} - {None} == {taken[0].group}
    if found.ids and len(found.ids) < batch_size:
        rest = [
            sizes[one.group] for one in waiting if one.group is not None and one.id not in found.ids
        ]
        assert any(size + len(taken) > most for size in rest), "only a group makes it smaller"

    alone = [one for one in taken if one.group is None]
    if found.ids:
        by_tools = sum(one.judge == "tools" for one in alone)
        assert by_tools <= batch_size // 2
        assert by_tools < len(taken), "tools alone make no step"
    if (
        any(one.lacks == Lacks.BETTER for one in taken) and int(share * batch_size) > 1
    ):  # a share holds both
        assert any(one.judge == "user" and one.reward == 1.0 for one in alone)
    if any(one.lacks == Lacks.REJECTION for one in taken):
        assert any(one.judge == "user" and one.lacks != Lacks.REJECTION for one in alone)

    # Nothing that is ready waits for ever: once all of it is old there is a batch.
    late = ask(waiting, NOW + FILL_S)
    assert bool(late.ids) == (ready(waiting, batch_size) >= batch_size)
    if not found.ids and late.ids:
        assert found.look_at is not None
        assert NOW < found.look_at <= NOW + FILL_S


# Plain acceptances in a run


async def content(w: World, count: int) -> list[int]:
    turns = [w.turn("YES") for _ in range(count)]
    await w.settled()
    w.learner.wake()
    await asyncio.sleep(0.05)
    return turns


async def trained(w: World) -> set[int]:
    await w.version(1)
    assert len(w.trainer.steps) == 1
    return {*sql(w.ledger).column("SELECT id FROM turns WHERE state = 'trained'")}


async def test_plain_acceptances_make_no_step_and_wait_for_a_rejection(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, batch_size=16) as w:
        turns = await content(w, 20)
        assert (w.trainer.steps, w.ledger.samples.queued()) == ([], 20)

        wrong = w.turn("NO, HOW it should be")
        assert await trained(w) == {*turns[-15:], wrong}, "the newest"


async def test_a_rating_makes_a_step_of_accepted_replies(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=16) as w:
        turns = await content(w, 16)
        assert w.trainer.steps == []
        assert w.ledger.feedback.give("me", About("turn", turns[3]), Feedback(1.0))
        w.judging.wake()
        assert await trained(w) == {*turns}


async def test_the_newest_plain_acceptances_are_kept(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=16) as w:
        turns = await content(w, MOST_PLAIN + 44)
        await w.until(lambda: w.ledger.samples.queued() == MOST_PLAIN)
        expired = sql(w.ledger).rows("SELECT id, reason FROM turns WHERE state = 'refused'")
        assert {tuple(row) for row in expired} == {
            (turn, Reason.NOTHING_BETTER) for turn in turns[:44]
        }
        assert w.trainer.steps == []


def test_bare_rejections_need_a_better_reply_that_is_none_itself() -> None:
    """A rating of -0.5 is better than a verdict of -1, and says no more about what is right."""
    queue = [waits(n, session=n, reward=-1.0, bare=True) for n in range(16)]
    queue.append(waits(16, session=16, reward=-0.5, bare=True))
    assert ready(queue, 4) == 0
    assert choose(queue, batch_size=4, most=16, now=NOW).ids == ()
