"""Images in the ledger: each once, with every turn that may be trained, and gone with the last."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tests.support.ledger import new_turn, sql
from tests.support.pictures import picture
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.lessons import learn
from tinker_claw.ledger.prune import from_turn, in_session
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import LessonBlock, NextState, PlacedImage, Wish

ONE, TWO = picture(96, 64, "JPEG"), picture(64, 128)
PROMPT = (1, *[9] * 6, 2, *[9] * 8, 3)
IMAGES = (PlacedImage(1, 6, ONE, "jpeg"), PlacedImage(8, 8, TWO, "png"))


def add(ledger: Ledger, key: str, **changes: Any) -> int:
    said = {"prompt": PROMPT, "images": IMAGES} | changes
    return ledger.turns.add(new_turn(ledger, key, **said))


def files(ledger: Ledger) -> list[bytes]:
    return sql(ledger).column("SELECT data FROM images ORDER BY id")


def on_disk(ledger: Ledger) -> bytes:
    return b"".join(file.read_bytes() for file in ledger.path.parent.glob("ledger.sqlite3*"))


def test_an_image_is_kept_once_and_comes_back_with_each_turn(ledger: Ledger) -> None:
    first = add(ledger, "a")
    again = (IMAGES[0], PlacedImage(8, 6, ONE, "jpeg"))
    second = add(ledger, "b", images=again)
    assert files(ledger) == [ONE, TWO]
    assert ledger.turns.get(first).images == IMAGES
    assert ledger.turns.get(second).images == again
    sample = ledger.samples.add(first, 1, None)
    assert ledger.samples.load([sample])[0].images == IMAGES


def test_nothing_is_kept_of_turns_that_are_not_trained(ledger: Ledger) -> None:
    attempt = ledger.turns.session("me", "over")
    sql(ledger).write("UPDATE sessions SET episode = 2 WHERE id = ?", attempt)
    for key, changes in (("side", {"untrained_because": "side"}), ("over", {})):
        turn = add(ledger, key, **changes)
        assert ledger.turns.get(turn).images == ()
    assert Reason.EPISODE_OVER in sql(ledger).column("SELECT reason FROM turns")
    assert files(ledger) == []


def test_an_image_goes_with_the_last_turn_that_holds_it(ledger: Ledger) -> None:
    add(ledger, "a")
    kept = add(ledger, "b", images=IMAGES[:1])
    ledger.forget(in_session("a", None))
    assert files(ledger) == [ONE]
    assert ledger.turns.get(kept).images == IMAGES[:1]
    assert TWO not in on_disk(ledger)
    assert ONE[20:60] in on_disk(ledger)
    ledger.forget(from_turn(kept))
    assert files(ledger) == sql(ledger).column("SELECT turn_id FROM turn_images") == []
    for at in range(0, len(ONE) - 40, 40):
        assert ONE[at : at + 40] not in on_disk(ledger)


async def test_images_are_dropped_with_old_turns(ledger: Ledger) -> None:
    size, large = ledger.live_bytes(), picture(400, 400, "BMP")
    for n in range(10):
        image = PlacedImage(1, 6, large + bytes([n]), "png")
        turn = add(ledger, f"s{n}", prompt=PROMPT, images=(image,))
        ledger.turns.refuse(turn, TurnRefusal("neutral verdict"))
    assert ledger.live_bytes() > size + 10 * len(large)
    assert await ledger.trim(time.time() + 60) == 10
    assert files(ledger) == []
    assert ledger.live_bytes() < size + len(large)


def test_without_a_lesson_the_images_stand_where_they_do(ledger: Ledger) -> None:
    """A forgotten lesson leaves a trained turn's prompt, and its sample may be queued again."""
    source = ledger.turns.add(new_turn(ledger, "source"))
    ledger.turns.add_next_state(source, NextState("user", "be brief"))
    with sql(ledger).transaction() as tx:
        learn(tx, source, Wish("Be brief.", "be brief"))
    (lesson,) = sql(ledger).column("SELECT id FROM lessons")
    moved = tuple(replace(image, at=image.at + 3) for image in IMAGES)
    told = add(
        ledger,
        "told",
        prompt=(0, 5, 5, 5, *PROMPT[1:]),
        images=moved,
        told=LessonBlock((lesson,), 1, 3),
    )
    ledger.samples.add(told, 1, None)
    ledger.forget(from_turn(source))
    turn = ledger.turns.get(told)
    assert (turn.prompt, turn.images) == ((0, *PROMPT[1:]), IMAGES)
    late = add(ledger, "late", prompt=(0, 5, 5, 5, *PROMPT[1:]), images=moved,
               told=LessonBlock((lesson,), 1, 3))  # fmt: skip
    assert ledger.turns.get(late).images == ()
    assert Reason.FORGOTTEN_LESSON in sql(ledger).column("SELECT reason FROM turns")
