"""Programs for comparison are installed from pinned files, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import litellm_proxy

ROOT = Path(__file__).parents[2]


def test_every_file_of_litellm_is_pinned_by_hash_and_none_is_a_dependency() -> None:
    text = (ROOT / "benchmarks" / "litellm.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    packages = [line for line in lines if not line.startswith(" ")]
    assert any(line.startswith("litellm==") for line in packages)
    for at, line in enumerate(lines):
        if not line.startswith(" "):
            assert "==" in line
            assert lines[at + 1].startswith("    --hash=sha256:")
    assert "litellm" not in (ROOT / "pyproject.toml").read_text()
    assert "litellm" not in (ROOT / "constraints.txt").read_text()


@pytest.mark.slow
def test_a_file_with_another_hash_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text(f"six==1.17.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(litellm_proxy, "_PINS", pins)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    for _ in range(2):  # what was begun is not taken for done
        assert litellm_proxy.install(said.append) is None
    assert "cannot be installed here" in said[-1]
    assert "HASHES" in said[-1]
    assert not list(tmp_path.glob("*/*/lib/*/site-packages/six.py"))
