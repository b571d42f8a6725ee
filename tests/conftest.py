"""Fixtures that several test files share."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from local_gpu.demo import MODEL_DIR
from tinker_claw.policy import Trainer
from tinker_claw.render import Renderer

if TYPE_CHECKING:
    from backends import Backend
    from contract import Ground


# A shell starts background jobs deaf to Ctrl-C, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=20, help="how often the torture test kills the product"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `backend`, or for a trainer on one, runs on every backend."""
    if "backend" in metafunc.fixturenames:
        from backends import BACKENDS  # torch; most tests need none

        metafunc.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture
async def trainer(backend: Backend, tmp_path: Path) -> AsyncIterator[Trainer]:
    trainer = await backend.start(tmp_path)
    yield trainer
    await trainer.aclose()


@pytest.fixture
async def ground(backend: Backend, trainer: Trainer) -> Ground:
    from contract import Ground

    return await Ground.prepare(backend, trainer)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """Qwen3's chat format over the shipped tokenizer."""
    return Renderer.load(str(MODEL_DIR), "qwen3")


@pytest.fixture(autouse=True)
def close_servers() -> Iterator[None]:
    """Stop the wire servers that a test has started, after its trainers are closed."""
    yield
    if "tinkers" in sys.modules:
        sys.modules["tinkers"].stop_all()
