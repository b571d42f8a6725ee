"""Real agents, run as their users run them, one question at a time: Claude Code, Codex, opencode,
cline, qwen-code, pi and Continue from npm, aider, llm, Hermes and a program over openai-agents from
PyPI. Those that docs/clients.md has a recipe for are configured by its text.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import httpx

from examples.day.npm import installed, on_path
from tests.support import agent_sdks, environments
from tests.support.client_pages import command, recipe, variables
from tests.support.terminals import Terminal, on_a_terminal

CLAUDE_CODE = "2.1.332"
CODEX = "0.171.0"
OPENCODE = "1.18.33"
CLINE = "3.0.65"
QWEN_CODE = "0.24.4"
AIDER = "0.86.2"
HERMES = "0.19.0"
PI = "1.6.0"
CONTINUE = "1.5.47"
LLM_VERSION = "0.36"
CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Variables by which Claude Code chooses a model."""
PATIENCE_S = 300
WINDOW = 40_960
"""Tokens of the model's context, as docs/clients.md has it."""


class Typist:
    """Somebody who types to an agent on a terminal."""

    def __init__(self, terminal: Terminal, ready: str) -> None:
        self._terminal = terminal
        self._ready: str | None = ready

    @property
    def screen(self) -> str:
        return self._terminal.screen

    def types(self, message: str, done: Callable[[], bool]) -> None:
        """Type a message once the agent listens, and wait until it has an effect."""
        terminal = self._terminal
        if self._ready is not None:
            terminal.until(self._ready)
            self._ready = None
        terminal.types(message)
        terminal.shows(lambda: False, 0.5)  # what comes at once is taken for pasted
        terminal.types("\r")
        assert terminal.shows(done, PATIENCE_S), terminal.screen
        terminal.shows(lambda: False, 1.5)  # until it listens again


class Access(NamedTuple):
    """What an agent needs to reach the gateway."""

    base_url: str
    model: str
    key: str


@dataclass
class Agent:
    """One user's agent in a folder of theirs; each question continues the conversation."""

    name: ClassVar[str]
    package: ClassVar[str]
    version: ClassVar[str]
    recipe: ClassVar[str] = ""
    """Section of docs/clients.md that configures it; "": it has none."""
    ready: ClassVar[str]
    """Text on its terminal when it listens."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict[str, str], init=False)
    begun: bool = field(default=False, init=False)

    @classmethod
    def create(cls, home: Path, base_url: str, model: str, key: str) -> Self:
        """Configure the agent as docs/clients.md says."""
        agent, access = cls(home), Access(base_url, model, key)
        agent.workspace.mkdir(parents=True)
        agent.configure(access, *(recipe(cls.recipe, *access) if cls.recipe else ()))
        return agent

    def configure(self, access: Access, *blocks: str) -> None:
        """Write its files and variables. `blocks`: of its recipe."""
        raise NotImplementedError

    @property
    def installed(self) -> Path:
        return installed(f"{self.name}-{self.version}", f"{self.package}@{self.version}")

    @property
    def workspace(self) -> Path:
        return self.home / "workspace"

    def say(self, message: str) -> str:
        """Ask a question; return what the user would read."""
        ran = self.ask(message)
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
        self.begun = True
        return self._said(ran.stdout)

    def ask(self, message: str) -> subprocess.CompletedProcess[str]:
        """Ask a question, however the agent ends."""
        return self._ran(self._command(message))

    @contextmanager
    def at_a_terminal(self) -> Generator[Typist]:
        """Start the agent on a terminal of its own, with somebody who types."""
        command, room = self.interactive(), self.surroundings()
        with on_a_terminal(command, self.workspace, room) as terminal:
            yield Typist(terminal, self.ready)

    def interactive(self) -> list[str]:
        raise NotImplementedError

    def surroundings(self) -> dict[str, str]:
        """Environment that the agent runs in."""
        own = {"PATH": on_path(self.installed), "HOME": str(self.home), "PWD": str(self.workspace)}
        return {**os.environ, **own, **self.environment}

    def _run(self, command: Sequence[str], typed: str = "") -> str:
        ran = self._ran(command, typed)
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
        return ran.stdout

    def _ran(self, command: Sequence[str], typed: str = "") -> subprocess.CompletedProcess[str]:
        with (self.home / "typed").open("w+") as keys:
            keys.write(typed)
            keys.seek(0)
            return subprocess.run(
                command,
                cwd=self.workspace,
                env=self.surroundings(),
                stdin=keys if typed else subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )

    def _write(self, name: str, text: str) -> None:
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def _command(self, message: str) -> list[str]:
        raise NotImplementedError

    def _said(self, out: str) -> str:
        return out.strip()


class PythonAgent(Agent):
    """An agent from PyPI."""

    @property
    def installed(self) -> Path:
        return environments.installed(self.name, f"{self.package}=={self.version}")

    def surroundings(self) -> dict[str, str]:
        return super().surroundings() | {"PYTHONPATH": ""}


@dataclass
class ClaudeCode(Agent):
    name, package, version = "claude-code", "@anthropic-ai/claude-code", CLAUDE_CODE
    recipe = "Claude Code"
    ready = r"\? for shortcuts"
    window: int | None = field(default=None, init=False)
    """Tokens that it thinks fit into the context from now on; None: as the page says."""
    model: str | None = field(default=None, init=False)
    """Model that the user names in the command; None: none."""
    asks_for_titles: bool = field(default=False, init=False)
    """Whether it asks for titles on a terminal, as it does unless told to ask only for what is
    needed."""

    def configure(self, access: Access, *blocks: str) -> None:
        self.environment = variables(*blocks)

    def compact(self) -> None:
        self.say("/compact")

    def interactive(self) -> list[str]:
        """Command of an interactive start, with the questions of a first start already answered."""
        folder = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
        keys = {"approved": [self.environment["ANTHROPIC_API_KEY"][-20:]], "rejected": []}
        told = {"projects": {str(self.workspace): folder}, "customApiKeyResponses": keys}
        first = {"hasCompletedOnboarding": True, "theme": "dark"}
        (self.home / ".claude.json").write_text(json.dumps(first | told))
        return ["claude", "--permission-mode", "default"]

    def surroundings(self) -> dict[str, str]:
        room = super().surroundings()
        if self.window is not None:
            room["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(self.window)
        if self.asks_for_titles:
            del room["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"]
            for name in ("AUTOUPDATER", "ERROR_REPORTING", "TELEMETRY"):
                room[f"DISABLE_{name}"] = "1"
        return room

    def _command(self, message: str) -> list[str]:
        words = ["claude", "-p", message, "--output-format", "json", "--allowedTools", "Bash"]
        words += ["--model", self.model] if self.model else []
        return [*words, "--continue"] if self.begun else words

    def _said(self, out: str) -> str:
        return json.loads(out)["result"]


@dataclass
class Codex(Agent):
    name, package, version = "codex", "@openai/codex", CODEX
    recipe = "Codex"
    compacts_at: int | None = field(default=None, init=False)
    """Tokens beyond which the next run compacts, and no later one; None: its default."""
    attached: Path | None = field(default=None, init=False)
    """Image that goes with the questions."""

    def configure(self, access: Access, *blocks: str) -> None:
        # Where a sandbox is installed, it starts its own programs, and keeps none of them in what
        # it takes for a temporary folder, as all homes of tests are.
        (self.home / "temporary").mkdir()
        self._write(".codex/config.toml", *blocks)
        self.environment |= {"TINKER_CLAW_KEY": access.key, "TMPDIR": str(self.home / "temporary")}

    def compact(self) -> None:
        """Let it compact at its next question: outside a terminal it has no command for it."""
        self.compacts_at = 1

    def _command(self, message: str) -> list[str]:
        words = ["codex", "exec", *(["-i", str(self.attached)] if self.attached else [])]
        words.append("--skip-git-repo-check")
        if self.compacts_at is not None:
            words += ["-c", f"model_auto_compact_token_limit={self.compacts_at}"]
            self.compacts_at = None
        return [*words, "resume", "--last", message] if self.begun else [*words, message]


@dataclass
class OpenCode(Agent):
    name, package, version = "opencode", "opencode-ai", OPENCODE
    recipe = "opencode"
    mode: str = field(default="build", init=False)
    """Agent mode, or `plan`, in which it may change nothing."""
    attached: Path | None = field(default=None, init=False)
    """Image that goes with the questions."""

    def configure(self, access: Access, *blocks: str) -> None:
        self._write("workspace/opencode.json", *blocks)
        for place in ("config", "data", "state", "cache"):
            self.environment[f"XDG_{place.upper()}_HOME"] = str(self.home / place)
        self.environment["OPENCODE_DISABLE_AUTOUPDATE"] = "1"

    def compact(self) -> None:
        """Compact as /compact does on its terminal, which is a client of such a server."""
        with subprocess.Popen(
            ["opencode", "serve", "--port", "0"],
            cwd=self.workspace,
            env=self.surroundings(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                lines = iter(server.stdout.readline, "") if server.stdout else iter(())
                at = next(line.split()[-1] for line in lines if "http://" in line)
                with httpx.Client(base_url=at, timeout=PATIENCE_S) as http:
                    session = http.get("/session").raise_for_status().json()[0]["id"]
                    provider, _, model = self._told()["model"].partition("/")
                    asked = {"providerID": provider, "modelID": model}
                    http.post(f"/session/{session}/summarize", json=asked).raise_for_status()
            finally:
                server.kill()

    def shrink(self, tokens: int) -> None:
        """Let it think that this many tokens fit into the context, from now on."""
        self._configure(limit={"context": tokens, "output": 4096})

    def see(self) -> None:
        """Let it send images, as docs/clients.md says."""
        self._configure(modalities={"input": ["text", "image"], "output": ["text"]})

    def _configure(self, **settings: Any) -> None:
        config = self._told()
        provider, _, model = config["model"].partition("/")
        config["provider"][provider]["models"][model].update(settings)
        (self.workspace / "opencode.json").write_text(json.dumps(config))

    def _told(self) -> dict[str, Any]:
        return json.loads((self.workspace / "opencode.json").read_text())

    def _command(self, message: str) -> list[str]:
        # Words: it puts an argument with blanks between quotation marks.
        words = ["opencode", "run", "--agent", self.mode]
        words += ["--continue"] if self.begun else []
        return [*words, *message.split(), *(["-f", str(self.attached)] if self.attached else [])]

    def _said(self, out: str) -> str:
        return out.strip().splitlines()[-1]


class QwenCode(Agent):
    """qwen-code, configured in its own way to name a model of any server."""

    name, package, version = "qwen-code", "@qwen-code/qwen-code", QWEN_CODE

    def configure(self, access: Access, *blocks: str) -> None:
        names = ("OPENAI_BASE_URL", "OPENAI_MODEL", "OPENAI_API_KEY")
        self.environment |= zip(names, access, strict=True)

    def compact(self) -> None:
        self.say("/compress")

    def _command(self, message: str) -> list[str]:
        words = ["qwen", "--yolo", "--auth-type", "openai", "-p", message]
        return [*words, "--continue"] if self.begun else words


class Cline(Agent):
    """Cline, which answers one question per run, except on a terminal."""

    name, package, version = "cline", "cline", CLINE
    ready = "Auto-approve"

    def configure(self, access: Access, *blocks: str) -> None:
        """Configure the agent with its own command for providers."""
        self.environment |= {"CLINE_NO_AUTO_UPDATE": "1", "CLINE_DISABLE_CLINE_PASS_NOTICE": "1"}
        told = ("-k", access.key, "-m", access.model, "-b", access.base_url)
        self._run(["cline", "auth", *self._place(), "-p", "openai-compatible", *told])

    def interactive(self) -> list[str]:
        return ["cline", *self._place(), "--tui"]

    def _command(self, message: str) -> list[str]:
        return ["cline", *self._place(), "--yolo", message]

    def _place(self) -> tuple[str, str]:
        # Else it leaves a server running for all that will ever be started.
        return "--data-dir", str(self.home / "data")


class Aider(PythonAgent):
    """aider, which edits files of a git repository, and commits them."""

    name, package, version = "aider", "aider-chat", AIDER
    recipe = "aider"
    start: Sequence[str]

    def configure(self, access: Access, *blocks: str) -> None:
        settings, start = blocks
        self.environment = variables(start.rpartition("\naider ")[0])
        self.environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        self.start = command(start)
        self._write(".aider.model.settings.yml", settings)
        for told in ("init -q", "config user.email me@example.com", "config user.name Me"):
            self._run(["git", *told.split()])

    def talk(self, *messages: str, files: Sequence[str] = (), **options: object) -> str:
        """Type messages one after another; return all that is shown.

        Args:
            files: what it may edit.
            options: of its command line.
        """
        told = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        quiet = ("--no-pretty", "--no-analytics", "--no-check-update", "--no-show-release-notes")
        words = [
            str(self.installed / self.start[0]),
            *self.start[1:],
            "--yes-always",
            "--no-fancy-input",
            *quiet,
        ]
        return self._run([*words, *told, *files], "\n".join([*messages, "/exit", ""]))


class Hermes(PythonAgent):
    """Hermes Agent, which names no session, and asks for a title beside its first turn."""

    name, package, version = "hermes", "hermes-agent", HERMES
    recipe = "Hermes Agent"
    ready = "Type your message or"

    def configure(self, access: Access, *blocks: str) -> None:
        self._write(".hermes/config.yaml", *blocks)
        self.environment |= {"HERMES_HOME": str(self.home / ".hermes"), "NO_COLOR": "1"}

    def interactive(self) -> list[str]:
        return [str(self.installed / "hermes"), "chat", "--cli", "--yolo"]

    def _command(self, message: str) -> list[str]:
        words = [str(self.installed / "hermes"), "chat", "-Q", "--yolo", "-q", message]
        return [*words, "--continue"] if self.begun else words

    def _said(self, out: str) -> str:
        return out.strip().splitlines()[-1]


class Pi(Agent):
    """pi, which names its session only where it is configured to."""

    name, package, version = "pi", "@earendil-works/pi-coding-agent", PI
    recipe = "pi"
    start: Sequence[str]

    def configure(self, access: Access, *blocks: str) -> None:
        config, start = blocks
        self._write(".pi/agent/models.json", config)
        kept = {"compaction": {"keepRecentTokens": 1}}
        self._write(".pi/agent/settings.json", json.dumps(kept))
        place = str(self.home / ".pi" / "agent")
        self.environment |= {"PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": place}
        self.start = command(start)

    def compact(self) -> None:
        """Compact as its programs' clients do: outside a terminal it has no command for it."""
        with subprocess.Popen(
            [*self.start, "--mode", "rpc", "--continue"],
            cwd=self.workspace,
            env=self.surroundings(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stdin is not None
                assert server.stdout is not None
                server.stdin.write('{"type": "compact"}\n')
                server.stdin.flush()
                lines = map(json.loads, iter(server.stdout.readline, ""))
                done = next(line for line in lines if line.get("command") == "compact")
                assert done["success"], done
            finally:
                server.kill()

    def _command(self, message: str) -> list[str]:
        return [*self.start, "-p", *(["--continue"] if self.begun else []), message]


class Continue(Agent):
    """Continue's program for terminals, which reads the settings that its extensions read."""

    name, package, version = "continue", "@continuedev/cli", CONTINUE
    recipe = "Continue"
    start: Sequence[str]

    def configure(self, access: Access, *blocks: str) -> None:
        config, start = blocks
        self._write(".continue/config.yaml", config)
        self.environment["CONTINUE_TELEMETRY_ENABLED"] = "0"
        self.start = [word.replace("~", str(self.home)) for word in command(start)]

    def _command(self, message: str) -> list[str]:
        return [*self.start, "--auto", "-p", *(["--resume"] if self.begun else []), message]


class LLM(PythonAgent):
    """llm, with the tools of a file beside it."""

    name, package, version = "llm", "llm", LLM_VERSION
    recipe = "llm"
    start: Sequence[str]

    def configure(self, access: Access, *blocks: str) -> None:
        config, start = blocks
        self.environment["LLM_USER_PATH"] = str(self.home / "llm")
        self.start = [line.split("#")[0].strip() for line in start.splitlines()]
        database = Path(self._run(self._words("llm logs path")).strip())
        self._write(str(database.parent / "extra-openai-models.yaml"), config)
        self._run(self._words(self.start[0]))

    def _words(self, line: str) -> list[str]:
        program, *words = shlex.split(line)
        return [str(self.installed / program), *words]

    def _command(self, message: str) -> list[str]:
        line = self.start[2 if self.begun else 1]
        return [message if word == "..." else word for word in self._words(line)]


_AGENT = """
import asyncio, sys
from pathlib import Path
from agents import Agent, OpenAIResponsesModel, Runner, SQLiteSession, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def read(path: str) -> str:
    "Read a file."
    return Path(path).read_text()

async def main(url, model, key, said):
    client = AsyncOpenAI(base_url=url, api_key=key)
    agent = Agent(
        name="reader",
        instructions="Read what you are asked to.",
        tools=[read],
        model=OpenAIResponsesModel(model=model, openai_client=client),
    )
    session = SQLiteSession("talk", "talk.db")
    print((await Runner.run(agent, said, session=session)).final_output)

asyncio.run(main(*sys.argv[1:]))
"""


class OpenAIAgents(PythonAgent):
    """A program of a few lines over Responses, which keeps its history by itself."""

    access: Access

    @property
    def installed(self) -> Path:
        return environments.installed("agents", *agent_sdks.PACKAGES)

    def configure(self, access: Access, *blocks: str) -> None:
        self.access = access

    def _command(self, message: str) -> list[str]:
        return [str(self.installed / "python"), "-c", _AGENT, *self.access, message]
