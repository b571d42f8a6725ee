"""Checkpoints on disk, by their tinker:// paths.

    root/<run>/weights/<name>/            adapter, optimizer.safetensors, checkpoint.json
    root/<run>/sampler_weights/<name>/    adapter, checkpoint.json
    root/<run>/external_weights/<name>/   the same; its files can be downloaded

    root/.serving/<ref>/                  what is sampled from: links to a checkpoint's adapter

Rule: a checkpoint is complete or absent, and no name leads out of the root. A serving folder never
changes, whatever happens to the checkpoint. Blocking; any thread may call it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any, Final
from urllib.parse import quote, unquote

from local_gpu.model.files import new_folder, sweep
from tinker_claw.errors import ConfigError, RequestError

KINDS: Final[Mapping[str, str]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_SCHEME: Final = "tinker://"
_RECORD: Final = "checkpoint.json"
_REPLACED: Final = ".replaced-"
_SERVING: Final = ".serving"
_LOCK: Final = ".lock"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
_RUN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a checkpoint, checked: no part of it can be a path."""

    run: str
    kind: str
    name: str

    @classmethod
    def of(cls, run: str, kind: str, name: str) -> Place:
        """Raises RequestError for what cannot name a checkpoint."""
        if kind not in KINDS or not _RUN.fullmatch(run):
            raise RequestError(
                f"{run}/{kind} holds no checkpoints; a path is tinker://<run>/<kind>/<name> with "
                f"one of {', '.join(KINDS)}."
            )
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{name!r} cannot name a checkpoint: use up to 200 letters, digits, '.', '_', "
                "'=', '+' and '-', not beginning with '.', '=', '+' or '-'."
            )
        return cls(run, kind, name)

    @classmethod
    def at(cls, path: str) -> Place:
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3:
            raise RequestError(f"{path!r} is not a path of the form tinker://<run>/<kind>/<name>.")
        return cls.of(*parts)

    @property
    def path(self) -> str:
        return f"{_SCHEME}{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Record:
    """Metadata that is written beside a checkpoint's tensors."""

    base_model: str
    rank: int
    time: str
    """ISO 8601, UTC."""
    ephemeral: bool = False
    """Belongs to a session of this server; a later server removes it."""
    user_metadata: dict[str, str] | None = None
    run_metadata: dict[str, str] | None = None
    """Metadata of the training run that wrote the checkpoint."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.time)  # so that every stored record can be read

    @classmethod
    def now(cls, base_model: str, rank: int, **more: Any) -> Record:
        return cls(base_model, rank, datetime.now(UTC).isoformat(), **more)


class Store:
    """All checkpoints under one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._changing = Lock()
        """Held while a checkpoint's folder changes, or is linked to."""

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep the root for this process, however that ends: `recover` would take what another one
        serves and writes for what a killed one has left.

        Raises:
            ConfigError: another server has it, or it cannot be written.
        """
        with ExitStack() as until_the_end:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                lock = until_the_end.enter_context((self.root / _LOCK).open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                taken = isinstance(error, BlockingIOError)
                why = "in use by another server" if taken else f"not writable ({error.strerror})"
                raise ConfigError(f"--root {self.root} is {why}; choose another folder") from error
            yield

    def folder(self, place: Place) -> Path:
        return self.root / quote(place.run, safe="") / place.kind / place.name

    def write(
        self, place: Place, record: Record, fill: Callable[[Path], None], *, overwrite: bool = False
    ) -> None:
        """Raises RequestError if the name is taken and may not be overwritten."""
        folder = self.folder(place)
        if folder.exists() and not overwrite:
            raise RequestError(
                f"{place.path} exists already: choose another name, delete it, or give save_state "
                "overwrite=True."
            )
        replaced = folder.with_name(_REPLACED + place.name)
        with ExitStack() as until_it_is_there, new_folder(folder) as draft:
            fill(draft)
            (draft / _RECORD).write_text(json.dumps(asdict(record)))
            until_it_is_there.enter_context(self._changing)
            if folder.exists():
                # `recover` puts it back if the process dies before the draft takes its place.
                shutil.rmtree(replaced, ignore_errors=True)
                folder.rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)

    def read(self, place: Place) -> Record:
        """Raises RequestError if there is no such checkpoint."""
        record = self._record(place)
        if record is None:
            raise RequestError(f"There is no checkpoint {place.path}.", status=HTTPStatus.NOT_FOUND)
        return record

    def files(self, place: Place) -> dict[str, Path]:
        """The files of a checkpoint that a client may have, by name."""
        self.read(place)
        found = sorted(self.folder(place).iterdir())
        return {file.name: file for file in found if not file.name.startswith(_RECORD)}

    def all(self, run: str | None = None) -> list[tuple[Place, Record]]:
        """Every checkpoint, or those of a run, newest first."""
        found = [one for one in self._all() if run in (None, one[0].run)]
        return sorted(found, key=lambda one: one[1].time, reverse=True)

    def size_bytes(self, place: Place) -> int:
        return sum(file.stat().st_size for file in self.folder(place).iterdir())

    def remove(self, place: Place) -> None:
        with self._changing:
            shutil.rmtree(self.folder(place), ignore_errors=True)

    def serve(self, place: Place) -> str:
        """Link to an adapter as it is now; return its ref, under which nothing else is ever served.

        Raises:
            RequestError: there is no such checkpoint.
        """
        ref = f"{place.name}-{secrets.token_hex(8)}"
        with self._changing, new_folder(self.serving(ref)) as draft:
            self.read(place)
            for file in self.folder(place).glob("adapter_*"):
                os.link(file, draft / file.name)
        return ref

    def serving(self, ref: str) -> Path:
        """Folder of the weights that are served under a ref."""
        return self.root / _SERVING / ref

    def serve_no_more(self, ref: str) -> None:
        shutil.rmtree(self.serving(ref), ignore_errors=True)

    def recover(self) -> None:
        """Finish or undo what a killed server left, and drop its ephemeral checkpoints. Called at
        start."""
        shutil.rmtree(self.root / _SERVING, ignore_errors=True)
        for parent in self.root.glob("*/*"):
            sweep(parent)
            for replaced in parent.glob(f"{_REPLACED}*"):
                folder = parent / replaced.name.removeprefix(_REPLACED)
                if folder.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
                else:
                    replaced.rename(folder)
        for place, record in self._all():
            if record.ephemeral:
                self.remove(place)

    def _all(self) -> list[tuple[Place, Record]]:
        found: list[tuple[Place, Record]] = []
        for file in sorted(self.root.glob(f"*/*/*/{_RECORD}")):
            run, kind, name = file.parent.parts[-3:]
            if kind in KINDS and _NAME.fullmatch(name):
                place = Place(unquote(run), kind, name)
                if (record := self._record(place)) is not None:
                    found.append((place, record))
        return found

    def _record(self, place: Place) -> Record | None:
        """Return a record; None: it is missing or cannot be read."""
        try:
            return Record(**json.loads((self.folder(place) / _RECORD).read_text()))
        except (OSError, ValueError, TypeError):
            return None
