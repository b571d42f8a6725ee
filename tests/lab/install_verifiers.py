"""Install verifiers into an environment of its own: `make verifiers`.

Rule: what is installed stands in tests/verifiers.txt, with hashes, and nothing else. What its
harnesses run they install by themselves, with uv, when they first start: that is not pinned here.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from tests.lab.install_vllm import READY, Failed, pip

WANTED = Path(__file__).with_name("verifiers.txt")


def main(folder: Path) -> None:
    if (folder / READY).exists() and (folder / READY).read_text() == WANTED.read_text():
        return print(f"{folder}: verifiers is installed")
    if sys.platform != "linux":
        raise SystemExit("tests/verifiers.txt has hashes of wheels for Linux only")
    print(f"{folder}: installing verifiers, about 0.6 GB; this takes some minutes")
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pip(folder, "--no-deps", "--require-hashes", "-r", str(WANTED))
    check = [folder / "bin" / "python", "-c", "import verifiers.v1"]
    done = subprocess.run(check, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"verifiers is installed and does not start:\n{done.stderr.strip()}")
    (folder / READY).write_text(WANTED.read_text())
    print(f"{folder}: ready. Its tests: make test-verifiers")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-verifiers"))
    except Failed as error:
        raise SystemExit(str(error)) from error
