"""Rated messages of USS as cases for a judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.judge_check.__main__ import main
from examples.judge_check.cases import first
from examples.judge_check.uss import read_cases
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


def test_each_counts_by_verdict_where_no_class_is_known(file: Path) -> None:
    cases = read_cases(file)
    assert first([*cases, *cases], 1) == cases


def test_the_command_measures_on_a_file_of_uss(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bad_judge_beside() as judge:
        flags = ["--judge-url", judge.url, "--judge-model", "x", "--prm-m", "1", "--show"]
        flags += ["--cache", str(tmp_path), "--sets", "uss"]
        assert main([*flags, "--uss", str(file)]) == 0
        assert "| uss | rejections found | " in capsys.readouterr().out
        assert main(flags) == 0
        assert "--uss" in capsys.readouterr().err
        assert main([*flags, "--uss", str(tmp_path)]) == 1
        assert "--uss" in capsys.readouterr().err
