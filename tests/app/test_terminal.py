"""What people see on their terminal: a banner, and a line for each turn, with its first words."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import string
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.lives import ROOT
from tests.support.terminals import PATIENCE_S, Terminal, on_a_terminal
from tinker_claw.app.terminal import LINES, SENTENCES, UNSEEN
from tinker_claw.app.terminal import Terminal as Shown
from tinker_claw.billing.estimate import announce
from tinker_claw.billing.prices import price_in_force
from tinker_claw.config.load import load
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.telemetry import configure, log

SAID = "No. Please write it as plain prose, without lists."


def start(data: Path, *flags: str) -> Any:
    python = ROOT / ".venv" / "bin" / "python"
    command = (python if python.exists() else "python", "run.py", "--method", "combine")
    model = ("--model-name", "demo", "--backend", "local", "--port", "0")
    return on_a_terminal((*command, *model, "--data-dir", data, *flags), ROOT, os.environ)


class Talk:
    """A client's talk with the gateway whose address a terminal shows."""

    def __init__(self, url: str, data: Path) -> None:
        key = data / "api-key"
        token = key.read_text().strip() if key.exists() else "anything"
        headers = {"authorization": f"Bearer {token}"}
        self._url, self._headers = f"{url}/chat/completions", headers
        self._said: list[dict[str, str]] = []

    def say(self, text: str, **headers: str) -> None:
        self._said.append({"role": "user", "content": text})
        body = {"model": "demo", "messages": self._said, "max_tokens": 30}
        given = self._headers | headers
        answer = httpx.post(self._url, json=body, headers=given, timeout=300)
        answer.raise_for_status()
        reply = answer.json()["choices"][0]["message"]["content"]
        self._said.append({"role": "assistant", "content": reply})


def address(terminal: Terminal) -> str:
    terminal.until(r"address +(http://\S+/v1)")
    return terminal.match[1]


def test_a_start_shows_a_banner_and_what_came_of_each_turn(tmp_path: Path) -> None:
    with start(tmp_path) as terminal:
        terminal.until("GPUs: no GPU is used: the processor learns and samples.")
        url = address(terminal)
        terminal.until(f"page +{re.escape(url.removesuffix('/v1'))}/ui")
        terminal.until(f"records +{re.escape(str(tmp_path))}")
        command = f"openclaw-config --data-dir {re.escape(str(tmp_path))}"
        terminal.until(
            f"next +point your agent at the address; for OpenClaw: tinker-claw {command}"
        )
        talk = Talk(url, tmp_path)
        talk.say("What is 12 + 5?\x1b[2J\x07")
        terminal.until(r"you: “What is 12 \+ 5\? \[2J”  turn 1, v0 answered in [\d.]+ s")
        talk.say(SAID)
        terminal.until(r"you: “No\. Please write it as plain prose, without lis…”  turn 2")
        judged = r"“What is 12 \+ 5\?.*”  turn 1, verdict \S+.*next step \[[#.]{16}\] \d+/16"
        assert terminal.shows(lambda: re.search(judged, terminal.shown) is not None, PATIENCE_S)
        talk.say("/private What is 3 + 4?")
        Talk(url, tmp_path).say("A title for: hunter2", **{"X-Turn-Type": "side"})
        assert terminal.interrupted() == 0
        terminal.until("Stopped.")
    assert "3 + 4" not in terminal.shown
    assert "hunter2" not in terminal.shown
    written = [f for f in tmp_path.rglob("*") if f.is_file() and "ledger" not in f.name]
    assert not any(SAID.encode() in file.read_bytes() for file in written)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--quiet", "--log=json"])
def test_words_and_lines_can_be_turned_off(tmp_path: Path, flag: str) -> None:
    with start(tmp_path, flag) as terminal:
        if flag == "--quiet":
            url = address(terminal)
        else:
            terminal.until(r'"url": "(http[^"]+)"[^\n]*"event": "serving"')
            url = terminal.match[1]
        talk = Talk(url, tmp_path)
        talk.say("What is 12 + 5?")
        talk.say(SAID)
        assert terminal.interrupted() == 0
    assert "12 + 5" not in terminal.shown
    assert "plain prose" not in terminal.shown
    if flag == "--log=json":
        lines = [line for line in terminal.shown.splitlines() if line.startswith("{")]
        assert {"serving", "turn.captured"} <= {json.loads(line)["event"] for line in lines}
    else:
        assert "turn 1" not in terminal.shown


def logged() -> Iterator[tuple[str, set[str | None]]]:
    """Yield the name of each event in the sources, and its fields; None: those of a mapping."""
    for file in (ROOT / "tinker_claw").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="log")),
                    args=[ast.Constant(value=str(name))],
                    keywords=keywords,
                ):
                    yield name, {keyword.arg for keyword in keywords}


def test_each_event_has_a_sentence_or_is_left_to_json() -> None:
    events = list(logged())
    named = {name for name, _ in events}
    assert len(named) > 50
    assert named - {*UNSEEN, *LINES, *SENTENCES, "serving"} == set()
    for name, fields in events:
        parts = string.Formatter().parse(SENTENCES.get(name, ""))
        assert None in fields or {part[1] for part in parts if part[1]} <= fields | {"words"}, name


@pytest.mark.parametrize("quiet", [False, True])
def test_a_lesson_that_is_told_for_the_first_time_is_quoted(tmp_path: Path, quiet: bool) -> None:
    ledger = Ledger(tmp_path)
    words = "Write plain prose, " + "without lists " * 9
    lesson = ledger.lessons.rule("add", "default", None, words)
    shown = Shown(quiet=quiet, lesson=ledger.lessons.text)
    event = {"event": "lesson.first_told", "timestamp": "now", "lesson": lesson, "session": 1}
    line = shown(None, "info", event)
    ledger.close()
    said = "now  Lesson 1 is told for the first time"
    if quiet:
        assert line == said
    else:
        assert line.startswith(f"{said}: “Write plain prose, without lists")
        assert line.endswith("…”")


def test_what_a_client_or_a_service_chose_moves_no_cursor() -> None:
    event = {"event": "request.left_out", "timestamp": "now", "what": "\x1b[2Jfield\rnone\n"}
    assert Shown()(None, "info", event) == "now  Left out of a request:  [2Jfield none "


def shown_of(*flags: str, folder: Path) -> str:
    """Return what a terminal shows of a start's estimate and of three other events."""
    handle, its = pty.openpty()
    ledger, settings = Ledger(folder), load(flags)
    with os.fdopen(its, "w") as stream:
        configure(stream, terminal=Shown())
        announce(settings, price_in_force(settings), ledger)
        log.info("sample.queued", count=1)
        log.error("part.failed", part="judge", error="it broke", starting_again_in_s=None)
        log.info("backend.recovered", noticed="serving", away_s=12.3)
    shown = b""
    with suppress(OSError):  # EIO: all of it has been read
        while part := os.read(handle, 65536):
            shown += part
    os.close(handle)
    ledger.close()
    return shown.decode()


def test_events_are_sentences_on_a_terminal(tmp_path: Path) -> None:
    shown = shown_of("--budget-usd", "20/month", folder=tmp_path)
    estimate = (
        r"By estimate a message with ten requests costs \$0\.\d\d, a training step \$\d\.\d\d;"
    )
    assert re.search(estimate + r" the budget is \$20/month\.", shown)
    assert "The judge failed: it broke" in shown
    assert "The service answers again, after 12 s." in shown
    assert re.search(r"[{=]|sample", shown) is None, "no raw event"
    assert "there is no budget." in shown_of(folder=tmp_path)
    unknown = shown_of("--model-name", "mine", folder=tmp_path)
    assert "What it will cost is not known: of mine the price per million" in unknown
