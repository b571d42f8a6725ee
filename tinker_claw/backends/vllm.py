"""The vLLM that is installed on this machine, in an environment of its own."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

VLLM = Path(".venv-vllm") / "bin" / "vllm"
GET_VLLM = (
    "vLLM is put into an environment of its own: python3.11 -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm==0.32.0"
)


def find_vllm() -> Path | None:
    """The executable of vLLM: in an environment of its own here, else on PATH."""
    executable = shutil.which(VLLM) or shutil.which("vllm")
    return Path(executable).absolute() if executable else None


def no_compiler(path: str | None = None, headers: Path | None = None) -> str | None:
    """Name the build tools for Triton's and vLLM's kernels that are missing; None if none are.

    Args:
        path: where programs are looked for; None: PATH.
        headers: of this Python; None: where it has them.
    """
    headers = headers or Path(sysconfig.get_paths()["include"])
    compiler = any(shutil.which(name, path=path) for name in ("cc", "gcc", "clang"))
    missing = [] if compiler else ["a C compiler (gcc)"]
    if not (headers / "Python.h").exists():
        missing.append(f"Python's headers ({headers / 'Python.h'})")
    return " and ".join(missing) or None
