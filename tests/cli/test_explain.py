"""`tinker-claw explain`: every state of a turn in its own words, over real ledgers."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from tests.support.gateways import gateway
from tests.support.ledger import COMPLETION, queue
from tests.support.stories import SECRET, TEACHER, Told, every_state, run
from tinker_claw.cli import main
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.lessons import learn
from tinker_claw.ledger.outcome import read_run
from tinker_claw.ledger.prune import from_turn
from tinker_claw.ledger.views import Filter, read_turns
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import OPENING
from tinker_claw.types import Kind, Wish
from tinker_claw.types import LessonBlock as Lessons
from tinker_claw.why import Why
from tinker_claw.words import outcome

SENTENCES = {
    "trained": "It was trained in step 1, with 1 other sample, which made v1 at ",
    "trained on its verdict": "Advantage by its reward: -1.000 (above 0: more of this).",
    "expired": "its sample expired, because too many steps had been taken since v0 answered "
    "(--max-staleness); by now they are 1.",
    "quarantined": "set aside. Step 2 with it was void: it makes no sense.",
    "side": "It is never trained: it is a side turn.",
    "refused when captured": "It is not trained: the client hung up.",
    "passed over": "It waits for a next state, and may wait for ever: its session has gone on with "
    "turn 8, which does not answer this reply.",
    "lost": "its session has gone on with turn 10, which could not be tied to a reply",
    "answers nobody knows what": "That could not be tied to a reply, so no turn got it as its next "
    "state.",
    "waits for a next state": "It waits for a next state: the user's next message, or the results",
    "ended": "It waits for a next state in an idle session: whatever the user still says in it",
    "waits for the judge": "It waits for the judge.",
    "waits for the teacher": "It was judged, and waits to be queued",
    "waits to be queued": "It was judged, and waits to be queued",
    "refused when judged": "It is not trained: neutral verdict, no hint.",
    "no verdict": "It is not trained: no valid vote, no hint.",
    "queued": "It waits for its step; 3 samples are ready. A step takes 2 at a time",
    "queued again": "Step 3 with it was void: away.",
    "in training": "It is being trained right now, in step 4.",
    "by another version": "It was not the current version that answered: v1 failed: no adapter.",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    directory = tmp_path_factory.mktemp("every") / "data"
    return directory, every_state(directory)


def told(directory: Path, turn: int, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Output of the command, on one line."""
    assert main.main(["explain", str(turn), "--data-dir", str(directory), *flags]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_state_is_told_in_its_own_words(
    world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    assert turns.keys() == SENTENCES.keys()
    seen = {state: told(directory, turn, capsys) for state, turn in turns.items()}
    for state, sentence in SENTENCES.items():
        assert sentence in seen[state], (state, seen[state])
    with reading(directory / FILE) as ledger:
        run = read_run(ledger, 16)
        fates = {outcome(view, run) for view in read_turns(ledger, Filter(), len(turns))}
    # Three are told apart by what is said beside it: the version, the loss, the hint.
    assert len(fates) == len(turns) - 3


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
        assert f"Its prompt has lesson {number}: | {SECRET} {word}" in shown
    assert SECRET not in (hidden := told(tmp_path, turn, capsys, "--no-text"))
    assert f"Its prompt has lesson {second}" in hidden
    assert "lesson" not in told(tmp_path, plain, capsys)


def test_a_trained_turn_is_told_from_its_request_to_its_version(
    world: tuple[Path, dict[str, int]],
) -> None:
    directory, turns = world
    done = run("explain", str(turns["trained"]), directory=directory)
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for part in (
        "main turn 0 of session 1 (trained) of user me",
        "for: plain request. Main turn: test.",
        f"It asked, in a prompt of 4 tokens: | {SECRET} request",
        f"v0 replied with 3 tokens and stopped: | {SECRET} reply",
        f"The owner went on: | {SECRET} answer",
        "The judge voted +1, +1, +1: the verdict is +1 (good).",
        f"Hint, as the judge put it, used: | {SECRET} hint",
        "Advantage by its reward: +1.000 (above 0: more of this). Token advantages: min ",
    ):
        assert part in text, part


def test_what_was_said_outright_is_told_beside_what_the_judge_found(
    world: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    text = told(directory, turns["trained"], capsys)
    assert f"Its user rated the end of its session outright: +0.5: | {SECRET} end" in text
    assert "The judge voted +1, +1, +1: the verdict is +1 (good)." in text
    text = told(directory, turns["trained on its verdict"], capsys)
    for part in (
        f"Its client rated it outright: -0.5: | {SECRET} reason",
        "The judge voted -1, -1, -1: by them the verdict is -1 (bad).",
        "Its client's rating outranks the judge: the verdict is -1 (bad).",
        "Its client's rating is recorded and trains nothing: the reply was trained already.",
    ):
        assert part in text, part
    assert SECRET not in told(directory, turns["trained on its verdict"], capsys, "--no-text")

    fresh = Told(tmp_path)
    liked, hinted = fresh.turn("liked"), fresh.turn("hinted")
    fresh.ledger.feedback.give("me", About("turn", liked), Feedback(1.0))
    fresh.ledger.feedback.give("me", About("turn", hinted), Feedback(-1.0, "be brief"))
    fresh.ledger.close()
    text = told(tmp_path, liked, capsys)
    assert (
        "Nothing has followed it so far. Its user rated it outright: +1. Its user's rating" in text
    )
    assert "outranks the judge: the verdict is +1 (good). It was judged, and waits to be" in text
    text = told(tmp_path, hinted, capsys)
    assert "Hint, as the user put it: | be brief It was judged, and waits to be queued" in text


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
    assert (
        "Advantage by its reward: +1.000 (above 0: more of this). "
        f"Token advantages: min {low:+.3f}, mean {mean:+.3f}, max {high:+.3f}." in text
    )
    assert "steps old" not in text


def test_why_no_teacher_was_heard_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn = story.judged("s", -1, "hint")
    story.ledger.samples.add(turn, -1, None, "it was asleep")
    story.ledger.close()
    said = "No teacher scored it: it was asleep."
    assert said in told(tmp_path, turn, capsys)


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
    assert "It was trained in step 1, alone, which made v1 at" in text
    assert "A rollback has left that version behind." in text
    for _ in range(2):
        text = told(tmp_path, queued, capsys)
        assert "It is not trained: a rollback has left the version that answered behind." in text
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
    assert f"Turn {turn} of session 1 was forgotten: its words are gone." in text
    assert "It was trained in step 1, alone, which made v1" in text
    assert "Nothing has followed it" not in text


def test_a_stale_turn_says_how_old_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    turn, sample = story.sampled("s", 1)
    story.step(story.sampled("before", -1)[1])
    story.step(sample)
    assert "It was 1 step old by then; its advantages are corrected for that." in told(
        tmp_path, turn, capsys
    )
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


async def test_before_the_first_step_a_batch_is_that_of_the_gateway_that_runs(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        queue(world.ledger, 1)
        flags = ["explain", "1", "--data-dir", str(tmp_path), "--batch-size", "2"]
        assert await asyncio.to_thread(main.main, flags) == 0
    assert "A step takes 16, so 15 are missing." in capsys.readouterr().out


def test_after_another_batch_size_was_said_the_next_step_takes_that(
    world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, turns = world
    assert "A step takes 2 at a time" in told(directory, turns["queued"], capsys)
    shown = told(directory, turns["queued"], capsys, "--batch-size", "8")
    assert "A step takes 8, so 5 are missing." in shown


def test_bare_explain_is_about_the_newest_main_turn(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.turn("first")
    newest = told.turn("then")
    told.turn("then", kind=Kind.SIDE, untrained_because=Why.SIDE.says("recap"))
    told.ledger.close()
    assert run("explain", directory=tmp_path).stdout.startswith(f"Turn {newest}: ")


def test_where_a_forgotten_lesson_took_the_prompt_nothing_is_said_of_a_place_for_hints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place of the hint is gone with the prompt; the hint was used."""
    story, wish = Told(tmp_path), Wish("Answer in French.", "Answer")
    source = story.judged("said", -1, "in French")
    with story.ledger._db.transaction() as tx:
        learn(tx, source, wish)
    (lesson,) = story.ledger.lessons.of_user()
    session = story.ledger.turns.session("me", "later")
    story.ledger.lessons.begin(session, [lesson.id])
    turn = story.judged("later", -1, TEACHER.hint, told=Lessons((lesson.id,), 1, 1))
    story.ledger.samples.add(turn, -1, TEACHER)
    assert ", used:" in told(tmp_path, turn, capsys)
    story.ledger.forget(from_turn(source))
    text = told(tmp_path, turn, capsys)
    assert "its prompt held a lesson whose source was forgotten" in text
    assert "no place for a hint" not in text
    story.ledger.close()


def test_a_forgotten_lesson_is_not_named_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story, wish = Told(tmp_path), Wish("Answer in French.", "Answer")
    source, turn = story.judged("said", -1, "in French"), story.judged("other", 1)
    with story.ledger._db.transaction() as tx:
        learn(tx, source, wish)
    story.ledger.steps.begin(0, (), lesson=1, prompts=[("source", source), ("practised", turn)])
    assert "Step 1 practised lesson 1, said of turn 1" in told(tmp_path, turn, capsys)
    story.ledger.forget(from_turn(source))
    text = told(tmp_path, turn, capsys)
    assert "Step 1 practised a forgotten lesson, said of turn 1" in text
    assert "lesson 1" not in text
    story.ledger.close()


def test_a_session_that_its_first_messages_name_is_told_in_words(tmp_path: Path) -> None:
    story = Told(tmp_path)
    story.turn("s", session_id=story.ledger.turns.session("me", f"{OPENING}0042abcd"))
    story.ledger.close()
    text = " ".join(run("explain", directory=tmp_path).stdout.split())
    assert "(known by its first messages) of user me" in text
    assert "0042abcd" not in text
