"""Checkpoints on disk, by their tinker:// paths.

    root/<run>/weights/<name>/            PEFT's adapter, and the optimizer's moments
    root/<run>/sampler_weights/<name>/    the adapter
    root/<run>/external_weights/<name>/   the adapter; its files can be downloaded

Rule: a path is used once, even after its checkpoint was deleted, so weights never change under it;
and none leads out of the root. A checkpoint is complete or absent.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from local_gpu.model.files import remove, sweep
from tinker_claw.errors import ConfigError, RequestError

KINDS: Final[Mapping[str, str]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
NAMELESS: Final = "_nameless-"
"""Prefix of sampler weights without a name, which end with the server at the latest."""
_SCHEME: Final = "tinker://"
_PATH: Final = re.compile(
    rf"{_SCHEME}[A-Za-z0-9-]+:train:[0-9]+/({'|'.join(KINDS)})/[A-Za-z0-9_][A-Za-z0-9._=+-]{{0,199}}"
)


def path_of(run: str, kind: str, name: str) -> str:
    return f"{_SCHEME}{run}/{kind}/{name}"


class Store:
    """All checkpoints under one root. Blocking."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._used = set[str]()

    def folder(self, path: str) -> Path:
        """Return the folder of a path. Raises RequestError for what is none."""
        if not _PATH.fullmatch(path):
            raise RequestError(
                f"{path!r} cannot name a checkpoint, which is {_SCHEME}<run>/<kind>/<name>, of the "
                f"kinds {', '.join(KINDS)}, with a name of up to 200 letters, digits, '.', '_', "
                "'=', '+' and '-'."
            )
        return self.root / path.removeprefix(_SCHEME)

    def new(self, path: str) -> Path:
        """Return the folder of a new checkpoint. Raises RequestError if the path was used."""
        folder = self.folder(path)
        if path in self._used or folder.exists():
            raise RequestError(f"{path} exists already, or did: choose another name.")
        self._used.add(path)
        return folder

    def existing(self, path: str) -> Path:
        """Return the folder of a checkpoint. Raises RequestError if there is none."""
        if not (folder := self.folder(path)).is_dir():
            raise RequestError(f"There is no checkpoint {path}.", status=HTTPStatus.NOT_FOUND)
        return folder

    def list_checkpoints(self, run: str) -> dict[str, Any]:
        self.folder(path_of(run, "weights", "any"))  # raises for a run that is none
        checkpoints = [
            {
                "checkpoint_id": f"{kind}/{folder.name}",
                "checkpoint_type": KINDS[kind],
                "time": datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(),
                "tinker_path": path_of(run, kind, folder.name),
                "public": False,
            }
            for kind in KINDS
            for folder in (self.root / run / kind).glob("[!.]*")
        ]
        return {"checkpoints": checkpoints}

    def delete_checkpoint(self, run: str, kind: str, name: str) -> None:
        remove([self.folder(path_of(run, kind, name))])


@contextmanager
def locked(root: Path) -> Generator[Store]:
    """Keep the root for this process, and remove what a killed one left half written.

    Raises:
        ConfigError: another server has it, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((root / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"--root {root} is in use by another server, or cannot be written "
                f"({error.strerror}): choose another folder"
            ) from error
        for folder in root.glob("*/*"):
            sweep(folder)
        remove(root.glob(f"*/*/{NAMELESS}*"))
        yield Store(root)
