"""Install tinker-cookbook into an environment of its own: `make cookbook`.

Rule: what is installed stands in tests/lab/cookbook.txt, with hashes, and nothing else but torch's
CPU build. pip cannot resolve tinker-cookbook by itself: it asks for a tml-renderers that PyPI does
not have, which only renderers of other models than ours import.
"""

from __future__ import annotations

from pathlib import Path

from tests.lab.install_vllm import install_listed, run


def main(folder: Path) -> None:
    what = "tinker-cookbook, about 1.6 GB"
    install_listed(folder, "cookbook", what, "tinker_cookbook.rl.train", torch=True)


if __name__ == "__main__":
    run(main, ".venv-cookbook")
