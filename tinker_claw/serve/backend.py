"""From settings to a trainer, and to the folder that its tokenizer comes from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.learner.rate import lora_learning_rate
from tinker_claw.policy import Trainer

DEMO = "demo"
LORA_ALPHA = 32


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are and which chat format it speaks."""

    path: str
    """A hub id or a local folder."""
    renderer: str


def source(settings: Settings) -> Source:
    """Resolve `--model-name`.

    Raises:
        ModelFileError: the shipped model is damaged.
    """
    if settings.run.model_name != DEMO:
        return Source(settings.run.model_name, settings.run.renderer)
    from local_gpu import demo  # the shipped model's files; imports no torch

    demo.verify()
    return Source(str(demo.MODEL_DIR), "qwen3")


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
    try:
        import peft  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            f"--backend local needs the package {error.name}: "
            "pip install 'tinker-claw[local]' -c constraints.txt"
        ) from error


@asynccontextmanager
async def open_trainer(settings: Settings, path: str) -> AsyncGenerator[Trainer]:
    """The trainer that the settings ask for, closed at the end.

    Raises:
        ConfigError, BackendError: it cannot be opened.
    """
    from local_gpu.trainer import LocalConfig, LocalTrainer

    trainer = await LocalTrainer.start(
        LocalConfig(
            model=path,
            name=settings.served_name,
            root=settings.run.directory,
            rank=settings.training.lora_rank,
            alpha=LORA_ALPHA,
            seed=settings.run.seed,
            device=settings.local.device,
            dtype=settings.local.dtype,
            context_tokens=settings.local.context_tokens,
            kv_cache_tokens=settings.local.kv_cache_tokens,
            threads=settings.local.threads,
        )
    )
    try:
        yield trainer
    finally:
        await trainer.aclose()


def learning_rate(settings: Settings, path: str) -> float:
    """The rate in force; `auto` asks the model's configuration for its hidden size."""
    rate = settings.training.learning_rate
    if rate != "auto":
        return rate
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    return lora_learning_rate(config.hidden_size, config.model_type)
