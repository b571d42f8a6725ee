"""Commands of docs/owed.md: each exists and can be typed as written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from benchmarks import smoke, training
from examples.judge_check import __main__ as judge_check
from tinker_claw.cli import main
from tinker_claw.config.load import load, load_given

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "owed.md").read_text()
COMMANDS = re.findall(r"^ {4}(\S.*)$", TEXT, re.MULTILINE)
OTHERS = (".venv-vllm/bin/vllm", "docker", "git", "systemctl")
"""Programs of others, whose flags are not checked."""


def parse(command: str) -> None:
    """Parse a command. Raises, or exits, where it is not one of ours."""
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    program, *rest = words[2:] if words[:2] == ["python", "-m"] else words
    if program == "python":
        program, *rest = rest
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in rest), command
    elif program == "benchmarks.training":
        training.parser().parse_args(rest)
    elif program == "benchmarks.smoke":
        smoke.parser().parse_args(rest)
    elif program == "examples.judge_check":
        load(judge_check.parser().parse_known_args(rest)[1])
    elif program == "run.py":
        run_py(rest)
    else:
        assert program in OTHERS, command


def run_py(words: Sequence[str]) -> None:
    """Parse the arguments of run.py. Raises where it would not accept them."""
    if words[0] not in main.COMMANDS:
        load(words)
        return
    program = main.Program()
    command = program.get_command(click.Context(program), words[0])
    assert command is not None
    with command.make_context(words[0], list(words[1:])) as context:
        load_given(context.params)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # files of settings are named from there
    parse(command)
