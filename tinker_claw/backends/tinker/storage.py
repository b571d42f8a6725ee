"""Checkpoints stored at the service: name them, download them, and delete the oldest.

Rule: a path is the service's opaque name for a checkpoint and is never parsed. Nothing that serves,
or that training would go back to, is ever deleted.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from urllib.parse import quote

import httpx
import tinker

from tinker_claw.backends.tinker.session import Address, rest_client
from tinker_claw.errors import BackendError
from tinker_claw.policy import to_keep
from tinker_claw.telemetry import log

_DELETE_S = 30.0
_REST_S = 60.0
"""Timeout of one request."""
_DOWNLOAD_S = 1800.0
"""Timeout of downloading all files of an export."""


def unused_name(name: str) -> str:
    """A name that sorts by time and was never used before."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "state"
    return f"{slug}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{token_hex(4)}"


class Shelf:
    """The checkpoints of one kind that this process has written; those of `policy.to_keep` stay.

    Storage is billed by the month, and a state with its optimizer is three times its weights.
    """

    def __init__(self, address: Address, keep: int, spare: Callable[[str], bool]) -> None:
        """`keep`: how many of the newest stay."""
        self._address = address
        self._keep = keep
        self._spare = spare
        self._runs: dict[str, str] = {}
        """The training run that wrote each path."""
        self._written: dict[str, float] = {}
        """When each path was written."""

    async def add(self, run: str, path: str) -> None:
        """Add a new checkpoint, and delete those that need not stay.

        Raises:
            BackendError: there is one with that path, which now has other weights.
        """
        if path in self._runs:
            raise BackendError(
                f"Tinker gave the path {path!r} to two checkpoints; a version could change while "
                "it serves, so this server cannot be used."
            )
        self._runs[path], self._written[path] = run, time.time()
        stays = to_keep(self._written, self._keep)
        await self.drop([stored for stored in self._runs if stored not in stays])

    async def drop(self, paths: Sequence[str]) -> None:
        """Delete these checkpoints, except those in use. A failed deletion is not retried."""
        for path in paths:
            if path in self._runs and not self._spare(path):
                del self._written[path]
                await self._delete(self._runs.pop(path), path)

    async def _delete(self, run: str, path: str) -> None:
        try:
            async with asyncio.timeout(_DELETE_S):
                client = await rest_client(self._address)
                listed = (await client.list_checkpoints(run).result_async()).checkpoints
                # Take the id from the service: one that we made out of a path could be another
                # checkpoint's.
                ids = [entry.checkpoint_id for entry in listed if entry.tinker_path == path]
                if len(ids) != 1:
                    log.warning("checkpoint.kept", path=path, error=f"listed {len(ids)} times")
                    return
                await client.delete_checkpoint(_in_url(run), _in_url(ids[0])).result_async()
        except (tinker.TinkerError, TimeoutError, ValueError, RuntimeError) as error:
            # It costs a little storage, and no more; the step it belongs to is long over.
            log.warning("checkpoint.kept", path=path, error=type(error).__name__)


def _in_url(name: str) -> str:
    """Raises ValueError for a name that would lead elsewhere in an address."""
    if {".", "..", ""} & set(name.split("/")):
        raise ValueError("a name of dots")
    return quote(name, safe="/:=+")  # the SDK does not quote it


async def download(address: Address, path: str, folder: Path) -> None:
    """Fetch the files of an exported checkpoint into a folder, which is the caller's draft.

    Raises:
        BackendError: the service names no files, or one of them cannot be downloaded.
    """
    async with asyncio.timeout(_REST_S):
        client = await rest_client(address)
        archive = await client.get_external_weights_urls(path).result_async()
    if not archive.urls:
        raise BackendError(f"Tinker exported no files for {path}.")
    targets = _targets(folder, list(archive.urls))
    async with (
        asyncio.timeout(_DOWNLOAD_S),
        httpx.AsyncClient(timeout=_REST_S, follow_redirects=True) as web,
    ):
        for url, target in zip(archive.urls.values(), targets, strict=True):
            await _fetch(web, url, target)


def _targets(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files' paths and make their folders; refuse a name that leads outside."""
    folder.mkdir(parents=True, exist_ok=True)
    root = folder.resolve()
    targets = [(root / name).resolve() for name in names]
    for name, target in zip(names, targets, strict=True):
        if not target.is_relative_to(root):
            raise BackendError(f"Tinker names a file outside the export: {name!r}.")
        target.parent.mkdir(parents=True, exist_ok=True)
    return targets


async def _fetch(web: httpx.AsyncClient, url: str, file: Path) -> None:
    try:
        async with web.stream("GET", url) as answer:
            answer.raise_for_status()
            with file.open("wb") as out:
                async for piece in answer.aiter_bytes():
                    out.write(piece)
    except httpx.HTTPError as error:
        raise BackendError(
            f"A file of the export cannot be downloaded: {type(error).__name__}."
        ) from error
