"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_tokenizer import tokenizer_folder
from tinker_claw.render import Renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Qwen3's chat format over a small tokenizer."""
    folder: Path = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
    return Renderer.load(str(folder), "qwen3")
