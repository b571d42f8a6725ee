"""Adapters and optimizer states on disk.

    root/adapters/<stamp>/    adapter_model.safetensors, adapter_config.json   (PEFT's format)
    root/states/<stamp>-<name>/    the same, and optimizer.safetensors

Rule: a folder appears whole or not at all (written beside, fsynced, renamed), under a name that
was never used before, and says which base model it belongs to. Tensors are named as in that model's
checkpoint: a server that loads the whole of a model of which only the text half is trained silently
ignores other names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from errno import EIO
from pathlib import Path
from secrets import token_hex

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from local_gpu.model.lora import Adapter, BaseModel, LoraShape, lora_config, shape_of
from tinker_claw.errors import BackendError, GoneError

_WEIGHTS = "adapter_model.safetensors"
_SETTINGS = "adapter_config.json"
_MOMENTS = "optimizer.safetensors"
_DRAFT = ".draft-"
_TIME = "%Y%m%dT%H%M%S.%f"
_PREFIX = "base_model.model."
"""PEFT's prefix of every tensor name."""


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    name: str
    tensors: Adapter
    shape: LoraShape

    def of(self, shape: LoraShape) -> SavedAdapter:
        """Return this adapter if it has this shape, alpha included.

        Raises:
            BackendError: it has another.
        """
        mine, wanted = self.shape, shape
        if (mine.rank, mine.alpha) != (wanted.rank, wanted.alpha):
            raise BackendError(
                f"{self.name!r} belongs to another rank or alpha: it has rank {mine.rank} "
                f"and alpha {mine.alpha}, and here they are {wanted.rank} and {wanted.alpha}."
            )
        if mine != wanted:
            raise BackendError(
                f"{self.name!r} has {'' if mine.head else 'no '}LoRA on the head, unlike the model "
                "here."
            )
        return self


@dataclass(frozen=True, slots=True)
class SavedState:
    adapter: Adapter
    moments: dict[str, Tensor]
    """`<adapter tensor>.exp_avg`, `.exp_avg_sq` and `.step`; empty before the first step."""
    steps: int


def stamp(folder: Path) -> str:
    """Return a new name that sorts after all in the folder, even if the clock was set back."""
    now = datetime.now(UTC)
    if newest := max(entries(folder), default=None):
        with suppress(ValueError):  # not a name made here
            last = datetime.strptime(newest.partition("-")[0], _TIME).replace(tzinfo=UTC)
            now = max(now, last + timedelta(microseconds=1))
    return f"{now:{_TIME}}-{token_hex(3)}"


def written(name: str) -> float | None:
    """Return the time in a name of `stamp`, in seconds since 1970; None: it is no such name."""
    try:
        time = datetime.strptime(name.partition("-")[0], _TIME)
    except ValueError:
        return None
    return time.replace(tzinfo=UTC).timestamp()


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "state"


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """Yield a draft of a folder, which gets its name only if the block succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=folder.parent))
    try:
        yield draft
        for file in draft.iterdir():
            _sync(file)
        _sync(draft)
        draft.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half written."""
    remove(folder.glob(f"{_DRAFT}*"))


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def write_adapter(folder: Path, base: BaseModel, shape: LoraShape, adapter: Adapter) -> None:
    """Write both files of a PEFT adapter into an existing folder."""
    tensors = {
        _PREFIX + base.name_in_files(name): tensor.contiguous().cpu()
        for name, tensor in adapter.items()
    }
    _write(folder / _WEIGHTS, tensors, {"format": "pt", "base": base.fingerprint})
    lora_config(base, shape).save_pretrained(str(folder))


def export_adapter(folder: Path, base: BaseModel, shape: LoraShape, adapter: Adapter) -> None:
    """Write an adapter for peft into a folder of the user's, replacing one that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as draft:
        write_adapter(Path(draft), base, shape, adapter)
        for file in Path(draft).iterdir():
            _sync(file)
            file.replace(folder / file.name)
    _sync(folder)


def read_adapter(folder: Path, base: BaseModel) -> SavedAdapter:
    """Read a PEFT adapter.

    Raises:
        GoneError: it is missing.
        BackendError: it is corrupt, or was trained on another base model.
    """
    if not (folder / _WEIGHTS).is_file():
        raise GoneError(f"There is no adapter named {folder.name!r} in {folder.parent}.")
    with _sentence(folder):
        tensors, metadata = _read(folder / _WEIGHTS)
        settings = json.loads((folder / _SETTINGS).read_text())
        weights = {base.name_here(n.removeprefix(_PREFIX)): t for n, t in tensors.items()}
        shape = shape_of(base, int(settings["r"]), int(settings["lora_alpha"]), weights)
    if metadata.get("base", base.fingerprint) != base.fingerprint:
        raise BackendError(
            f"The adapter {folder.name!r} was trained on another base model than {base.source!r}."
        )
    return SavedAdapter(folder.name, weights, shape)


def write_state(folder: Path, base: BaseModel, shape: LoraShape, state: SavedState) -> None:
    with new_folder(folder) as draft:
        write_adapter(draft, base, shape, state.adapter)
        write_moments(draft, state)


def write_moments(folder: Path, state: SavedState) -> None:
    """Write the optimizer's file beside an adapter's, into an existing folder."""
    moments = {name: tensor.contiguous().cpu() for name, tensor in state.moments.items()}
    _write(folder / _MOMENTS, moments, {"format": "pt", "steps": str(state.steps)})


def read_state(
    folder: Path, base: BaseModel, shape: LoraShape, *, moments: bool = True
) -> SavedState:
    """Read a state; without `moments` a published adapter is enough.

    Raises BackendError like `read_adapter`, and where the state has another shape.
    """
    if not moments:
        return SavedState(read_adapter(folder, base).of(shape).tensors, {}, 0)
    if not (folder / _MOMENTS).is_file():
        raise BackendError(
            f"There is no saved state named {folder.name!r} in {folder.parent}; it may be older "
            "than the states that are kept."
        )
    adapter = read_adapter(folder, base).of(shape)
    with _sentence(folder):
        tensors, metadata = _read(folder / _MOMENTS)
        return SavedState(adapter.tensors, tensors, int(metadata["steps"]))


def entries(folder: Path) -> list[str]:
    return [p.name for p in folder.glob("*") if not p.name.startswith(".")]


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn a write error of safetensors into the original OSError."""
    try:
        yield
    except SafetensorError as error:  # it gives the errno in its text only
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else EIO, str(error), str(path)) from error


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with writing(path):
        save_file(tensors, path, metadata)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        tensors = {n: file.get_tensor(n) for n in names}
        metadata = dict(file.metadata() or {})
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite")
    return tensors, metadata


@contextmanager
def _sentence(folder: Path) -> Generator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"The files in {folder} are corrupt or incomplete: {error}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
