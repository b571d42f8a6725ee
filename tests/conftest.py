"""Fixtures that several test files share."""

from __future__ import annotations

import pytest

from local_gpu.demo import MODEL_DIR
from tinker_claw.render import Renderer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """Qwen3's chat format over the shipped tokenizer."""
    return Renderer.load(str(MODEL_DIR), "qwen3")
