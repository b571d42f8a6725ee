"""Rated messages of USS and AB-ReDial as cases for a judge."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from examples.judge_check.__main__ import main
from examples.judge_check.cases import first
from examples.judge_check.rated import read_cases
from tests.support.bad_judges import bad_judge_beside

DIALOGUES = (
    "",
    "USER\tBook a table.\tREQUEST\t3,3,3",
    "SYSTEM\tFor how many?\tREQUEST\t",
    "USER\tFor two, at six.\tINFORM\t3,4,3",
    "SYSTEM\tA table for six is booked.\tNOTIFY\t",
    "USER\tNo, for two.\tNEGATE\t2,1,2",
    "USER\tOVERALL\t\t2,2,3",
    "",
    "SYSTEM\tHello.\tGREET\t",
    "USER\tHi.\tGREET\t",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "SGD.txt"
    path.write_text("\n".join(DIALOGUES))
    return path


def test_rated_messages_behind_a_reply_are_cases(file: Path) -> None:
    cases = read_cases(file)
    assert [(case.request, case.reply, case.state.text, case.value) for case in cases] == [
        ("Book a table.", "For how many?", "For two, at six.", 1),
        ("For two, at six.", "A table for six is booked.", "No, for two.", -1),
    ]


NAMES = [f"utterance{n}" for n in range(12)]
ANSWERED = (
    "SYSTEM\tHi.",
    "USER\tA comedy?",
    'SYSTEM\tHave you seen "It"?',
    "USER\tThat's horror,\nno?",
)
THANKED = ("SYSTEM\tOh.", "USER\tYes.", "SYSTEM\tTry Airplane.", "USER\tThanks!")
ENDED = ("SYSTEM\tBye.", "USER\tBye.", "USER\tOh.", "USER\tOne more?")
"""In which the model does not answer."""


def test_rated_turns_of_several_annotators_are_one_case(tmp_path: Path) -> None:
    file = tmp_path / "annotated_turns.csv"
    with file.open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow([*NAMES, "overall1", "overall2", "overall3"])
        rows.writerow([*ANSWERED, *THANKED, *ENDED, 2, 4.0, 3])
        rows.writerow([*ANSWERED, *THANKED, *ENDED, 1, "", 3])
        rows.writerow(ANSWERED[:2])  # cut off
    assert [
        (case.request, case.reply, case.state.text, case.value) for case in read_cases(file)
    ] == [
        ("A comedy?", 'Have you seen "It"?', "That's horror,\nno?", -1),
        ("Yes.", "Try Airplane.", "Thanks!", 1),
    ]


def test_each_counts_by_verdict_where_no_class_is_known(file: Path) -> None:
    cases = read_cases(file)
    assert first([*cases, *cases], 1) == cases


def test_the_command_measures_on_a_file_of_rated_dialogues(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bad_judge_beside() as judge:
        flags = ["--judge-url", judge.url, "--judge-model", "x", "--prm-m", "1", "--show"]
        flags += ["--cache", str(tmp_path), "--sets", "rated"]
        assert main([*flags, "--rated", str(file)]) == 0
        assert "| rated | rejections found | " in capsys.readouterr().out
        assert main(flags) == 0
        assert "--rated" in capsys.readouterr().err
        (tmp_path / "other.csv").write_text("a,b\n1,2\n")
        (tmp_path / "zero.csv").write_text("utterance0\n\0\n")
        (tmp_path / "bad.txt").write_text("SYSTEM\tHi.\nUSER\tHi.\t\tgood")
        for bad in ("", "other.csv", "zero.csv", "bad.txt"):
            assert main([*flags, "--rated", str(tmp_path / bad)]) == 1
            assert "--rated" in capsys.readouterr().err
        assert main([*flags[:-1], "uss"]) == 1
        assert "--sets uss" in capsys.readouterr().err
