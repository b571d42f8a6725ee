"""Install tinker-cookbook into an environment of its own: `make cookbook`.

Rule: what is installed stands in tests/cookbook.txt, with hashes, and nothing else but torch's CPU
build. pip cannot resolve tinker-cookbook by itself: it asks for a tml-renderers that PyPI does not
have, which only renderers of other models than ours import.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from tests.lab.install_vllm import READY, Failed, install_torch, pip

WANTED = Path(__file__).with_name("cookbook.txt")


def main(folder: Path) -> None:
    if (folder / READY).exists() and (folder / READY).read_text() == WANTED.read_text():
        return print(f"{folder}: tinker-cookbook is installed")
    if sys.platform != "linux":
        raise SystemExit("tests/cookbook.txt has hashes of wheels for Linux only")
    print(f"{folder}: installing tinker-cookbook, about 1.6 GB; this takes some minutes")
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    install_torch(folder)
    pip(folder, "--no-deps", "--require-hashes", "-r", str(WANTED))
    check = [folder / "bin" / "python", "-c", "import tinker_cookbook.rl.train"]
    done = subprocess.run(check, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"tinker-cookbook is installed and does not start:\n{done.stderr.strip()}")
    (folder / READY).write_text(WANTED.read_text())
    print(f"{folder}: ready. Its tests: make test-cookbook")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-cookbook"))
    except Failed as error:
        raise SystemExit(str(error)) from error
