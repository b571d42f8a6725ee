"""Trials of a GPU's attention kernels, in a process of their own; the results are kept.

Rule: a kernel that breaks the device, ends its process or never returns harms the trial alone.
Another process then tries those that are left, and no trial is repeated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from local_gpu.config import Say
from local_gpu.tree import fused, kernels
from local_gpu.tree.choice import KERNELS, Heads, fastest
from local_gpu.tree.kernels import Kernel
from tinker_claw.errors import ConfigError

_PATIENCE_S: Final = 600.0
"""Seconds until the next kernel is tried: FlexAttention is compiled for minutes."""


def tried(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    say: Say,
    *,
    kept: Path,
    module: str = "local_gpu.tree.trials",
) -> Kernel:
    """The fastest kernel that agrees with the reference.

    Args:
        kept: the file of earlier results. With another GPU, PyTorch or code all are tried again.
        module: what the process runs.

    Raises:
        ConfigError: none works.
    """
    asked = [str(device), str(dtype), *map(str, astuple(heads))]
    key = ", ".join([_gpu(device), *asked[1:], *_versions()])
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = json.loads(kept.read_text())
    if key not in known:
        known[key] = _verdict([module, *asked])
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known, indent=1))
    for sentence in known[key]["said"]:
        say(sentence)
    return next(kernel for kernel in KERNELS if kernel.name == known[key]["taken"])


def _verdict(command: Sequence[str]) -> dict[str, Any]:
    broken: dict[str, str] = {}
    while True:
        answers: list[dict[str, Any]] = [{}]
        with subprocess.Popen(
            [sys.executable, "-m", *command, *broken],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            answers.extend(_each(process, process.stdout))
        last = answers[-1]
        if "taken" in last:
            return {"taken": last["taken"], "said": [*broken.values(), *last["said"]]}
        name = last.get("trying")
        if name is None or name in broken:
            raise ConfigError(last.get("error") or "No attention kernel could be tried out.")
        how = f"its process ended ({process.returncode})"
        broken[name] = f"Attention by {name} is left out: it broke the device, or {how}."


def _each(process: subprocess.Popen[str], lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    while True:
        timer = threading.Timer(_PATIENCE_S, process.kill)
        timer.start()
        try:
            line = next(lines, None)
        finally:
            timer.cancel()
        if line is None:
            return
        if line.startswith("{"):  # else a library's output on import
            yield json.loads(line)


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _versions() -> Iterator[str]:
    for package in ("torch", "triton", "flash-attn-3"):
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"
    code = b"".join(
        Path(module.__file__).read_bytes() for module in (fused, kernels) if module.__file__
    )
    yield sha256(code).hexdigest()[:16]


def main(of: Sequence[Kernel] = KERNELS) -> None:
    """Try all but those named; report on stdout which one is being tried, and the results."""
    device, dtype, *rest = sys.argv[1:]
    heads, broken = Heads(*map(int, rest[:3])), rest[3:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def told(**answer: Any) -> None:
        print(json.dumps(answer), file=answers)

    def each() -> Iterator[Kernel]:
        for kernel in of:
            if kernel.name not in broken:
                told(trying=kernel.name)
                yield kernel

    said: list[str] = []
    kind = getattr(torch, dtype.removeprefix("torch."))
    try:
        taken = fastest(each(), torch.device(device), kind, heads, said.append)
    except ConfigError as error:
        told(error=str(error))
    else:
        told(taken=taken.name, said=said)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
