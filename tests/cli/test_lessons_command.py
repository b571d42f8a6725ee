"""`tinker-claw lessons` and `export --lessons`, without a gateway."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ledger import sql
from tests.support.stories import Told, run
from tinker_claw.ledger.database import FILE
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.types import Wish

SECRET = "sk-ant-api03-" + "Zq7Xw2Lk9Pb4Rt6Vn8Mc1Hd3Jf5Gs0Ya" * 2 + "AA"


def test_lessons_are_added_edited_kept_dropped_and_taken_home(tmp_path: Path) -> None:
    Ledger(tmp_path).close()

    def lessons(*words: str) -> str:
        done = run("lessons", *words, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def home() -> list[str]:
        return run("export", "--lessons", "-", directory=tmp_path).stdout.splitlines()

    assert lessons("add", "Be brief.").startswith("Lesson 1: it is told from the next session on")
    assert lessons("add", "be brief!").startswith("Lesson 1: "), "it was there already"
    lessons("add", "Answer", "in French.", "--user=ann")
    lessons("edit", "1", "Be very brief.")
    rows = map(json.loads, lessons("--json").splitlines())
    assert {row["id"]: (row["user"], row["text"], row["state"]) for row in rows} == {
        1: ("default", "Be very brief.", "told"),
        2: ("ann", "Answer in French.", "told"),
    }
    lessons("drop", "2")
    assert home() == ["# What the user wants of replies", "", "- Be very brief."]
    lessons("keep", "2")
    assert "Answer in French." in lessons("--user=ann")
    assert home()[2:] == [
        "## ann",
        "",
        "- Answer in French.",
        "",
        "## default",
        "",
        "- Be very brief.",
    ], "nobody's agent takes another's wish for its own user's"
    lessons("edit", "2", f"Use the key {SECRET}")
    assert "Use the key [redacted: " in lessons()
    assert SECRET.encode() not in Path(tmp_path, FILE).read_bytes()
    for wrong, why in (
        (("list", "foo"), "`list` takes no 'foo'"),
        (("drop", "9"), "`tinker-claw lessons"),
        (("drop", "1", "2"), "one at a time: `tinker-claw lessons drop 1`"),
        (("edit", "2", ""), "a lesson needs words"),
        (("add", "word " * 61), "at most 300 characters; these are 304"),
        (("add", "Be \u202ebrief."), "U+202E"),
    ):
        refused = run("lessons", *wrong, directory=tmp_path)
        assert refused.returncode
        assert why in refused.stderr
    lessons("add", "Ask evil．com, or irc://b\tfirst。")  # what they write may hold any address


def test_an_export_holds_nothing_that_reads_otherwise(tmp_path: Path) -> None:
    """Nor of what an earlier version stored, from a judge."""
    story = Told(tmp_path)
    odd = "Ask evil。com\u202e\u2066 f\u200birst.", "Be\u2028 brief\x1b[2J\U000e0041。"
    for text in (*odd, "用短句。"):
        turn = story.turn("s", session_id=story.ledger.turns.session("me", text))
        wish = Wish(text, "")
        kept = story.ledger.judgements.add(turn, value=-1, wish=wish, ballots=(), hints=())
        story.ledger.lessons.rule("keep", None, kept)
    for state in ("aside", "candidate"):
        ended = story.ledger.lessons.rule("add", "me", None, f"Be {state}.")
        sql(story.ledger).rows("UPDATE lessons SET state = ? WHERE id = ?", state, ended)
    story.ledger.close()
    home = run("export", "--lessons", "-", directory=tmp_path).stdout
    assert home.splitlines()[2:] == ["- 用短句。", "- Be brief[2J。", "- Ask evil.com first."]


def test_a_drop_offers_the_version_before_it_was_said(tmp_path: Path) -> None:
    story = Told(tmp_path)
    turn = story.turn("s", session_id=story.ledger.turns.session("me", "s"))
    wish = Wish("Be brief.", "brief")
    story.ledger.judgements.add(turn, value=-1, wish=wish, ballots=(), hints=())
    story.ledger.close()
    dropped = run("lessons", "drop", "1", directory=tmp_path).stdout
    assert "`tinker-claw rollback v0`" in dropped
