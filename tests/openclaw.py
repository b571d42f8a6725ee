"""The real OpenClaw from npm, installed once into a cache and run as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.npm import installed, on_path
from tinker_claw.cli.openclaw import TRIED


def install(release: str = TRIED[0]) -> Path:
    """Install Node and a release of OpenClaw from npm. Returns the folder."""
    return installed(f"openclaw-{release}", f"openclaw@{release}")


def readme_block() -> dict[str, Any]:
    """OpenClaw configuration that the README tells users to add."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    return json.loads(readme.split("```json\n")[1].split("```")[0])


@dataclass(frozen=True)
class OpenClaw:
    """One user's OpenClaw: its home, its state and a provider block, nothing else configured."""

    installed: Path
    home: Path

    @classmethod
    def create(
        cls,
        home: Path,
        base_url: str,
        model: str,
        *,
        gives_up_s: int | None = None,
        window: int = 65536,
        affinity: bool | None = None,
        api: str | None = None,
        sees: bool = False,
        tools: bool = True,
        release: str = TRIED[0],
    ) -> OpenClaw:
        """Configure an OpenClaw as in the README, except for the arguments.

        Args:
            gives_up_s: how long it bears a silent model.
            window: tokens that it thinks fit into the context; with few it compacts soon.
            affinity: whether headers and body name the session.
            api: the wire that it speaks, as its configuration calls it.
            sees: whether it is told that the model sees.
            tools: whether it may give the model tools, which it does not to small ones.
        """
        claw = cls(install(release), home)
        for name in ("state", "workspace"):
            (home / name).mkdir(parents=True)
        # a workspace that has been introduced skips the first-run ritual
        (home / "workspace" / "IDENTITY.md").write_text("- **Name:** Claw\n")
        config = claw._config(base_url, model)
        provider = config["models"]["providers"]["tinker-claw"]
        if api is not None:
            provider["api"] = api
        if api == "anthropic-messages":
            provider["baseUrl"] = base_url.removesuffix("/v1")
        if gives_up_s is not None:
            provider["timeoutSeconds"] = gives_up_s
        provider["models"][0]["contextWindow"] = window
        if sees:
            provider["models"][0]["input"] = ["text", "image"]
        if affinity is not None:
            named = {"sendSessionAffinityHeaders": affinity, "supportsPromptCacheKey": affinity}
            provider["models"][0]["compat"] = named
        if not tools:
            compat = provider["models"][0].get("compat", {})
            provider["models"][0]["compat"] = compat | {"supportsTools": False}
        (home / "openclaw.json").write_text(json.dumps(config, indent=1))
        return claw

    def _config(self, base_url: str, model: str) -> dict[str, Any]:
        """Provider block of the README, for this address and model."""
        config = readme_block()
        provider = config["models"]["providers"]["tinker-claw"]
        provider["baseUrl"] = base_url
        names = {"id": model, "name": model, "maxTokens": 128}
        provider["models"] = [provider["models"][0] | names]
        defaults = config["agents"]["defaults"]
        (params,) = defaults["models"].values()
        defaults["models"] = {f"tinker-claw/{model}": params}
        defaults["model"]["primary"] = f"tinker-claw/{model}"
        defaults["workspace"] = str(self.home / "workspace")
        return config

    def say(self, session: str, message: str, *flags: str) -> str:
        """Send one user turn, as `openclaw agent` does; return what the user would read."""
        process = self.begin(session, message, *flags)
        try:
            out, errors = process.communicate(timeout=360)
        finally:
            process.kill()
        assert process.returncode == 0, errors[-2000:]
        answer = json.JSONDecoder().raw_decode(out[out.index("{") :])[0]
        return "\n".join(part.get("text") or "" for part in answer.get("payloads", [])).strip()

    def begin(self, session: str, message: str, *flags: str) -> subprocess.Popen[str]:
        """Start sending a user turn; return the running process."""
        words = ("agent", "--local", "--json", "--session-id", session, "--timeout", "300")
        return self._start(*words, "-m", message, *flags)

    def check_config(self) -> dict[str, Any]:
        """Check the configuration with OpenClaw itself: whether it is valid, and warnings."""
        told = json.loads(self._start("config", "validate", "--json").communicate(timeout=360)[0])
        return {"valid": told["valid"], "warnings": told.get("warnings", [])}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": on_path(self.installed),
            "HOME": str(self.home),
            "OPENCLAW_STATE_DIR": str(self.home / "state"),
            "OPENCLAW_CONFIG_PATH": str(self.home / "openclaw.json"),
            "DO_NOT_TRACK": "1",
            "NO_COLOR": "1",
        }

    def _start(self, *words: str) -> subprocess.Popen[str]:
        command = self.installed / "node_modules" / "openclaw" / "openclaw.mjs"
        bin_folder = self.installed / "node_modules" / ".bin"
        return subprocess.Popen(
            [str(bin_folder / "node"), str(command), *words],
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
