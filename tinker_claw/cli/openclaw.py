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
from dataclasses import dataclass
from typing import Any

import click

from tinker_claw.app import orders
from tinker_claw.app.orders import ANYWHERE
from tinker_claw.cli.common import Invocation, command, note, url_of, write
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

SMALLEST_CONTEXT = 32_768
TRIED = ("2026.9.6", "2026.9.5")
"""Releases of OpenClaw that the tests run, the newest first."""


@command(
    "openclaw-config", "Exit status: 0 done, 2 a flag or a setting is wrong, or OpenClaw refuses."
)
@click.option(
    "--write",
    "write_it",
    is_flag=True,
    help="run all commands but the last: OpenClaw rewrites its file (without comments) and keeps "
    "the old one as .bak",
)
@click.option(
    "--primary",
    is_flag=True,
    help="with --write: run the last one, too, so that your agents use it",
)
def openclaw_config(invoked: Invocation, write_it: bool, primary: bool) -> None:
    """Print the provider block that points OpenClaw at a gateway, and the commands that add it.

    The gateway is the one that runs on the data directory; where none runs, it is the one that a
    start with these flags would be.
    """
    settings = invoked.settings
    directory = settings.run.directory
    if (health := orders.health(directory)) is not None:
        host, port = orders.address(directory) or ("", 0)
        source = f"the gateway that runs on {directory} says so"
        offer = Offer(host=host, port=port, source=source, **health["offers"])
    else:
        note(
            f"No gateway runs on {directory}, so this is a guess by the flags and settings: "
            f"--port {settings.gateway.port}, the model {settings.served_name}. Give the "
            "--data-dir of the one that runs."
        )
        offer = _of_settings(settings)
    if (refusal := too_small(offer.context_tokens)) is not None:
        raise ConfigError(f"{refusal}. Now it is {offer.context_tokens:,}: {offer.source}")
    _explain(offer)
    ours, used = provider(offer), f"{PROVIDER}/{offer.model}"
    defaults: dict[str, Any] = {"model": {"primary": used}}
    if offer.efforts and offer.may_think:
        # OpenClaw asks each model that can think for it, unless this is said.
        defaults["models"] = {used: {"params": {"thinking": "off"}}}
    commands = [
        _merge(f"models.providers.{PROVIDER}", ours),
        *(_merge(f"agents.defaults.{name}", defaults[name]) for name in [*defaults][1:]),
        _set("agents.defaults.model.primary", used),
    ]
    if write_it:
        _carry_out(commands if primary else commands[:-1])
        return
    block = {"models": {"providers": {PROVIDER: ours}}, "agents": {"defaults": defaults}}
    text = json.dumps(block, indent=2, ensure_ascii=False)
    write([text, "", *map(shlex.join, commands)])


def too_small(context_tokens: int) -> str | None:
    """Return why OpenClaw cannot be served with such a window, and what helps; None: it can."""
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
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _set(place, text, "--strict-json", "--merge")


def _carry_out(commands: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError where there is no OpenClaw, or it refuses."""
    if (program := shutil.which("openclaw")) is None:
        raise ConfigError(
            "there is no openclaw on the PATH: run this where OpenClaw is, or without --write, "
            "which prints its commands"
        )
    for _, *words in commands:
        if status := subprocess.run([program, *words]).returncode:
            failure = f"`openclaw {' '.join(words[:3])} …` ended with status {status}"
            raise ConfigError(f"{failure}; what it said stands above")


@dataclass(frozen=True, slots=True)
class Offer:
    """Description of a gateway for OpenClaw's configuration."""

    host: str
    port: int
    model: str
    context_tokens: int
    source: str
    """Where the number of tokens comes from."""
    max_reply_tokens: int
    images: bool
    efforts: Sequence[str]
    may_think: bool
    """Whether each request decides if the model thinks."""
    key: str | None
    """Description of the key; None: none is needed."""


def _of_settings(settings: Settings) -> Offer:
    """Return what a gateway with these settings would offer."""
    from tinker_claw.backends.model_files import may_see, thinking_of
    from tinker_claw.backends.open import context_of  # half a second

    url_of(settings)  # the port is known
    gateway, file = settings.gateway, settings.key_file
    context, thinking = asyncio.run(context_of(settings)), thinking_of(settings)
    key = "the key" if file is None else f"what stands in {file.absolute()} once it started"
    return Offer(
        host=gateway.host,
        port=gateway.port,
        model=settings.served_name,
        context_tokens=context.tokens,
        source=context.source,
        max_reply_tokens=gateway.max_reply_tokens,
        images=may_see(settings),
        efforts=thinking.efforts,
        may_think=thinking.off is not None and gateway.thinking == "auto",
        key=key if settings.keys or file is not None else None,
    )


def _explain(offer: Offer) -> None:
    """Print notes about the block to standard error."""
    note(f"contextWindow {offer.context_tokens}: {offer.source}.")
    if offer.host in ANYWHERE:
        note(
            f"The gateway listens on all addresses; {ANYWHERE[offer.host]} is right for an "
            "OpenClaw on this machine. On another one put this machine's name or address there."
        )
    elif not is_loopback(offer.host):
        note("Other machines reach it over plain HTTP: use a network that you trust.")
    if offer.key is not None:
        note(
            f"apiKey is a reference: write {KEY_VARIABLE}=<{offer.key}> as a line of "
            "~/.openclaw/.env, for OpenClaw to read."
        )


# The provider block that points OpenClaw at this gateway

PROVIDER = "tinker-claw"
API = "openai-completions"
TIMEOUT_S = 600
"""Request timeout; by default OpenClaw gives up on a remote model after two silent minutes."""
ANY_KEY = "anything"
"""OpenClaw requires a key; a gateway without keys takes any."""
COMPAT = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
"""With these OpenClaw names the session in every request, also in calls beside the conversation."""
_LEVELS = ("none", "minimal", "low", "medium", "high")
"""Efforts that OpenClaw sends to a model of which it knows no other."""
KEY_VARIABLE = "CLAW_GATEWAY_KEY"
"""OpenClaw substitutes its value for the key. The gateway's own variables have another prefix."""


def provider(offer: Offer) -> dict[str, Any]:
    """Return the entry for `models.providers.tinker-claw`."""
    compat: dict[str, Any] = {**COMPAT}
    model: dict[str, Any] = {
        "id": offer.model,
        "name": offer.model.rstrip("/").rsplit("/", 1)[-1],
        "contextWindow": offer.context_tokens,
        "maxTokens": min(offer.max_reply_tokens, offer.context_tokens),
    }
    if offer.images:
        model["input"] = ["text", "image"]
    if offer.efforts:  # `/think` reaches it
        model["reasoning"] = compat["supportsReasoningEffort"] = True
        if not {*_LEVELS} <= {*offer.efforts}:
            compat["supportedReasoningEfforts"] = [*offer.efforts]
    model["compat"] = compat
    return {
        "baseUrl": f"{orders.url(offer.host, offer.port)}/v1",
        "apiKey": ANY_KEY if offer.key is None else f"${{{KEY_VARIABLE}}}",
        "api": API,
        "timeoutSeconds": TIMEOUT_S,
        "models": [model],
    }
