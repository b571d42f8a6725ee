"""From settings to a trainer: what can run here, who is opened, and at which rate it learns."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinker_claw.backends.local import Arrangement, arrange, open_local
from tinker_claw.backends.tinker_sdk import check_sdk
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.policy import Trainer

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
    missing = [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--backend local needs {', '.join(missing)}; in the project's folder: "
            "pip install -c constraints.txt -e '.[local]'"
        )
    if settings.local.base_quantization == "4bit" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--base-quantization 4bit needs bitsandbytes; in the project's folder: "
            "pip install -c constraints.txt -e '.[local,4bit]'"
        )


@asynccontextmanager
async def open_trainer(
    settings: Settings,
    folder: str,
    arranged: Arrangement | None = None,
    away: Callable[[Sequence[str]], object] = len,
) -> AsyncGenerator[Trainer]:
    """The trainer that the settings ask for, closed at the end.

    Args:
        arranged: who does what on this machine; None: it is asked anew where that matters.
        away: hears which of the local backend's inference servers are out of the rotation, and
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
    """The rate in force; `auto` asks the model's configuration for its hidden size."""
    rate = settings.training.learning_rate
    if rate != "auto":
        return rate
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    if "hidden_size" in config:
        return lora_learning_rate(config["hidden_size"], config.get("model_type", ""))
    from transformers import AutoConfig  # knows its other names; imports torch

    known = AutoConfig.from_pretrained(folder).get_text_config()
    return lora_learning_rate(known.hidden_size, known.model_type)


def lora_learning_rate(hidden_size: int, model_type: str) -> float:
    """5e-5 * 10 * (2000 / hidden_size) ** e, with e = 0.781 for Llama and 0.0775 otherwise.

    Source: the LoRA rate of tinker-cookbook (hyperparam_utils), fitted on Llama and Qwen models.
    """
    exponent = _EXPONENTS.get(model_type, _EXPONENT)
    return _BASE * _LORA_FACTOR * (_REFERENCE_HIDDEN / hidden_size) ** exponent
