"""Files of a model: in a folder, shipped, or on the hub.

Rule: files are downloaded once, and only those that are needed. A folder that cannot be a model is
refused here, before anything is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError

from tinker_claw.backends.vllm import find_vllm
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.render.eyes import SEEING
from tinker_claw.render.renderer import family_of
from tinker_claw.render.switches import Thinking
from tinker_claw.shipped import MODELS, SMALL, verify

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
"""Files of which one holds the chat template."""
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_WANTED = (
    "name a model in the form of the Hugging Face hub (config.json, *.safetensors, "
    "tokenizer.json); GGUF files are not read"
)


@dataclass(frozen=True, slots=True)
class Source:
    """Folders of a model's files, and its chat format."""

    tokenizer: str
    """The folder of tokenizer and chat template."""
    family: str
    weights: str
    """The folder of the model itself; the tokenizer's where a service has the weights."""


def source(settings: Settings, *, weights: bool = True) -> Source:
    """Resolve `--model-name` to a folder, downloading a hub model once.

    Args:
        weights: whether to get the weights, too, unless a service has them.

    Raises:
        ModelFileError: a shipped model is damaged.
        ConfigError: there is no such folder, it is no model, or it cannot be downloaded.
    """
    run, named = settings.run, _named(settings)
    spoken, flag = (run.tokenizer, "--tokenizer") if run.tokenizer else (named, "--model-name")
    files = _MODEL_FILES if weights else _TOKENIZER_FILES
    model = None if run.backend == "tinker" else checked_folder(named, files)
    tokenizer = model if model and spoken == named else _folder(spoken, flag, _TOKENIZER_FILES)
    if not any(next(Path(tokenizer).glob(name), None) for name in _TOKENIZERS):
        raise ConfigError(
            f"{flag} {spoken} has no tokenizer (tokenizer.json and tokenizer_config.json): put its "
            "files there, or name a model that has the same one with --tokenizer"
        )
    return Source(tokenizer, _family(settings), model or tokenizer)


def absent(settings: Settings) -> list[str]:
    """Return the hub models of these settings of which nothing is on this machine yet."""
    wanted = {_spoken(settings)}
    if settings.run.backend == "local":
        wanted.add(_named(settings))
    wanted.discard(SMALL)  # not from the hub
    return sorted(name for name in wanted if not _local_text(name, "config.json"))


def may_see(settings: Settings) -> bool:
    """Return whether the model takes images and the settings allow them, as far as is known."""
    if _family(settings) not in SEEING or settings.gateway.images == "off":
        return False
    if settings.run.backend == "tinker":
        return True
    try:
        config = json.loads(_local_text(_named(settings), "config.json"))
    except ValueError:
        return False
    if "image_token_id" not in config or settings.local.urls:  # not known of other servers
        return False
    # In this process as `SEEING` of local_gpu.model.load.
    return find_vllm() is not None or config.get("model_type") == "qwen3_vl"


def thinking_of(settings: Settings) -> Thinking:
    """Return the model's way of thinking, as far as its name and its files here tell."""
    family = _family(settings)
    own = "".join(_local_text(_spoken(settings), name) for name in _TEMPLATES)
    return Thinking.named("default" if family == "auto" else family, own)


def _local_text(model: str, file: str) -> str:
    """A file of a model; "" where it is not on this machine."""
    try:
        return local_file(model, file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def check_images(settings: Settings, model: str, *, trains: bool) -> None:
    """Raise ConfigError where images are to be trained, and this model cannot be trained on any."""
    if settings.gateway.images == "train" and not trains:
        raise ConfigError(
            f"--images train: {model} cannot be trained on images here. docs/images.md says "
            "which models and backends can; --images serve shows them all the same, if it sees"
        )


def _named(settings: Settings) -> str:
    """The model's name, without the suffix of a variant at Tinker (`:peft:262144`), whose tokenizer
    is the same."""
    run = settings.run
    return run.model_name.partition(":")[0] if run.backend == "tinker" else run.model_name


def _spoken(settings: Settings) -> str:
    """The name of the model whose tokenizer is used."""
    return settings.run.tokenizer or _named(settings)


def _family(settings: Settings) -> str:
    spoken = _spoken(settings)
    if spoken in MODELS:
        return "qwen3-vl" if spoken == "demo-screen" else "qwen3"
    if settings.run.renderer != "auto":
        return settings.run.renderer
    family = family_of(_named(settings))
    return family if family != "auto" else family_of(spoken)


def local_file(model: str, file: str = "config.json") -> Path:
    """A file of a model, if it is on this machine.

    Raises:
        OSError: it is not.
        ValueError: the hub can have no model of this name.
    """
    if model == SMALL:
        from local_gpu.model.small import FOLDER, default_cache

        return default_cache() / FOLDER / file
    if model in MODELS or Path(model).is_dir():
        return Path(MODELS.get(model, model)) / file
    return Path(hf_hub_download(model, file, local_files_only=True))


def checked_folder(name: str, files: list[str]) -> str:
    """Return the folder of a model; refuse adapters and folders without a config.json.

    Args:
        files: patterns of what is downloaded from the hub.

    Raises:
        ConfigError: as `source`.
    """
    folder = Path(_folder(name, "--model-name", files))
    if (adapter := folder / "adapter_config.json").exists():
        # transformers would load its base, and put the adapter in.
        raise ConfigError(
            f"--model-name {name} is an adapter, no model; name its base{_base_of(adapter)}"
        )
    if not (folder / "config.json").exists():
        raise ConfigError(f"--model-name {name} has no config.json; {_WANTED}")
    return str(folder)


def _folder(name: str, flag: str, files: list[str]) -> str:
    if name in MODELS:
        verify(MODELS[name])
        return str(MODELS[name])
    if name == SMALL:
        from local_gpu.model.small import default_cache, model_folder

        return str(model_folder(default_cache()))
    if Path(name).is_dir():
        return name
    if Path(name).is_file():
        raise ConfigError(f"{flag} {name} is a file, no folder; {_WANTED}")
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{flag} {name}: there is no such folder; {_WANTED}")
    return _download(name, files, flag)


def _base_of(adapter: Path) -> str:
    try:
        base: object = json.loads(adapter.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    merging = ", or a model that it is merged into"
    return f" ({base}){merging}" if base else merging


def _download(name: str, files: list[str], flag: str) -> str:
    """The local folder of a hub model; only what is missing there is fetched."""
    try:
        return snapshot_download(name, allow_patterns=files)
    except (HFValidationError, OSError) as error:  # the hub's others are OSErrors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{flag} {name} cannot be downloaded from the Hugging Face hub ({reason}); check the "
            "name and the network, give a local folder, or use --model-name demo"
        ) from error
