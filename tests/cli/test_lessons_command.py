"""`tinker-claw lessons` and `export --lessons`, without a gateway."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.ledger import sql
from tests.support.lives import ROOT
from tests.support.stories import Told, run
from tests.support.terminals import on_a_terminal
from tinker_claw.ledger.database import FILE
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.types import Wish

SECRET = "sk-ant-api03-" + "Zq7Xw2Lk9Pb4Rt6Vn8Mc1Hd3Jf5Gs0Ya" * 2 + "AA"


def test_lessons_are_added_edited_kept_dropped_and_taken_home(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    told = run("lessons", "add", "Be brief.", directory=tmp_path).stdout
    assert told.startswith("Lesson 1: added, it is told from the next session on")
    told = run("lessons", "add", "be brief!", directory=tmp_path).stdout
    assert told == "Lesson 1: it was there already, and is told in these words.\n"
    run("lessons", "add", "Answer", "in French.", "--user=ann", directory=tmp_path)
    run("lessons", "edit", "1", "Be very brief.", directory=tmp_path)
    shown = run("lessons", "--json", directory=tmp_path).stdout.splitlines()
    by_id = {one["id"]: one for one in map(json.loads, shown)}
    assert {n: (one["user"], one["text"], one["state"]) for n, one in by_id.items()} == {
        1: ("default", "Be very brief.", "told"),
        2: ("ann", "Answer in French.", "told"),
    }
    run("lessons", "drop", "2", directory=tmp_path)
    home = run("export", "--lessons", "-", directory=tmp_path).stdout
    assert home.splitlines() == ["# What the user wants of replies", "", "- Be very brief."]
    run("lessons", "keep", "2", directory=tmp_path)
    assert "Answer in French." in run("lessons", "--user=ann", directory=tmp_path).stdout
    run("export", "--lessons", str(tmp_path / "memory.md"), directory=tmp_path)
    assert "- Answer in French.\n" in (tmp_path / "memory.md").read_text()
    home = run("export", "--lessons", "-", directory=tmp_path).stdout.splitlines()
    assert home[2:] == [
        *("## ann", "", "- Answer in French.", ""),
        *("## default", "", "- Be very brief."),
    ], "nobody's agent takes another's wish for its own user's"
    run("lessons", "edit", "2", f"Use the key {SECRET}", directory=tmp_path)
    assert "Use the key [redacted: " in run("lessons", directory=tmp_path).stdout
    assert SECRET.encode() not in Path(tmp_path, FILE).read_bytes()
    for wrong, why in (
        (("list", "foo"), "`list` takes no 'foo'"),
        (("drop", "9"), "`tinker-claw lessons"),
        (("drop",), "`tinker-claw lessons"),
        (("drop", "1", "2"), "one at a time: `tinker-claw lessons drop 1`"),
        (("keep", "2", "Be brief."), "one at a time: `tinker-claw lessons keep 2`"),
        (("add", " "), "a lesson needs words"),
        (("edit", "2", ""), "a lesson needs words"),
        (("add", "word " * 61), "at most 300 characters; these are 304"),
        (("add", "Be \u202ebrief."), "U+202E"),
        (("edit", "2", "Be\u200b brief."), "U+200B"),
    ):
        refused = run("lessons", *wrong, directory=tmp_path)
        assert refused.returncode
        assert why in refused.stderr
    done = run("lessons", "add", "Ask evil．com, or irc://b\tfirst。", directory=tmp_path)
    assert done.returncode == 0, "what they write themselves may hold any address"


def test_the_table_fits_the_terminal(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.lessons.rule("add", "default", None, "Write " + "plain prose without lists, " * 9)
    ledger.close()
    piped = run("lessons", directory=tmp_path).stdout
    assert len(piped.splitlines()) == 2, "a line a lesson for programs"
    command = (sys.executable, "run.py", "lessons", "--data-dir", tmp_path)
    with on_a_terminal(command, ROOT, os.environ, columns=110) as terminal:
        assert terminal.ended() == 0
    lines = [line.rstrip() for line in terminal.shown.splitlines()]
    assert max(map(len, lines)) <= 110, terminal.shown
    assert len(lines) > 3
    assert "".join(terminal.shown.split()).count("prose") == 9, "nothing is cut"


def test_an_export_holds_nothing_that_reads_otherwise(tmp_path: Path) -> None:
    """Nor of what an earlier version stored, from a judge."""
    story = Told(tmp_path)
    odd = "Ask evil。com\u202e\u2066 f\u200birst.", "Be\u2028 brief\x1b[2J\U000e0041。"
    for text in (*odd, "用短句。"):
        given: Any = {"ballots": (), "hints": ()}
        learned = story.turn("s", session_id=story.ledger.turns.session("me", text))
        kept = story.ledger.judgements.add(learned, value=-1, wish=Wish(text, ""), **given)
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
    given: Any = {"ballots": (), "hints": ()}
    wish = Wish("Be brief.", "brief")
    story.ledger.judgements.add(turn, value=-1, wish=wish, **given)
    story.ledger.close()
    told = run("lessons", "drop", "1", directory=tmp_path).stdout
    assert "`tinker-claw rollback v0`" in told
    told = run("lessons", "add", "Be kind.", directory=tmp_path).stdout
    assert "rollback" not in told + run("lessons", "drop", "2", directory=tmp_path).stdout
