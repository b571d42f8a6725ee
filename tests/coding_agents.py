"""The real Claude Code and Codex from npm, run as their users run them, one question at a time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.npm import installed, on_path

CLAUDE_CODE = "2.1.330"
CODEX = "0.169.0"
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
            | {"PATH": on_path(self.installed), "HOME": str(self.home)}
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
        (home / ".codex" / "config.toml").write_text(
            f'model = "{model}"\nmodel_provider = "tinker-claw"\nweb_search = "disabled"\n'
            f'[model_providers.tinker-claw]\nname = "tinker-claw"\nbase_url = "{base_url}"\n'
            'env_key = "TINKER_CLAW_KEY"\nwire_api = "responses"\n'
        )
        return cls(
            installed(f"codex-{CODEX}", f"@openai/codex@{CODEX}"), home, {"TINKER_CLAW_KEY": key}
        )

    def _command(self, message: str) -> list[str]:
        words = ["codex", "exec", "--skip-git-repo-check"]
        return [*words, "resume", "--last", message] if self.begun else [*words, message]

    def _said(self, out: str) -> str:
        return out.strip()
