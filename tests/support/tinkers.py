"""The Tinker backend for tests: the real adapter and SDK against our wire server over HTTP.

Rule: one server per folder and test; starting a trainer again on the same folder is a restart of
the client, `Served.restart` one of the server. A fixture of conftest.py stops them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.faults import Faulty
from tests.support.wire_servers import KEY, NAME, TinkerServer, wire_server
from tinker_claw.backends.tinker.trainer import ServiceLimits, TinkerTrainer
from tinker_claw.config.settings import Run, Settings, Training

_running: dict[Path, Served] = {}


class Served:
    """A server at one address that can misbehave and be restarted."""

    def __init__(
        self, folder: Path, speaking: Callable[[Any], Any] = lambda app: app, **settings: Any
    ) -> None:
        """`speaking` wraps the application, for a server that deviates from the API."""
        self.folder = folder
        self._speaking = speaking
        self._settings = settings
        self._stack = ExitStack()
        self.server: TinkerServer
        self.faulty: Faulty
        self._start(port=0)

    def _start(self, port: int) -> None:
        def around(app: Any) -> Faulty:
            self.faulty = Faulty(self._speaking(app))
            return self.faulty

        self.server = self._stack.enter_context(
            wire_server(self.folder, around=around, port=port, **self._settings)
        )

    @property
    def url(self) -> str:
        return self.server.url

    def stop(self) -> None:
        self._stack.close()

    def restart(self) -> None:
        """Restart the server: sessions, futures and gradients are gone; checkpoints stay."""
        port = int(self.url.rsplit(":", 1)[1])
        self.stop()
        self._start(port)


def served(folder: Path, **settings: Any) -> Served:
    """Server of this folder, started if there is none."""
    if folder not in _running:
        _running[folder] = Served(folder, **settings)
    return _running[folder]


async def start_tinker(
    folder: Path,
    *,
    alpha: int = 8,
    server: dict[str, Any] | None = None,
    rank: int = 4,
    context_tokens: int | None = None,
    **limits: Any,
) -> TinkerTrainer:
    """Start a trainer over the server of this folder."""
    options = {"root": folder / "served", "alpha": alpha, **(server or {})}
    there = await asyncio.to_thread(lambda: served(folder, **options))
    asked = settings(base_url=there.url, rank=rank, context_tokens=context_tokens)
    return await TinkerTrainer.start(asked, ServiceLimits(**limits), key=KEY)


def settings(
    model: str = NAME,
    *,
    base_url: str | None = None,
    rank: int = 32,
    context_tokens: int | None = None,
) -> Settings:
    """Settings that the adapter reads."""
    run = Run(model_name=model, base_url=base_url, context_tokens=context_tokens)
    return Settings(run=run, training=Training(lora_rank=rank))


def stop_all() -> None:
    """Stop every server that was started."""
    while _running:
        _, there = _running.popitem()
        there.stop()
