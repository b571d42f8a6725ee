"""Install verifiers into an environment of its own: `make verifiers`.

Rule: what is installed stands in tests/lab/verifiers.txt, with hashes, and nothing else. What its
harnesses run they install by themselves, with uv, when they first start: that is not pinned here.
"""

from __future__ import annotations

from pathlib import Path

from tests.lab.install_vllm import install_listed, run


def main(folder: Path) -> None:
    install_listed(folder, "verifiers", "verifiers, about 0.6 GB", "verifiers.v1")


if __name__ == "__main__":
    run(main, ".venv-verifiers")
