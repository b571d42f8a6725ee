"""Samplers of explicitly named policy versions (`model@v8`), opened on demand."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from tinker_claw.ledger import Ledger
from tinker_claw.policy import Sampler, Trainer

MOST_OPEN = 4
"""Each holds an engine with its own KV cache; the one unused longest is closed."""


class Versions:
    """Opens a version's sampler once, and keeps a few."""

    def __init__(self, ledger: Ledger, trainer: Trainer) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._open: OrderedDict[int, Sampler] = OrderedDict()
        self._opening = asyncio.Lock()

    async def open(self, version_id: int) -> Sampler:
        """The sampler of a version.

        Raises:
            KeyError: there is no such version.
            BackendError: its weights cannot be opened.
        """
        unused: Sampler | None = None
        async with self._opening:
            if version_id not in self._open:
                version = self._ledger.steps.version(version_id)
                if version is None:
                    raise KeyError(version_id)
                self._open[version_id] = await self._trainer.open(version.sampler_ref)
                if len(self._open) > MOST_OPEN:
                    _, unused = self._open.popitem(last=False)
            self._open.move_to_end(version_id)
            sampler = self._open[version_id]
        if unused is not None:
            await unused.aclose()  # when its last reply has ended; others open theirs meanwhile
        return sampler

    async def aclose(self) -> None:
        for sampler in self._open.values():
            await sampler.aclose()
        self._open.clear()
