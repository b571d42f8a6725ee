"""Where a model's files are: in a folder, shipped, or on the hub.

Rule: what is downloaded is downloaded once, and no more of it than is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.render import family_of

DEMO = "demo"
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are and which chat format it speaks."""

    folder: str
    family: str


def source(settings: Settings, *, weights: bool = True) -> Source:
    """Resolve `--model-name` to a folder, downloading a hub model once.

    Args:
        weights: wanted, too, unless a service has them.

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
    flag = "--tokenizer" if settings.run.tokenizer else "--model-name"
    if _is_folder(name, flag):
        return Source(name, family)
    files = _TOKENIZER_FILES if remote or not weights else _MODEL_FILES
    folder = _download(name, files, flag)
    return Source(folder, family_of(named) if family == "auto" else family)


def config_folder(name: str, flag: str) -> str:
    """A folder with the config.json of a model, and with no more of it where it is on the hub.

    Raises:
        ConfigError: as `source`.
    """
    if name == DEMO:
        from local_gpu import demo

        return str(demo.MODEL_DIR)
    return name if _is_folder(name, flag) else _download(name, ["config.json"], flag)


def judge_folder(settings: Settings) -> str:
    """The folder of `--prm-model-name`, which is set.

    Raises:
        ConfigError: as `source`.
    """
    name, flag = settings.local.prm_model_name or "", "--prm-model-name"
    return name if _is_folder(name, flag) else _download(name, _MODEL_FILES, flag)


def _is_folder(name: str, flag: str) -> bool:
    if Path(name).is_dir():
        return True
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{flag} {name}: there is no such folder")
    return False


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
