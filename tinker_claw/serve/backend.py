"""From settings to a trainer, and to the folder that its tokenizer comes from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.learner.rate import lora_learning_rate
from tinker_claw.policy import Trainer
from tinker_claw.render import family_of

DEMO = "demo"
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
LORA_ALPHA = 32


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are and which chat format it speaks."""

    folder: str
    family: str


def source(settings: Settings) -> Source:
    """Resolve `--model-name` to a folder, downloading a hub model once.

    Raises:
        ModelFileError: the shipped model is damaged.
        ConfigError: there is no such folder, or it cannot be downloaded.
    """
    name, family = settings.run.model_name, settings.run.renderer
    if name == DEMO:
        from local_gpu import demo  # the shipped model's files; imports no torch

        demo.verify()
        return Source(str(demo.MODEL_DIR), "qwen3")
    if Path(name).is_dir():
        return Source(name, family)
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"--model-name {name}: there is no such folder")
    return Source(_download(name), family_of(name) if family == "auto" else family)


def _download(name: str) -> str:
    """The local folder of a hub model; only what is missing there is fetched."""
    try:
        return snapshot_download(name, allow_patterns=_MODEL_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--model-name {name} cannot be had from the Hugging Face hub ({reason}); check the "
            "name and the network, give a local folder, or use --model-name demo"
        ) from error


def check_backend(settings: Settings) -> None:
    """Refuse a backend that cannot run here, before anything is opened.

    Raises:
        ConfigError: says what is missing and what to run instead.
    """
    if settings.run.backend == "tinker":
        raise ConfigError(
            "the Tinker backend is not part of this release yet. Train on this machine instead: "
            f"run.py --backend local --model-name {settings.run.model_name} "
            "(or --model-name demo, which needs no GPU)"
        )
    missing = [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--backend local needs {', '.join(missing)}: "
            "pip install 'tinker-claw[local]' -c constraints.txt"
        )


@asynccontextmanager
async def open_trainer(settings: Settings, folder: str) -> AsyncGenerator[Trainer]:
    """The trainer that the settings ask for, closed at the end.

    Raises:
        ConfigError, BackendError: it cannot be opened.
    """
    from local_gpu.trainer import LocalConfig, LocalTrainer

    trainer = await LocalTrainer.start(
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
            context_tokens=settings.local.context_tokens,
            kv_cache_tokens=settings.local.kv_cache_tokens,
            threads=settings.local.threads,
        )
    )
    try:
        yield trainer
    finally:
        await trainer.aclose()


def learning_rate(settings: Settings, folder: str) -> float:
    """The rate in force; `auto` asks the model's configuration for its hidden size."""
    rate = settings.training.learning_rate
    if rate != "auto":
        return rate
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    return lora_learning_rate(config.hidden_size, config.model_type)
