"""The frame of all commands: flags from fields, errors, completion, and the cost of a start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lives import ROOT
from tests.support.stories import every_state
from tinker_claw import __version__
from tinker_claw.cli import main


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TINKER_CLAW_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("start", [["-m", "tinker_claw"], [str(ROOT / "run.py")]])
def test_the_version_is_that_of_the_package(start: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *start, "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"tinker-claw {__version__}\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["--portt", "1"], "No such option '--portt'. (Did you mean one of: "),
        (["lgo", "turns"], "No such command 'lgo'."),
        (["log", "turn"], "'turn' is not one of 'turns', 'steps'"),
        (["log", "turns", "--kind", "x"], "'--kind': 'x' is not one of 'main', 'side'."),
        (["log", "turns", "--limit", "0"], "'--limit': 0 is not in the range x>=1."),
        (["status", "--port", "99999"], "(--port): Input should be less than or equal to 65535"),
        (["rejudge", "1", "x"], "'TURN': 'x' is not a valid integer."),
        (["export"], "give one of --jsonl, --lessons, --adapter and --merged"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    command: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    every_state(tmp_path)
    data = [] if command[0] == "lgo" else ["--data-dir", str(tmp_path)]
    assert main.main([*command, *data]) == 2
    out, sentence = capsys.readouterr()
    assert (out, sentence.count("\n")) == ("", 1)
    assert sentence.startswith("tinker-claw: ")
    assert says in sentence


@pytest.mark.parametrize("name", [name for name in main.COMMANDS if name != "demo"])
def test_every_command_has_help_and_takes_the_flags_of_run_py(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([name, "--help"]) == 0
    short = capsys.readouterr().out
    assert short.startswith(f"Usage: tinker-claw {name} ")
    assert "--help-all" in short
    assert "--batch-size" not in short
    assert main.main([name, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(short.partition("Options:")[0])
    assert "--batch-size" in whole
    assert "--data-dir" in whole


def test_flags_stand_before_or_behind_a_command_and_the_last_one_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every_state(tmp_path)
    data = ["--data-dir", str(tmp_path)]
    assert main.main([*data, "versions"]) == 0
    before = capsys.readouterr().out
    assert main.main(["--data-dir", "/nowhere", "versions", "--data-dir", "/none", *data]) == 0
    assert capsys.readouterr().out == before


def completed(line: str) -> list[str]:
    """Completions that bash offers for the last word of a line, by click's script."""
    words = line.split(" ")
    script = f"""
        eval "$(_TINKER_CLAW_COMPLETE=bash_source tinker-claw)" || exit 1
        COMP_WORDS=({" ".join(word or "''" for word in words)}); COMP_CWORD={len(words) - 1}
        spec=$(complete -p tinker-claw) || exit 1
        [[ $spec =~ -F\\ ([^ ]+) ]] && "${{BASH_REMATCH[1]}}" tinker-claw "{words[-1]}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("tinker-claw ex", ["explain", "export"]),
        ("tinker-claw log st", ["steps"]),
        ("tinker-claw log turns --kind ", ["main", "side"]),
        ("tinker-claw doctor --back", ["--backend"]),
    ],
)
def test_bash_completes_commands_flags_and_values(line: str, offers: list[str]) -> None:
    assert completed(line) == offers


HEAVY = ("torch", "transformers", "tinker", "fastapi", "openai", "httpx", "renderers", "structlog")


@pytest.mark.parametrize("command", ["log turns", "status --port 1", "explain 1"])
def test_looking_imports_nothing_that_serving_needs(tmp_path: Path, command: str) -> None:
    every_state(tmp_path)
    program = (
        "import sys\nfrom tinker_claw.cli.main import main\n"
        f"code = main([*{command.split()!r}, '--data-dir', {str(tmp_path)!r}])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.stdout
    assert done.stderr.splitlines()[-1] == "[]"
