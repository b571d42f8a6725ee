"""`tinker-claw openclaw-config`: print the provider block for OpenClaw, or let OpenClaw write it.

Rule: only OpenClaw's own `openclaw config set` writes its file. No command contains a key.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field

from tinker_claw.app.orders import ANYWHERE
from tinker_claw.cli.common import Command, note, url_of, write
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

if TYPE_CHECKING:
    from tinker_claw.backends.open import Context

SMALLEST_CONTEXT: Final = 32_768
TRIED: Final = ("2026.9.6", "2026.9.5")
"""Releases of OpenClaw that the tests run, the newest first."""


def release() -> str | None:
    """Return the release of the OpenClaw on PATH; None: there is none, or it does not say."""
    if (program := shutil.which("openclaw")) is None:
        return None
    try:
        package = Path(program).resolve().with_name("package.json").read_text(encoding="utf-8")
        return str(json.loads(package)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class OpenclawConfig(Command):
    """Print the provider block that points OpenClaw at the gateway of these flags, and the
    commands that add it."""

    MORE: ClassVar[str] = (
        "Exit status: 0 done, 2 a flag or a setting is wrong, or OpenClaw refuses."
    )

    write: bool = Field(
        False,
        description="run all commands but the last: OpenClaw rewrites its file (without comments) "
        "and keeps the old one as .bak",
    )
    primary: bool = Field(
        False, description="with --write: run the last one, too, so that your agents use it"
    )

    def run(self) -> int:
        url_of(self.settings)  # the port is known
        from tinker_claw.backends.open import context_of  # half a second

        context = asyncio.run(context_of(self.settings))
        if (refusal := too_small(context.tokens)) is not None:
            raise ConfigError(f"{refusal}. Now it is {context.tokens:,}: {context.source}")
        _explain(self.settings, context)
        from tinker_claw.backends.model_files import may_see, thinking_of

        ours = provider(self.settings, context.tokens)
        used = f"{PROVIDER}/{self.settings.served_name}"
        if may_see(self.settings):
            ours["models"][0]["input"] = ["text", "image"]
        defaults: dict[str, Any] = {"model": {"primary": used}}
        thinking = thinking_of(self.settings)
        if thinking.efforts:
            _say_it_thinks(ours["models"][0], thinking.efforts)
            if thinking.off is not None and self.settings.gateway.thinking == "auto":
                # OpenClaw asks each model that can think for it, unless this is said.
                defaults["models"] = {used: {"params": {"thinking": "off"}}}
        commands = [
            _merge(f"models.providers.{PROVIDER}", ours),
            *(_merge(f"agents.defaults.{name}", defaults[name]) for name in [*defaults][1:]),
            _set("agents.defaults.model.primary", used),
        ]
        if self.write:
            _carry_out(commands if self.primary else commands[:-1])
            return 0
        block = {"models": {"providers": {PROVIDER: ours}}, "agents": {"defaults": defaults}}
        told = json.dumps(block, indent=2, ensure_ascii=False)
        write([told, "", *map(shlex.join, commands)])
        return 0


def too_small(context_tokens: int) -> str | None:
    """Why OpenClaw cannot be served with such a window, and what helps; None: it can."""
    if context_tokens >= SMALLEST_CONTEXT:
        return None
    return (
        f"OpenClaw needs a window of {SMALLEST_CONTEXT:,} tokens: in a smaller one it compacts at "
        "once, at every message, because its system prompt and tools alone take about 11,000. Give "
        f"--context-tokens {SMALLEST_CONTEXT} or more, or a model whose context is so long"
    )


def _set(place: str, value: str, *flags: str) -> Sequence[str]:
    return ("openclaw", "config", "set", place, value, *flags)


def _merge(place: str, value: Any) -> Sequence[str]:
    told = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _set(place, told, "--strict-json", "--merge")


def _carry_out(commands: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError where there is no OpenClaw, or it refuses."""
    if (program := shutil.which("openclaw")) is None:
        raise ConfigError(
            "there is no openclaw on the PATH: run this where OpenClaw is, or without --write, "
            "which prints its commands"
        )
    for _, *words in commands:
        if status := subprocess.run([program, *words]).returncode:
            told = f"`openclaw {' '.join(words[:3])} …` ended with status {status}"
            raise ConfigError(f"{told}; what it said stands above")


def _explain(settings: Settings, context: Context) -> None:
    """Print notes about the block to standard error."""
    gateway = settings.gateway
    note(f"contextWindow {context.tokens}: {context.source}.")
    if gateway.host in ANYWHERE:
        note(
            f"The gateway listens on all addresses; {ANYWHERE[gateway.host]} is right for an "
            "OpenClaw on this machine. On another one put this machine's name or address there."
        )
    elif not is_loopback(gateway.host):
        note("Other machines reach it over plain HTTP: use a network that you trust.")
    if _needs_key(settings):
        file = settings.key_file
        whose = "the key" if file is None else f"what stands in {file.absolute()} once it started"
        note(
            f"apiKey is a reference: write {KEY_VARIABLE}=<{whose}> as a line of "
            "~/.openclaw/.env, for OpenClaw to read."
        )


# The provider block that points OpenClaw at this gateway

PROVIDER: Final = "tinker-claw"
API: Final = "openai-completions"
TIMEOUT_S: Final = 600
"""Request timeout; by default OpenClaw gives up on a remote model after two silent minutes."""
ANY_KEY: Final = "anything"
"""OpenClaw requires a key; a gateway without keys takes any."""
COMPAT: Final = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
"""With these OpenClaw names the session in every request, also in calls beside the conversation."""
_LEVELS: Final = ("none", "minimal", "low", "medium", "high")
"""Efforts that OpenClaw sends to a model of which it knows no other."""
KEY_VARIABLE: Final = "CLAW_GATEWAY_KEY"
"""OpenClaw substitutes its value for the key. The gateway's own variables have another prefix."""


def provider(settings: Settings, context_tokens: int) -> dict[str, Any]:
    """Return the entry for `models.providers.tinker-claw`."""
    name = settings.served_name
    return {
        "baseUrl": f"{url_of(settings)}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}" if _needs_key(settings) else ANY_KEY,
        "api": API,
        "timeoutSeconds": TIMEOUT_S,
        "models": [
            {
                "id": name,
                "name": name.rstrip("/").rsplit("/", 1)[-1],
                "contextWindow": context_tokens,
                "maxTokens": min(settings.gateway.max_reply_tokens, context_tokens),
                "compat": COMPAT,
            }
        ],
    }


def _say_it_thinks(model: dict[str, Any], efforts: Sequence[str]) -> None:
    """Add to the provider's entry of a model that `/think` reaches it, and with which levels."""
    compat = {**model.pop("compat"), "supportsReasoningEffort": True}
    if not {*_LEVELS} <= {*efforts}:
        compat["supportedReasoningEfforts"] = [*efforts]
    model |= {"reasoning": True, "compat": compat}


def _needs_key(settings: Settings) -> bool:
    """Whether the gateway has keys, or makes one at its first start."""
    return bool(settings.keys) or settings.key_file is not None
