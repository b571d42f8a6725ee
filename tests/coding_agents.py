"""Real agents, run as their users run them, one question at a time: Claude Code, Codex and opencode
from npm, and a program over openai-agents from PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import agent_sdks, environments
from tests.npm import installed, on_path

CLAUDE_CODE = "2.1.330"
CODEX = "0.169.0"
OPENCODE = "1.18.33"
PATIENCE_S = 300


@dataclass
class Agent:
    """One user's agent in a folder of theirs; a question goes on from the one before."""

    installed: Path
    home: Path
    environment: Mapping[str, str]
    begun: bool = field(default=False, init=False)

    @property
    def workspace(self) -> Path:
        return self.home / "workspace"

    def say(self, message: str) -> str:
        """Returns what the user would read."""
        ran = subprocess.run(
            self._command(message),
            cwd=self.workspace,
            env=os.environ
            | {"PATH": on_path(self.installed), "HOME": str(self.home), "PWD": str(self.workspace)}
            | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
        self.begun = True
        return self._said(ran.stdout)

    def _command(self, message: str) -> list[str]:
        raise NotImplementedError

    def _said(self, out: str) -> str:
        raise NotImplementedError


class ClaudeCode(Agent):
    @classmethod
    def create(cls, home: Path, base_url: str, model: str, key: str) -> ClaudeCode:
        """As docs/requests.md says."""
        (home / "workspace").mkdir(parents=True)
        return cls(
            installed(f"claude-code-{CLAUDE_CODE}", f"@anthropic-ai/claude-code@{CLAUDE_CODE}"),
            home,
            {
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": key,
                "ANTHROPIC_MODEL": model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        )

    def _command(self, message: str) -> list[str]:
        words = ["claude", "-p", message, "--output-format", "json", "--allowedTools", "Bash"]
        return [*words, "--continue"] if self.begun else words

    def _said(self, out: str) -> str:
        return json.loads(out)["result"]


class Codex(Agent):
    @classmethod
    def create(cls, home: Path, base_url: str, model: str, key: str) -> Codex:
        """As docs/requests.md says."""
        (home / "workspace").mkdir(parents=True)
        (home / ".codex").mkdir()
        # Where a sandbox is installed, it starts its own programs, and keeps none of them in what
        # it takes for a temporary folder, as all homes of tests are.
        (home / "temporary").mkdir()
        (home / ".codex" / "config.toml").write_text(
            f'model = "{model}"\nmodel_provider = "tinker-claw"\nweb_search = "disabled"\n'
            f'[model_providers.tinker-claw]\nname = "tinker-claw"\nbase_url = "{base_url}"\n'
            'env_key = "TINKER_CLAW_KEY"\nwire_api = "responses"\n'
        )
        return cls(
            installed(f"codex-{CODEX}", f"@openai/codex@{CODEX}"),
            home,
            {"TINKER_CLAW_KEY": key, "TMPDIR": str(home / "temporary")},
        )

    def _command(self, message: str) -> list[str]:
        words = ["codex", "exec", "--skip-git-repo-check"]
        return [*words, "resume", "--last", message] if self.begun else [*words, message]

    def _said(self, out: str) -> str:
        return out.strip()


class OpenCode(Agent):
    @classmethod
    def create(cls, home: Path, base_url: str, model: str, key: str) -> OpenCode:
        """As docs/requests.md says."""
        (home / "workspace").mkdir(parents=True)
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": base_url, "apiKey": key},
            "models": {model: {"limit": {"context": 200_000, "output": 4096}}},
        }
        told = {"model": f"tinker-claw/{model}", "provider": {"tinker-claw": provider}}
        (home / "workspace" / "opencode.json").write_text(json.dumps(told))
        places = ("config", "data", "state", "cache")
        return cls(
            installed(f"opencode-{OPENCODE}", f"opencode-ai@{OPENCODE}"),
            home,
            {f"XDG_{place.upper()}_HOME": str(home / place) for place in places}
            | {"OPENCODE_DISABLE_AUTOUPDATE": "1"},
        )

    def _command(self, message: str) -> list[str]:
        # Words: it puts an argument with blanks between quotation marks.
        return ["opencode", "run", *(["--continue"] if self.begun else []), *message.split()]

    def _said(self, out: str) -> str:
        return out.strip().splitlines()[-1]


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


class OpenAIAgents(Agent):
    """A program of a few lines, over Responses, which keeps its history by itself."""

    @classmethod
    def create(cls, home: Path, base_url: str, model: str, key: str) -> OpenAIAgents:
        (home / "workspace").mkdir(parents=True)
        programs = environments.installed("agents", *agent_sdks.PACKAGES)
        asked = {"URL": base_url, "MODEL": model, "KEY": key, "PYTHONPATH": ""}
        return cls(programs, home, asked)

    def _command(self, message: str) -> list[str]:
        told = [self.environment[name] for name in ("URL", "MODEL", "KEY")]
        return [str(self.installed / "python"), "-c", _AGENT, *told, message]

    def _said(self, out: str) -> str:
        return out.strip()
