"""What is shipped beside the code: the demo with its tiny model, a second model, and the files of
settings, of prices and of canaries.

Rule: each lies at one path of the repository. In a wheel the same path stands below
`tinker_claw/shipped/`, where pyproject.toml puts it; whoever wants a file asks here.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tinker_claw.errors import ModelFileError

_PACKAGE: Final = Path(__file__).resolve().parent
_PACKED: Final = _PACKAGE / "shipped"
"""There in a wheel alone."""


def shipped(path: str) -> Path:
    """Where a file or folder of the repository lies, in a wheel or else in the checkout."""
    packed = _PACKED / path
    return packed if packed.exists() else _PACKAGE.parent / path


def config_file(named: str) -> Path:
    """A file of settings: where it is, else the shipped one of that path or short name (1x80GB)."""
    ours = (shipped(path) for path in (named, f"configs/{named}", f"configs/{named}.toml"))
    return next((path for path in (Path(named), *ours) if path.is_file()), Path(named))


def shipped_configs() -> list[str]:
    """The short names that `config_file` knows and that are settings."""
    tables = (PRICES.stem, CANARIES.stem)
    return sorted(p.stem for p in shipped("configs").glob("*.toml") if p.stem not in tables)


def install(extras: str) -> str:
    """The command that adds optional parts, for whoever reads that they are missing."""
    if _PACKED.is_dir():
        return f"pip install '{_wheel()}[{extras}]'"
    return f"pip install -c constraints.txt -e '.[{extras}]' in {_PACKAGE.parent}"


def _wheel() -> str:
    """The wheel that this was installed from. Not our name: before a release it is anybody's."""
    told = distribution("tinker-claw").read_text("direct_url.json")
    url = urlsplit(json.loads(told)["url"] if told else "")
    return unquote(url.path) if url.scheme == "file" else "the path of its wheel"


PRICES: Final = shipped("configs/prices.toml")
CANARIES: Final = shipped("configs/canaries.toml")
DEMO_CANARIES: Final = shipped("examples/demo/canaries.toml")
DEMO_JUDGE: Final = shipped("examples/demo/judge.py")
MODEL_DIR: Final = shipped("examples/demo/model")
"""The demo's model, in Hugging Face layout."""
MODELS: Final = {"demo": MODEL_DIR, "demo-tracks": shipped("examples/tracks/model")}
"""Names for --model-name: the demo's model, and a beginner at the tracks (docs/agents.md). Both are
tiny, speak Qwen3's format, and are judged by the demo's rules unless a judge is named."""
MANIFEST: Final = "manifest.json"
"""The file that lists the sha256 of every other file of the model's folder."""
_REMEDY: Final = (
    "Restore its folder with `git checkout`, build it again (examples/demo/recipe), or install the "
    "package anew."
)


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, as 64 lower-case hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verify(path: Path = MODEL_DIR) -> None:
    """Raise `ModelFileError` unless every file the manifest lists is there with its hash."""
    try:
        listed: dict[str, str] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        wrong = [name for name, hashed in listed.items() if file_sha256(path / name) != hashed]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelFileError(f"{path} is not whole ({error}). {_REMEDY}") from error
    if wrong:
        raise ModelFileError(f"{path / wrong[0]} is corrupted. {_REMEDY}")
