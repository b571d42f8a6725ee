"""Files shipped beside the code: the demo's model, a second model, and files of settings, prices
and canaries.

Rule: each has one path in the repository. In a wheel the same path is below
`tinker_claw/shipped/`, where pyproject.toml puts it; other modules find files through this one.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tinker_claw.errors import ModelFileError

_PACKAGE = Path(__file__).resolve().parent
_PACKED = _PACKAGE / "shipped"
"""Folder of the shipped files; exists in a wheel only."""


def shipped(path: str) -> Path:
    """Return the path of a shipped file or folder, in the wheel or else in the checkout."""
    packed = _PACKED / path
    return packed if packed.exists() else _PACKAGE.parent / path


def config_file(named: str) -> Path:
    """Return a settings file: the path itself, else the shipped file of that path or short name
    (1x80GB)."""
    ours = (shipped(path) for path in (named, f"configs/{named}", f"configs/{named}.toml"))
    return next((path for path in (Path(named), *ours) if path.is_file()), Path(named))


def shipped_configs() -> list[str]:
    """Return the short names of settings files that `config_file` knows."""
    tables = (PRICES.stem, CANARIES.stem)
    return sorted(p.stem for p in shipped("configs").glob("*.toml") if p.stem not in tables)


def install(extras: str) -> str:
    """Return the command that installs optional parts, for messages that report them missing."""
    if _PACKED.is_dir():
        return f"pip install '{_wheel()}[{extras}]'"
    return f"pip install -c constraints.txt -e '.[{extras}]' in {_PACKAGE.parent}"


def _wheel() -> str:
    """Return the path of the wheel that this was installed from. The package name will not do:
    before a release anybody may own it."""
    direct_url = distribution("tinker-claw").read_text("direct_url.json")
    url = urlsplit(json.loads(direct_url)["url"] if direct_url else "")
    return unquote(url.path) if url.scheme == "file" else "the path of its wheel"


PRICES = shipped("configs/prices.toml")
CANARIES = shipped("configs/canaries.toml")
DEMO_CANARIES = shipped("examples/demo/canaries.toml")
DEMO_JUDGE = shipped("examples/demo/judge.py")
MODEL_DIR = shipped("examples/demo/model")
"""The demo's model, in Hugging Face layout."""
MODELS = {
    "demo": MODEL_DIR,
    "demo-tracks": shipped("examples/tracks/model"),
    "demo-screen": shipped("examples/tracks/screen_model"),
}
"""Models by name for --model-name: the demo's, and beginners for the tracks (docs/agents.md), the
last with image input. All are tiny, and judged by the demo's rules unless a judge is named."""
SMALL = "small"
"""Name for --model-name of a real model of 1.5 billion parameters, fetched at first use by
`local_gpu.model.small`."""
MANIFEST = "manifest.json"
"""Name of the file that lists the sha256 of every other file in the model's folder."""
_REMEDY = (
    "Restore its folder with `git checkout`, build it again (examples/demo/recipe), or install the "
    "package anew."
)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, as 64 lower-case hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verify(path: Path) -> None:
    """Raise `ModelFileError` unless every file the manifest lists is there with its hash."""
    try:
        listed: dict[str, str] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        wrong = [name for name, hashed in listed.items() if file_sha256(path / name) != hashed]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelFileError(f"{path} is not whole ({error}). {_REMEDY}") from error
    if wrong:
        raise ModelFileError(f"{path / wrong[0]} is corrupted. {_REMEDY}")
