"""schemathesis, a fuzzer by others, drives the documented routes from their description."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.api_description import description
from tests.support.environments import installed
from tests.support.gateways import gateway
from tinker_claw.render.renderer import Renderer

VERSION = "schemathesis==4.32.5"
EXAMPLES = 50
"""Requests per route, besides those at the bounds of each field."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
"""Checks to run. Not positive_data_acceptance: to a schema 1.0 is an integer, to this server it is
not."""
STUCK_S = 60

pytestmark = pytest.mark.slow


async def test_documented_routes_answer_or_say_why_not(tmp_path: Path, renderer: Renderer) -> None:
    programs = await asyncio.to_thread(installed, "schemathesis", VERSION)
    async with gateway(tmp_path / "data", renderer) as world:
        url = world.url.removesuffix("/v1")
        (tmp_path / "api.json").write_text(json.dumps(description(url)))
        driver = await asyncio.create_subprocess_exec(
            *(programs / "schemathesis", "run", "api.json", "--url", url),
            *("--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
            *("--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", str(STUCK_S)),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await driver.communicate()
        answered = world.column("id")
    assert driver.returncode == 0, said.decode()[-5000:]
    assert answered
