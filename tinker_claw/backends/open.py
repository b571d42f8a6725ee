"""Open a trainer from settings: check the backend, and find the learning rate and the context
length."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinker_claw.backends.local import Arrangement, arrange, open_local
from tinker_claw.backends.model_files import local_file
from tinker_claw.backends.tinker_sdk import check_sdk
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.policy import Trainer
from tinker_claw.shipped import install

_BASE = 5e-5
_LORA_FACTOR = 10.0
_REFERENCE_HIDDEN = 2000
_EXPONENTS = {"llama": 0.781}
_EXPONENT = 0.0775


async def check_backend(settings: Settings) -> None:
    """Refuse a backend that cannot run here, before anything is opened or spent.

    Raises:
        ConfigError: says what is missing and what to do.
    """
    if settings.run.backend == "tinker":
        check_sdk()  # before the adapter, which another release could not import
        from tinker_claw.backends.tinker.trainer import offered  # its SDK takes a second

        await offered(settings)
        return
    check_packages()
    if settings.local.base_quantization == "4bit" and find_spec("bitsandbytes") is None:
        raise ConfigError(f"--base-quantization 4bit needs bitsandbytes: {install('local,4bit')}")


def check_packages() -> None:
    """Raise ConfigError where the local backend's packages are missing."""
    missing = [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--backend local needs {', '.join(missing)}: {install('local')}")


@asynccontextmanager
async def open_trainer(
    settings: Settings,
    folder: str,
    arranged: Arrangement | None = None,
    away: Callable[[Sequence[str]], object] = len,
) -> AsyncGenerator[Trainer]:
    """Open the trainer that the settings ask for; close it at the end.

    Args:
        arranged: layout of this machine's GPUs; None: it is computed where needed.
        away: called with the local backend's inference servers that are out of the rotation, and
            why, whenever that changes.

    Raises:
        ConfigError, BackendError: it cannot be opened.
    """
    if settings.run.backend == "local":
        async with open_local(settings, arranged or arrange(settings), folder, away) as local:
            yield local
        return
    from tinker_claw.backends.tinker.trainer import TinkerTrainer

    trainer = await TinkerTrainer.start(settings)
    try:
        yield trainer
    finally:
        await trainer.aclose()


def learning_rate(settings: Settings, folder: str) -> float:
    """Return the rate in force; `auto` computes it from the hidden size in the model's config.

    Raises:
        ConfigError: it cannot be read.
    """
    rate = settings.training.learning_rate
    if rate != "auto":
        return rate
    try:
        config = _text_config(Path(folder) / "config.json")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder} has no config.json that can be read, by which --learning-rate auto goes: "
            "put it there, or give a number"
        ) from error
    if "hidden_size" in config:
        return lora_learning_rate(config["hidden_size"], config.get("model_type", ""))
    from transformers import AutoConfig  # knows its other names; imports torch

    text_config = AutoConfig.from_pretrained(folder).get_text_config()
    return lora_learning_rate(text_config.hidden_size, text_config.model_type)


def _text_config(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config.get("text_config") or config


def lora_learning_rate(hidden_size: int, model_type: str) -> float:
    """5e-5 * 10 * (2000 / hidden_size) ** e, with e = 0.781 for Llama and 0.0775 otherwise.

    Source: the LoRA rate of tinker-cookbook (hyperparam_utils), fitted on Llama and Qwen models.
    """
    exponent = _EXPONENTS.get(model_type, _EXPONENT)
    return _BASE * _LORA_FACTOR * (_REFERENCE_HIDDEN / hidden_size) ** exponent


# The model's context length and its source: cheap sources only, and a guess is called a guess

GUESS = 40_960
"""Context of Qwen3 models up to 32B, the smallest among models that agents are used with."""
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Context:
    """A context length and its source."""

    tokens: int
    source: str
    """Part of a sentence."""
    certain: bool = True


async def context_of(settings: Settings) -> Context:
    """The context that the gateway will offer with these settings, before anything is opened."""
    limit = settings.run.context_tokens
    remote = settings.run.backend == "tinker"
    context = await _of_the_service(settings) if remote else _of_the_model(settings)
    if limit is None:
        return context
    if context.certain and context.tokens < limit:
        return Context(context.tokens, f"{context.source}, which is below --context-tokens")
    return Context(limit, "--context-tokens")


async def _of_the_service(settings: Settings) -> Context:
    try:
        check_sdk()
        # Here, because its SDK takes a second.
        from tinker_claw.backends.tinker.trainer import FALLBACK_CONTEXT, offered

        where, served = await offered(settings, within_s=_PATIENCE_S)
    except ConfigError as error:
        context = _of_the_model(settings)
        return Context(
            context.tokens, f"{context.source}; the service was not asked: {error}", False
        )
    if served.context_tokens is None:
        return Context(FALLBACK_CONTEXT, f"{where.base_url} does not say; the gateway takes this")
    return Context(served.context_tokens, f"{where.base_url} says so")


def _of_the_model(settings: Settings) -> Context:
    name = settings.run.model_name.partition(":")[0]  # what follows is a variant at Tinker
    try:
        tokens = int(_text_config(local_file(name))["max_position_embeddings"])
        return Context(tokens, f"the config.json of {name} says so")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Context(GUESS, f"a guess: no config.json of {name} is on this machine yet", False)
