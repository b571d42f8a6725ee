"""How many tokens the model's context holds, and who says so.

Rule: cheap sources only (a file that is here, one question to the service, which costs nothing),
and a guess is called a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError

GUESS: Final = 40_960
"""That of Qwen3 models up to 32B, the smallest among those that agents are used with."""
_PATIENCE_S: Final = 10.0
_DEMO: Final = "demo"


@dataclass(frozen=True, slots=True)
class Context:
    """A number and where it comes from."""

    tokens: int
    source: str
    """Part of a sentence."""
    certain: bool = True


async def context_of(settings: Settings) -> Context:
    """The context that the gateway will offer with these settings."""
    limit = settings.run.context_tokens
    if settings.run.backend == "tinker":
        found = await _of_the_service(settings)
    else:
        found = _of_the_model(settings)
    if limit is None:
        return found
    if found.certain and found.tokens < limit:
        return Context(found.tokens, f"{found.source}, which is below --context-tokens")
    return Context(limit, "--context-tokens")


async def _of_the_service(settings: Settings) -> Context:
    from tinker_claw.backends.sdk import check_sdk

    try:
        check_sdk()
        from tinker_claw.backends.tinker import TinkerConfig, offered  # its SDK takes a second
        from tinker_claw.backends.tinker.trainer import FALLBACK_CONTEXT

        where, served = await offered(
            TinkerConfig(
                model=settings.run.model_name,
                name=settings.served_name,
                base_url=settings.run.base_url,
                start_timeout_s=min(settings.tinker.start_timeout_s, _PATIENCE_S),
            )
        )
    except ConfigError as error:
        known = _of_the_model(settings)
        return Context(known.tokens, f"{known.source}; the service was not asked: {error}", False)
    if served.context_tokens is None:
        return Context(FALLBACK_CONTEXT, f"{where.base_url} does not say; the gateway takes this")
    return Context(served.context_tokens, f"{where.base_url} says so")


def _of_the_model(settings: Settings) -> Context:
    name = settings.run.model_name.partition(":")[0]  # what follows is a variant at Tinker
    try:
        file = _config_file(name)
        text = json.loads(file.read_text())
        found: dict[str, Any] = text.get("text_config", text)
        return Context(int(found["max_position_embeddings"]), f"the config.json of {name} says so")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Context(GUESS, f"a guess: no config.json of {name} is on this machine yet", False)


def _config_file(name: str) -> Path:
    if name == _DEMO:
        from local_gpu.demo import MODEL_DIR

        return MODEL_DIR / "config.json"
    if Path(name).is_dir():
        return Path(name) / "config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, "config.json", local_files_only=True))
