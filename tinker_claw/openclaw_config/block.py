"""The provider block that points OpenClaw at this gateway.

Rule: pure, and everything in it follows from the settings; a secret only where it is asked for.
"""

from __future__ import annotations

from typing import Any, Final

from tinker_claw.config import DEFAULT_USER, Settings

PROVIDER: Final = "tinker-claw"
API: Final = "openai-completions"
TIMEOUT_S: Final = 600
"""Without it OpenClaw gives up on a model elsewhere after two minutes without a word."""
ANY_KEY: Final = "anything"
"""OpenClaw wants some key; a gateway without keys takes each."""
COMPAT: Final = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
"""With these OpenClaw names the session in every request, also in calls beside the conversation."""
KEY_VARIABLE: Final = "CLAW_GATEWAY_KEY"
"""OpenClaw puts its value in the key's place. The gateway's own variables have another prefix."""
ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a gateway that listens everywhere is asked from its own machine."""


def base_url(settings: Settings) -> str:
    """The address that a client on this machine uses."""
    host = ANYWHERE.get(settings.gateway.host, settings.gateway.host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{settings.gateway.port}/v1"


def keys(settings: Settings) -> dict[str, str]:
    """Every key that the gateway takes, by the user whom it names; none: it takes any."""
    default = settings.gateway.api_key
    found = {DEFAULT_USER: default.get_secret_value()} if default is not None else {}
    return found | {user.name: user.key.get_secret_value() for user in settings.users}


def provider(settings: Settings, context_tokens: int, key: str | None = None) -> dict[str, Any]:
    """What belongs under `models.providers.tinker-claw`.

    Args:
        key: stands in it as it is; None: a reference, where the gateway has keys.
    """
    name = settings.served_name
    return {
        "baseUrl": base_url(settings),
        "apiKey": key or (f"${{{KEY_VARIABLE}}}" if keys(settings) else ANY_KEY),
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


def primary(settings: Settings) -> str:
    """How `agents.defaults.model.primary` names the model."""
    return f"{PROVIDER}/{settings.served_name}"


def block(settings: Settings, context_tokens: int, key: str | None = None) -> dict[str, Any]:
    """The whole block, as it would stand in an otherwise empty configuration."""
    told = provider(settings, context_tokens, key)
    return {
        "models": {"providers": {PROVIDER: told}},
        "agents": {"defaults": {"model": {"primary": primary(settings)}}},
    }
