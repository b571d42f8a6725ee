"""A person stops Claude Code or Codex, and corrects: the words reach the reply that they mean."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from examples.day.npm import npm
from tests.gateway.test_agent_texts import (
    CORRECTED,
    HELLO,
    KEY,
    PRAISED,
    REPLIES,
    WINDOW,
)
from tests.gateway.test_openclaw import Listener
from tests.support.coding_agents import PATIENCE_S, ClaudeCode, Codex
from tests.support.fakes import Script
from tests.support.gateways import gateway, spell
from tests.support.terminals import Terminal, on_a_terminal
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import Tokens

pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: no agent can be run"),
]

STOPPED = "Tell me of bees."
SHOWN = "Bees dance."
"""A terminal shows a reply by whole lines."""
BEGUN = "begun"
COMMAND = f"touch {BEGUN}; tail -f /dev/null"
Done = Callable[[], bool]


class Chat(Protocol):
    """A person in front of an agent."""

    call: str
    """Call of a tool that takes long, as the model writes it."""

    def send(self, message: str, done: Done) -> None:
        """Send a message, and wait until it has an effect."""
        ...

    def sees(self, words: str) -> None:
        """Wait until the agent shows these words of a reply."""
        ...

    def interrupt(self) -> None: ...

    def listens(self) -> None:
        """Wait until the agent takes the next message."""
        ...


class OnTerminal:
    """Claude Code on a terminal, where Esc stops it."""

    call = json.dumps({"name": "Bash", "arguments": {"command": COMMAND, "description": "Wait"}})

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    @classmethod
    @contextmanager
    def started(cls, home: Path, url: str) -> Generator[Chat]:
        agent = ClaudeCode.create(home, url, "demo", KEY)
        command = [*agent.interactive(), "--allowedTools", "Bash"]
        with on_a_terminal(command, agent.workspace, agent.surroundings()) as terminal:
            terminal.until(agent.ready)
            yield cls(terminal)

    def send(self, message: str, done: Done) -> None:
        self.terminal.types(message)
        self.terminal.shows(lambda: False, 0.5)  # what comes at once is taken for pasted
        self.terminal.types("\r")
        assert self.terminal.shows(done, PATIENCE_S), self.terminal.screen

    def sees(self, words: str) -> None:
        assert self.terminal.shows(lambda: words in self.terminal.screen, PATIENCE_S)

    def interrupt(self) -> None:
        self.terminal.types("\x1b")
        self.listens()
        self.terminal.types("\x15")  # a message without a reply is back in the line

    def listens(self) -> None:
        self.terminal.shows(lambda: False, 3.0)


class AppServer:
    """Codex as its extensions drive it, by requests of a program."""

    call = json.dumps({"name": "exec_command", "arguments": {"cmd": COMMAND}})

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._lines = process.stdin, map(json.loads, process.stdout)
        self._asked = 0
        self._ask("initialize", clientInfo={"name": "test", "title": "Test", "version": "1"})
        self._thread = self._ask(
            "thread/start", cwd=str(folder), sandbox="workspace-write", approvalPolicy="never"
        )["thread"]["id"]
        self._turn = ""

    @classmethod
    @contextmanager
    def started(cls, home: Path, url: str) -> Generator[Chat]:
        agent = Codex.create(home, url, "demo", KEY)
        with subprocess.Popen(
            ["codex", "app-server"],
            cwd=agent.workspace,
            env=agent.surroundings(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield cls(process, agent.workspace)
            finally:
                process.kill()

    def _until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return next(line for line in self._lines if holds(line))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._asked += 1
        request = {"id": self._asked, "method": method, "params": params}
        self._requests.write(f"{json.dumps(request)}\n")
        self._requests.flush()
        return self._until(lambda line: line.get("id") == self._asked and "result" in line)[
            "result"
        ]

    def send(self, message: str, done: Done) -> None:
        words = [{"type": "text", "text": message}]
        self._turn = self._ask("turn/start", threadId=self._thread, input=words)["turn"]["id"]
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def sees(self, words: str) -> None:
        self._until(lambda line: line.get("method") == "item/agentMessage/delta")

    def interrupt(self) -> None:
        self._ask("turn/interrupt", threadId=self._thread, turnId=self._turn)

    def listens(self) -> None:
        self._until(lambda line: line.get("method") == "turn/completed")


@pytest.mark.parametrize("kind", [OnTerminal, AppServer])
@pytest.mark.parametrize("when", ["before its reply", "in its reply", "in a call"])
async def test_a_correction_behind_an_interruption_reaches_the_reply_that_it_means(
    tmp_path: Path, renderer: Renderer, kind: Any, when: str
) -> None:
    bees = spell(renderer, f"{SHOWN}\n\nThey dance in the dark.")
    line = len(spell(renderer, f"{SHOWN}\n\nThey", end=""))
    reply = {
        "before its reply": Script(bees, holds_after=0),
        "in its reply": Script(bees, holds_after=line),
        "in a call": Script(spell(renderer, f"Wait.\n<tool_call>\n{kind.call}\n</tool_call>")),
    }[when]
    answers: dict[str, list[Script | Tokens]] = {
        said: [spell(renderer, text)] for said, text in REPLIES.items()
    }
    answers[STOPPED] = [reply]
    sampler = Listener(renderer, answers)
    started: Callable[[Path, str], AbstractContextManager[Chat]] = kind.started
    home = tmp_path / "home"
    async with gateway(
        tmp_path / "data", renderer, sampler, api_key=KEY, context_tokens=WINDOW
    ) as world:

        def say(chat: Chat, message: str) -> None:
            before = len(world.observer.seen)
            chat.send(message, lambda: len(world.observer.seen) > before)
            chat.listens()

        def talk(chat: Chat) -> None:
            say(chat, HELLO)
            calls = (home / "workspace" / BEGUN).exists
            chat.send(STOPPED, calls if when == "in a call" else sampler.holding.is_set)
            if when == "in its reply":
                chat.sees(SHOWN)
            chat.interrupt()
            chat.listens()
            say(chat, CORRECTED)
            say(chat, PRAISED)

        with started(home, world.url) as chat:
            await asyncio.to_thread(talk, chat)

        turns, because = world.turns(), world.column("reason")
        asked = [turn.request_text for turn in turns]
        left = [] if when == "before its reply" else [STOPPED]
        assert asked == [HELLO, *left, CORRECTED, PRAISED]
        states = [world.ledger.turns.next_state(turn.id) for turn in turns]
        told = {text: state and state.text for text, state in zip(asked, states, strict=True)}
        assert told[HELLO] == STOPPED, "the words that came first"
        assert told[CORRECTED] == PRAISED
        assert told[PRAISED] is None
        if when == "in a call":
            assert told[STOPPED] == CORRECTED
        elif when == "in its reply":  # Codex does not keep what it has shown of it
            assert told[STOPPED] in (CORRECTED, None)
            assert because == [None, Reason.HUNG_UP, None, None]
        assert len({turn.session_id for turn in turns}) == 1
        assert set(world.column("lost")) == {None}
