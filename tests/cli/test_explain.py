"""`tinker-claw explain`: every state of a turn in its own words, over real ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ledger import sql
from tests.support.stories import SECRET, TEACHER, Told, run
from tinker_claw.cli import main
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.lessons import learn
from tinker_claw.ledger.prune import from_turn
from tinker_claw.served import OPENING
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind, Wish
from tinker_claw.types import LessonBlock as Lessons

FIELDS = {
    "trained": "outcome trained in step 1 · v1",
    "trained on its verdict": "advantage -1.000",
    "quarantined": "step 2 void: it makes no sense",
    "lost": "next none yet",
    "answers nobody knows what": "prompt 4 tokens · could not be tied to a reply",
    "waits for the teacher": "verdict -1 by the judge",
    "no verdict": "verdict none by the judge (unreadable unreadable unreadable)",
    "queued again": "step 3 void: away",
    "by another version": "not by the current version: v1 failed: no adapter",
}
"""What is said of a state beside its outcome, which test_outcome.py has."""


def told(directory: Path, turn: int, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Output of the command, on one line."""
    assert main.main(["explain", str(turn), "--data-dir", str(directory), *flags]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_lessons_that_a_turn_was_told_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    rule, plain = story.ledger.lessons.rule, story.turn("plain")
    first, second = (rule("add", "me", None, f"{SECRET} {word}.") for word in ("one", "two"))
    turn = story.turn(told=Lessons((first, second), 1, 2))
    rule("edit", "me", second, f"{SECRET} new")
    story.ledger.close()
    shown = told(tmp_path, turn, capsys)
    for number, word in ((first, "one."), (second, "new")):
        assert f"lesson {number} | {SECRET} {word}" in shown
    assert SECRET not in (hidden := told(tmp_path, turn, capsys, "--no-text"))
    assert f"lesson {second}" in hidden
    assert "lesson" not in told(tmp_path, plain, capsys)


def test_a_trained_turn_is_told_from_its_request_to_its_version(
    world: tuple[Path, dict[str, int]],
) -> None:
    directory, turns = world
    done = run("explain", str(turns["trained"]), directory=directory)
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for part in (
        "turn 1 · session 1 (trained) · me",
        "kind main · test",
        f"prompt 4 tokens | {SECRET} request",
        f"reply v0 · 3 tokens · stop | {SECRET} reply",
        f"next owner | {SECRET} answer",
        "verdict +1 by the judge (+1 +1 +1)",
        f"hint used | {SECRET} hint",
        "advantage +1.000 · tokens",
    ):
        assert part in text, part


def test_what_was_said_outright_is_told_beside_what_the_judge_found(
    world: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    text = told(directory, turns["trained"], capsys)
    assert "rating +0.5 by the user, of the session · trains nothing" in text
    assert f"| {SECRET} end" in text
    text = told(directory, turns["trained on its verdict"], capsys)
    for part in (
        "rating -0.5 by the client, of the reply · trains nothing: the reply was trained already",
        f"| {SECRET} reason",
        "verdict -1 by the client (judge -1 -1 -1)",
    ):
        assert part in text, part
    assert SECRET not in told(directory, turns["trained on its verdict"], capsys, "--no-text")

    fresh = Told(tmp_path)
    liked, hinted = fresh.turn("liked"), fresh.turn("hinted")
    fresh.ledger.feedback.give("me", About("turn", liked), Feedback(1.0))
    fresh.ledger.feedback.give("me", About("turn", hinted), Feedback(-1.0, "be brief"))
    fresh.ledger.close()
    text = told(tmp_path, liked, capsys)
    assert "next none yet rating +1 by the user, of the reply verdict +1 by the user" in text
    text = told(tmp_path, hinted, capsys)
    assert "hint not used | be brief outcome waits for the judge" in text


def test_why_no_teacher_was_heard_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn = story.judged("s", -1, "hint")
    story.ledger.samples.add(turn, -1, None, TurnRefusal("asleep"))
    story.ledger.close()
    assert "teacher asleep" in told(tmp_path, turn, capsys)


def test_what_steers_a_terminal_and_what_is_long_is_not_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn = story.turn(request_text="\x1b[2J\x07sly", reply_text="long " * 1000)
    story.ledger.close()
    text = told(tmp_path, turn, capsys)
    assert "\x1b" not in text
    assert "and 3500 more characters" in text


def test_a_turn_or_ledger_that_is_not_there_is_a_sentence(
    world: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Told(tmp_path / "new").ledger.close()
    for directory, command, says in (
        (world[0], ["explain", "999"], "has no turn 999"),
        (world[0], ["explain", "9" * 20], "has nothing with so large a number"),
        (tmp_path / "new", ["explain"], "has no turn yet"),
        (tmp_path, ["explain", "1"], "holds no ledger"),
    ):
        assert main.main([*command, "--data-dir", str(directory)]) == 2
        assert says in capsys.readouterr().err


def test_bare_explain_is_about_the_newest_main_turn(tmp_path: Path) -> None:
    story = Told(tmp_path)
    story.turn("first")
    opened = story.ledger.turns.session("me", f"{OPENING}0042abcd")
    newest = story.turn("then", session_id=opened)
    story.turn("then", kind=Kind.SIDE, untrained_because=TurnRefusal(Reason.SIDE, "recap"))
    story.ledger.close()
    text = " ".join(run("explain", directory=tmp_path).stdout.split())
    assert text.startswith(f"turn {newest} ")
    assert f"session {opened} · me" in text
    assert "0042abcd" not in text, "the name of a session of its first messages"


def test_a_forgotten_lesson_is_a_reason_and_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    ledger, source = story.ledger, story.judged("said", -1, "in French")
    with sql(ledger).transaction() as tx:
        learn(tx, source, Wish("Answer in French.", "Answer"))
    (lesson,) = ledger.lessons.of_user()
    ledger.lessons.begin(ledger.turns.session("me", "later"), [lesson.id])
    taught = story.judged("later", -1, TEACHER.hint, told=Lessons((lesson.id,), 1, 1))
    ledger.samples.add(taught, -1, TEACHER)
    practised = story.judged("other", 1)
    ledger.steps.begin(0, (), lesson=1, prompts=[("source", source), ("practised", practised)])
    assert "hint used" in told(tmp_path, taught, capsys)
    assert "practice step 1: lesson 1 · from turn 1" in told(tmp_path, practised, capsys)
    ledger.forget(from_turn(source))
    assert Reason.FORGOTTEN_LESSON in told(tmp_path, taught, capsys)
    text = told(tmp_path, practised, capsys)
    assert "practice step 1: a forgotten lesson · from turn 1" in text
    assert "lesson 1" not in text
    ledger.close()


def test_every_state_has_its_fields_and_its_texts_can_be_left_out(
    world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    for state, turn in turns.items():
        text = told(directory, turn, capsys)
        assert FIELDS.get(state, "") in text, (state, text)
        assert SECRET in text
        assert SECRET not in told(directory, turn, capsys, "--no-text")
