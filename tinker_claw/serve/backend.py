"""From settings to a trainer, and to the folder that its tokenizer comes from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from tinker_claw.backends.sdk import check_sdk
from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.learner.rate import lora_learning_rate
from tinker_claw.policy import Trainer
from tinker_claw.render import family_of

if TYPE_CHECKING:
    from tinker_claw.backends.tinker import TinkerConfig

DEMO = "demo"
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]
LORA_ALPHA = 32


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are and which chat format it speaks."""

    folder: str
    family: str


def source(settings: Settings) -> Source:
    """Resolve `--model-name` to a folder, downloading a hub model once.

    Where a service has the weights, only the tokenizer's files are wanted.

    Raises:
        ModelFileError: the shipped model is damaged.
        ConfigError: there is no such folder, or it cannot be downloaded.
    """
    remote = settings.run.backend == "tinker"
    # What follows a colon chooses a variant at Tinker (`:peft:262144`); the tokenizer is the same.
    named = settings.run.model_name.partition(":")[0] if remote else settings.run.model_name
    name, family = settings.run.tokenizer or named, settings.run.renderer
    if name == DEMO:
        from local_gpu import demo  # the shipped model's files; imports no torch

        demo.verify()
        return Source(str(demo.MODEL_DIR), "qwen3")
    if Path(name).is_dir():
        return Source(name, family)
    flag = "--tokenizer" if settings.run.tokenizer else "--model-name"
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{flag} {name}: there is no such folder")
    files = _TOKENIZER_FILES if remote else _MODEL_FILES
    folder = _download(name, files, flag)
    return Source(folder, family_of(named) if family == "auto" else family)


def _download(name: str, files: list[str], flag: str) -> str:
    """The local folder of a hub model; only what is missing there is fetched."""
    try:
        return snapshot_download(name, allow_patterns=files)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{flag} {name} cannot be had from the Hugging Face hub ({reason}); check the "
            "name and the network, give a local folder, or use --model-name demo"
        ) from error


async def check_backend(settings: Settings) -> None:
    """Refuse a backend that cannot run here, before anything is opened or spent.

    Raises:
        ConfigError: says what is missing and what to do.
    """
    if settings.run.backend == "tinker":
        check_sdk()  # before the adapter, which another release could not import
        from tinker_claw.backends.tinker import offered  # its SDK takes a second

        await offered(tinker_config(settings))
        return
    missing = [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--backend local needs {', '.join(missing)}: "
            "pip install 'tinker-claw[local]' -c constraints.txt"
        )


def tinker_config(settings: Settings) -> TinkerConfig:
    """The adapter's part of the settings."""
    from tinker_claw.backends.tinker import TinkerConfig

    return TinkerConfig(
        model=settings.run.model_name,
        name=settings.served_name,
        base_url=settings.run.base_url,
        rank=settings.training.lora_rank,
        seed=settings.run.seed,
        context_tokens=settings.run.context_tokens,
        sample_timeout_s=settings.tinker.sample_timeout_s,
        step_timeout_s=settings.tinker.step_timeout_s,
        save_timeout_s=settings.tinker.save_timeout_s,
        start_timeout_s=settings.tinker.start_timeout_s,
    )


@asynccontextmanager
async def open_trainer(settings: Settings, folder: str) -> AsyncGenerator[Trainer]:
    """The trainer that the settings ask for, closed at the end.

    Raises:
        ConfigError, BackendError: it cannot be opened.
    """
    if settings.run.backend == "tinker":
        from tinker_claw.backends.tinker import TinkerTrainer

        trainer: Trainer = await TinkerTrainer.start(tinker_config(settings))
    else:
        trainer = await _start_local(settings, folder)
    try:
        yield trainer
    finally:
        await trainer.aclose()


async def _start_local(settings: Settings, folder: str) -> Trainer:
    from local_gpu.config import LocalConfig
    from local_gpu.trainer import LocalTrainer  # torch: only where it trains

    return await LocalTrainer.start(
        LocalConfig(
            model=folder,
            name=settings.served_name,
            root=settings.run.directory,
            rank=settings.training.lora_rank,
            alpha=LORA_ALPHA,
            seed=settings.run.seed,
            device=settings.local.device,
            dtype=settings.local.dtype,
            checkpointing=settings.local.checkpointing,
            context_tokens=settings.run.context_tokens,
            kv_cache_tokens=settings.local.kv_cache_tokens,
            threads=settings.local.threads,
        )
    )


def learning_rate(settings: Settings, folder: str) -> float:
    """The rate in force; `auto` asks the model's configuration for its hidden size."""
    rate = settings.training.learning_rate
    if rate != "auto":
        return rate
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    return lora_learning_rate(config.hidden_size, config.model_type)
