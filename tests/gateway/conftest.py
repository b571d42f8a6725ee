"""The gateway that most tests of a module need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateways import World, gateway
from tinker_claw.render.renderer import Renderer


@pytest.fixture
async def world(
    tmp_path: Path, renderer: Renderer, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    """A gateway with the module's SETTINGS, where it has some."""
    settings = getattr(request.module, "SETTINGS", {})
    async with gateway(tmp_path, renderer, **settings) as world:
        yield world
