"""`tinker-claw explain`: every state of a turn in its own words, over real ledgers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.ledger import COMPLETION, sql
from tests.support.stories import SECRET, TEACHER, Told, every_state, run
from tinker_claw.cli import main
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.lessons import learn
from tinker_claw.ledger.prune import from_turn
from tinker_claw.served import OPENING
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind, Wish
from tinker_claw.types import LessonBlock as Lessons

FIELDS = {
    "trained": "outcome trained in step 1 · v1 · with 1 others",
    "trained on its verdict": "advantage -1.000",
    "expired": f"outcome not trained: {Reason.TOO_OLD}",
    "quarantined": "step 2 void: it makes no sense",
    "side": f"outcome not trained: {Reason.SIDE}: recap",
    "refused when captured": f"outcome not trained: {Reason.HUNG_UP}",
    "passed over": "outcome waits for the next message",
    "lost": "next none yet",
    "answers nobody knows what": "prompt 4 tokens · could not be tied to a reply",
    "waits for a next state": "outcome waits for the next message",
    "ended": "outcome waits for the next message",
    "waits for the judge": "outcome waits for the judge",
    "waits for the teacher": "verdict -1 by the judge",
    "waits to be queued": "verdict +1 by the judge",
    "refused when judged": "outcome not trained: neutral verdict, no hint",
    "no verdict": "verdict none by the judge (unreadable unreadable unreadable)",
    "queued": "outcome waits for a step",
    "queued again": "step 3 void: away",
    "in training": "outcome in step 4",
    "by another version": "not by the current version: v1 failed: no adapter",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    directory = tmp_path_factory.mktemp("every") / "data"
    return directory, every_state(directory)


def told(directory: Path, turn: int, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Output of the command, on one line."""
    assert main.main(["explain", str(turn), "--data-dir", str(directory), *flags]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_state_has_its_fields(
    world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    assert turns.keys() == FIELDS.keys()
    for state, turn in turns.items():
        assert FIELDS[state] in (text := told(directory, turn, capsys)), (state, text)


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
        "turn 1 · main turn 0 · session 1 (trained) · me",
        "plain request kind main · test",
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
        "verdict -1 by the client (judge -1: -1 -1 -1)",
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


def test_advantages_are_those_that_the_step_has_stored(
    world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    # Rewards +1 and -1 have the mean 0. Beside that, of the sampled token as its own candidate:
    # the student's share of it, times the bounded difference of the teacher, times w_opd.
    each = [1.0] * 3
    rows = zip(COMPLETION.tokens, COMPLETION.topk_ids, COMPLETION.topk_logprobs, strict=True)
    for at, (token, ids, own) in enumerate(rows):
        for v, b, of_teacher in zip(ids, own, TEACHER.targets[at], strict=True):
            if v == token:
                share = math.exp(b) / sum(map(math.exp, own))
                each[at] += 0.5 * share * max(-1.0, min(1.0, of_teacher - b))
    assert len({f"{a:.3f}" for a in each}) > 1, "the teacher has a say"
    low, high, mean = min(each), max(each), sum(each) / 3
    text = told(directory, turns["trained"], capsys)
    assert f"advantage +1.000 · tokens {low:+.3f} to {high:+.3f}, mean {mean:+.3f}" in text
    assert "old" not in text


def test_why_no_teacher_was_heard_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn = story.judged("s", -1, "hint")
    story.ledger.samples.add(turn, -1, None, TurnRefusal("asleep"))
    story.ledger.close()
    assert "teacher asleep" in told(tmp_path, turn, capsys)


def test_a_rollback_is_told_where_it_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    first = story.version
    trained, sample = story.sampled("s", 1)
    story.step(sample)
    queued, _ = story.sampled("later", -1)
    story.ledger.steps.roll_back(first)
    text = told(tmp_path, trained, capsys)
    assert "trained in step 1 · v1 (rolled back) · with 0 others" in text
    for _ in range(2):
        text = told(tmp_path, queued, capsys)
        assert f"not trained: {Reason.LEFT_BEHIND}" in text
        story.ledger.steps.roll_back(story.version)  # back to it, which does not bring it back
    story.ledger.close()


def test_of_a_turn_that_was_forgotten_no_words_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn, sample = story.sampled("s", 1, TEACHER)
    story.step(sample)
    story.ledger.forget(from_turn(turn))
    story.ledger.close()
    text = told(tmp_path, turn, capsys)
    assert "outcome forgotten after step 1 · v1 · with 0 others" in text
    assert "prompt" not in text
    assert SECRET not in text


def test_a_stale_turn_says_how_old_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn, sample = story.sampled("s", 1)
    story.step(story.sampled("before", -1)[1])
    story.step(sample)
    assert "1 step old" in told(tmp_path, turn, capsys)
    story.ledger.close()


def test_texts_are_left_out_where_that_is_asked_for(
    world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    for turn in turns.values():
        assert SECRET in told(directory, turn, capsys)
        assert SECRET not in told(directory, turn, capsys, "--no-text")


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
    assert main.main(["explain", "999", "--data-dir", str(world[0])]) == 2
    assert "has no turn 999; `tinker-claw log turns` lists them" in capsys.readouterr().err
    Told(tmp_path / "new").ledger.close()
    assert main.main(["explain", "--data-dir", str(tmp_path / "new")]) == 2
    assert "has no turn yet: talk to the agent first" in capsys.readouterr().err
    for command in (["explain"], ["forget", "turn"], ["lessons", "drop"]):
        assert main.main([*command, "9" * 20, "--data-dir", str(world[0])]) == 2
        assert "has nothing with so large a number" in capsys.readouterr().err
    assert main.main(["explain", "1", "--data-dir", str(tmp_path)]) == 2
    assert "holds no ledger; name the directory with --data-dir" in capsys.readouterr().err


def test_bare_explain_is_about_the_newest_main_turn(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.turn("first")
    newest = told.turn("then")
    told.turn("then", kind=Kind.SIDE, untrained_because=TurnRefusal(Reason.SIDE, "recap"))
    told.ledger.close()
    assert run("explain", directory=tmp_path).stdout.split()[:2] == ["turn", str(newest)]


def test_a_turn_whose_lesson_was_forgotten_names_that_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story, wish = Told(tmp_path), Wish("Answer in French.", "Answer")
    source = story.judged("said", -1, "in French")
    with sql(story.ledger).transaction() as tx:
        learn(tx, source, wish)
    (lesson,) = story.ledger.lessons.of_user()
    session = story.ledger.turns.session("me", "later")
    story.ledger.lessons.begin(session, [lesson.id])
    turn = story.judged("later", -1, TEACHER.hint, told=Lessons((lesson.id,), 1, 1))
    story.ledger.samples.add(turn, -1, TEACHER)
    assert "hint used" in told(tmp_path, turn, capsys)
    story.ledger.forget(from_turn(source))
    assert Reason.FORGOTTEN_LESSON in told(tmp_path, turn, capsys)
    story.ledger.close()


def test_a_forgotten_lesson_is_not_named_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story, wish = Told(tmp_path), Wish("Answer in French.", "Answer")
    source, turn = story.judged("said", -1, "in French"), story.judged("other", 1)
    with sql(story.ledger).transaction() as tx:
        learn(tx, source, wish)
    story.ledger.steps.begin(0, (), lesson=1, prompts=[("source", source), ("practised", turn)])
    assert "practice step 1: lesson 1 · from turn 1" in told(tmp_path, turn, capsys)
    story.ledger.forget(from_turn(source))
    text = told(tmp_path, turn, capsys)
    assert "practice step 1: a forgotten lesson · from turn 1" in text
    assert "lesson 1" not in text
    story.ledger.close()


def test_a_session_that_its_first_messages_name_is_told_in_words(tmp_path: Path) -> None:
    story = Told(tmp_path)
    story.turn("s", session_id=story.ledger.turns.session("me", f"{OPENING}0042abcd"))
    story.ledger.close()
    text = " ".join(run("explain", directory=tmp_path).stdout.split())
    assert "session 1 · me" in text
    assert "0042abcd" not in text
