"""The demo: a tiny model, made by `build.py`, that lets a laptop watch the loop learn.

This file only says where the shipped model lies and checks that its files are the ones that were
committed. One rule: standard library only, so that it can be imported without torch.
"""

import hashlib
import json
from pathlib import Path
from typing import cast

from tinker_claw.errors import ModelFileError

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Folder of the shipped model, in Hugging Face layout."""

MANIFEST = "manifest.json"
"""Name of the file that lists the sha256 of every other file of the folder."""

_REMEDY = (
    "Restore it with `git checkout -- local_gpu/demo/model`"
    " or build it again with `python -m local_gpu.demo.build`."
)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, as 64 lower-case hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verify(path: Path = MODEL_DIR) -> None:
    """Raise `ModelFileError` unless every file the manifest lists is there with its hash."""
    for name, expected in _read_manifest(path / MANIFEST).items():
        file = path / name
        if not file.is_file():
            raise ModelFileError(f"{file} is missing. {_REMEDY}")
        got = file_sha256(file)
        if got != expected:
            raise ModelFileError(
                f"{file} is corrupted: its sha256 should be {expected} but is {got}. {_REMEDY}"
            )


def _read_manifest(file: Path) -> dict[str, str]:
    """Return the manifest's table, file name -> sha256."""
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise ModelFileError(f"{file} is missing. {_REMEDY}") from cause
    except ValueError as cause:
        raise ModelFileError(f"{file} is corrupted: it is not JSON ({cause}). {_REMEDY}") from cause
    table = cast("dict[str, object]", content).get("sha256") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table:
        raise ModelFileError(f"{file} is corrupted: it has no table `sha256`. {_REMEDY}")
    return {str(name): str(value) for name, value in cast("dict[object, object]", table).items()}
