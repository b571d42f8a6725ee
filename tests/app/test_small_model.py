"""`--model-name small`: the model that is fetched; a tiny one of its kind stands for it here."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from local_gpu.model.small import QWEN, check_room
from tests.support.lives import life
from tests.support.models import tiny_small
from tests.support.stories import run
from tinker_claw.backends.model_files import absent
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the model in it."""
    root = tmp_path_factory.mktemp("cache")
    tiny_small(root)
    return root


def test_small_answers_from_the_cache(cache: Path, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(cache)}
    flags = ("--model-name", "small", "--context-tokens", "512", "--max-reply-tokens", "8")
    with life(tmp_path / "data", *flags, env=env) as running:
        assert running.serves()
        body = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
        reply = httpx.post(f"{running.url}/chat/completions", json=body, timeout=120).json()
        assert reply["choices"][0]["message"]["role"] == "assistant", reply


def test_doctor_says_what_small_needs_and_fetches_nothing(tmp_path: Path) -> None:
    told = run("doctor", "--model-name", "small", "--backend", "local", "--data-dir",
               str(tmp_path / "data"), XDG_CACHE_HOME=str(tmp_path)).stdout  # fmt: skip
    assert "1.1 GB to fetch" in told
    assert not (tmp_path / "tinker-claw" / QWEN.name).exists()


def test_small_is_refused_at_the_service(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --backend local"):
        load(["--model-name", "small", "--backend", "tinker"])


def test_a_disk_without_room_for_small_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(ConfigError, match="MiB free"):
        check_room(tmp_path)


def test_small_is_no_model_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert absent(load(["--model-name", "small", "--backend", "local"])) == []
