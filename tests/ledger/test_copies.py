"""A copy of the ledger that is made while the gateway writes it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.gateways import gateway
from tinker_claw.ledger.database import FILE
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.render.renderer import Renderer


def by_program(ledger: Path, copy: Path) -> None:
    """Copy as docs/operating.md says."""
    if shutil.which("sqlite3") is None:
        pytest.skip("sqlite3 is not there")
    subprocess.run(["sqlite3", str(ledger), f".backup {copy}"], check=True)


def by_python(ledger: Path, copy: Path) -> None:
    with closing(sqlite3.connect(ledger)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target, pages=10)


@pytest.mark.parametrize("copy", [by_program, by_python])
async def test_a_copy_made_while_the_gateway_writes_opens(
    copy: Callable[[Path, Path], None], tmp_path: Path, renderer: Renderer
) -> None:
    there = tmp_path / "copy"
    there.mkdir()
    async with gateway(tmp_path / "run", renderer) as world:
        for number in range(20):
            assert (await world.ask(f"before {number}")).status_code == 200
        copying = asyncio.create_task(asyncio.to_thread(copy, world.ledger.path, there / FILE))
        written = 0
        while not copying.done():
            written += (await world.ask(f"meanwhile {written}")).status_code == 200
        await copying
        assert (await world.ask("after")).status_code == 200
    assert 20 <= read_overview(there, 16)["turns"]["main"] <= 20 + written
    with closing(Ledger(there)) as ledger:
        assert ledger.turns.get(20)
