"""`tinker-claw openclaw-config`: print the provider block for OpenClaw, and check an existing one.

Rule: OpenClaw's file is OpenClaw's: it is read here, and only its own `openclaw config set` writes
it. No key stands in a command.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

from pydantic import Field

from tinker_claw.cli.common import ANYWHERE, Command, keys, note, url_of, write
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

if TYPE_CHECKING:
    from tinker_claw.backends.open import Context

SMALLEST_CONTEXT: Final = 32_768


class OpenclawConfig(Command):
    """Print the provider block that points OpenClaw at the gateway of a start with the same
    flags, and the commands by which OpenClaw takes it."""

    MORE: ClassVar[str] = (
        "Exit status: 0 done, 2 a flag or a setting is wrong, or OpenClaw refuses."
    )

    write: bool = Field(
        False,
        description="run the first command: OpenClaw writes its file anew (without the comments "
        "in it) and keeps the old one as .bak",
    )
    primary: bool = Field(
        False, description="with --write: run the second one, too, so that your agents use it"
    )

    def run(self) -> int:
        url_of(self.settings)  # the port is known
        from tinker_claw.backends.open import context_of  # half a second

        context = asyncio.run(context_of(self.settings))
        if (refusal := too_small(context.tokens)) is not None:
            raise ConfigError(f"{refusal}. Now it is {context.tokens:,}: {context.source}")
        _explain(self.settings, context)
        from tinker_claw.backends.model_files import may_see

        ours, used = provider(self.settings, context.tokens), primary(self.settings)
        if may_see(self.settings):
            ours["models"][0]["input"] = ["text", "image"]
        commands = [
            _set(
                "models.providers." + PROVIDER,
                json.dumps(ours, ensure_ascii=False, separators=(",", ":")),
                "--strict-json",
                "--merge",
            ),
            _set("agents.defaults.model.primary", used),
        ]
        if self.write:
            _carry_out(commands if self.primary else commands[:1])
            return 0
        block = {
            "models": {"providers": {PROVIDER: ours}},
            "agents": {"defaults": {"model": {"primary": used}}},
        }
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
"""OpenClaw wants some key; a gateway without keys takes each."""
COMPAT: Final = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
"""With these OpenClaw names the session in every request, also in calls beside the conversation."""
KEY_VARIABLE: Final = "CLAW_GATEWAY_KEY"
"""OpenClaw puts its value in the key's place. The gateway's own variables have another prefix."""


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
                "compat": dict(COMPAT),
            }
        ],
    }


def _needs_key(settings: Settings) -> bool:
    """Whether the gateway has keys, or makes one at its first start."""
    return bool(keys(settings)) or settings.key_file is not None


def primary(settings: Settings) -> str:
    """How `agents.defaults.model.primary` names the model."""
    return f"{PROVIDER}/{settings.served_name}"


# Whether OpenClaw's configuration fits this gateway, for the doctor

_PROVIDERS: Final = ("models", "providers")


def usual_path() -> Path:
    """Path of the configuration file that OpenClaw reads."""
    if named := os.environ.get("OPENCLAW_CONFIG_PATH"):
        return Path(named).expanduser()
    state = os.environ.get("OPENCLAW_STATE_DIR") or "~/.openclaw"
    return Path(state).expanduser() / "openclaw.json"


def read(path: Path) -> Any:
    """Read the configuration at `path`; None if there is no file.

    Raises:
        ConfigError: it cannot be read, or is more than JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no plain JSON, so only OpenClaw can read it: `openclaw config get "
            "models.providers` shows what it understands"
        ) from error


def _at(config: Any, *names: str) -> Any:
    """The value under these names; None where there is none."""
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config


def pointing(config: Any, settings: Settings) -> list[str]:
    """The names of the providers that point at this gateway."""
    here, named = _address(url_of(settings)), _at(config, *_PROVIDERS)
    providers: dict[str, Any] = named if isinstance(named, dict) else {}
    return [n for n, one in providers.items() if _address(str(_at(one, "baseUrl"))) == here]


def misfits(config: Any, name: str, settings: Settings, context: Context) -> Iterator[str]:
    """Describe each mistake in the provider of that name, without secrets."""
    entry, known = _at(config, *_PROVIDERS, name), keys(settings)
    url, api, timeout_s, key = (
        _at(entry, field) for field in ("baseUrl", "api", "timeoutSeconds", "apiKey")
    )
    if not str(url).rstrip("/").endswith("/v1"):
        yield f"its baseUrl is {url}, not {url_of(settings)}/v1"
    if api != API:
        yield f"its api is {api!r}, not {API!r}"
    if not isinstance(timeout_s, int | float) or timeout_s < TIMEOUT_S:
        yield (
            f"its timeoutSeconds is {timeout_s}: with less than {TIMEOUT_S} a slow reply is "
            "given up"
        )
    # Into a reference to a variable or to a store of secrets nobody can look.
    plain = key is None or (isinstance(key, str) and not key.startswith("${"))
    if known and plain and key not in known:
        yield "its apiKey is no key of this gateway: requests will be refused (HTTP 401)"
    listed, served = _at(entry, "models"), settings.served_name
    models: list[Any] = listed if isinstance(listed, list) else []
    model = next((one for one in models if _at(one, "id") == served), None)
    if model is None:
        others = ", ".join(str(_at(one, "id")) for one in models) or "none"
        yield f"its models are {others}; the gateway serves {served!r} only"
        return
    window = _at(model, "contextWindow")
    too_long = isinstance(window, int) and window > context.tokens and context.certain
    if not isinstance(window, int) or window < SMALLEST_CONTEXT or too_long:
        yield (
            f"its contextWindow is {window}, not the model's {context.tokens}: with more OpenClaw "
            f"shortens long sessions too late, and with less than {SMALLEST_CONTEXT} all of them "
            "at once"
        )
    for switch in COMPAT:
        # Who has set it to false has done so on purpose.
        if not isinstance(_at(model, "compat", switch), bool):
            yield (
                f"its compat.{switch} does not stand there: with true OpenClaw names the session "
                "in every request, without it some are told apart by their wording alone"
            )


def used(config: Any) -> str:
    """The model that agents use by default."""
    named = _at(config, "agents", "defaults", "model")
    found = (one for one in (_at(named, "primary"), named) if isinstance(one, str))
    return next(found, "OpenClaw's own default")


def _address(url: str) -> tuple[str, int | None]:
    """The machine and the port, as far as the names tell."""
    try:
        split = urlsplit(url)
        host = ANYWHERE.get(split.hostname or "", split.hostname or "")
        return ("localhost" if is_loopback(host) else host, split.port)
    except ValueError:
        return url, None
