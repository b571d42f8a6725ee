"""The server of Qwen2.5-Coder-1.5B-Instruct as a judge."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from local_gpu.model.gguf_file import NotHere
from local_gpu.model.small import ready

JUDGE: Final = "qwen2.5-coder-1.5b"
"""Name by which it is asked."""
SERVES: Final = ".venv-judge"
"""Environment that has xllamacpp."""


@contextmanager
def served(cache: Path) -> Generator[str]:
    """Serve the real model while the context lasts; yields its address.

    Raises:
        NotHere: the model, or what serves it, is not there.
    """
    model, python = ready(cache), Path(SERVES) / "bin" / "python"
    if not python.exists():
        raise NotHere("What serves the model is not installed: `make judge` does that.")
    program = Path(__file__).with_name("serve.py")
    with subprocess.Popen(
        [python, program, model], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            if not url:
                raise NotHere(f"The model did not start: {python} {program} {model} says why.")
            print(f"Qwen2.5-Coder-1.5B-Instruct answers at {url}")
            yield url
        finally:
            server.terminate()
