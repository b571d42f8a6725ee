"""A real vLLM serving a tiny model: on this machine's processor, as `make vllm` installs it, or on
a GPU, with a CUDA build of it.

Rule: it runs in a process group of its own, which is gone when the tests are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import torch

from tests.support.ports import free_port

START_S = 600
"""Seconds to start; it takes half a minute on idle processors."""
STOP_S = 30
MAX_LOGPROBS = 20
SEQUENCES = 8
"""Sequences that are sampled at the same time."""
HEAD_DIM = 32
"""Width of attention heads: vLLM's attention on CPU crashes on the tiny model's usual 8."""


@dataclass(frozen=True)
class Numbers:
    """Number format of a server and the trainer, and how far their logprobs may differ."""

    dtype: Literal["float32", "bfloat16"]
    tolerance: float
    """Largest accepted difference of one logprob, in nats; logprobs of the tiny model reach some
    tens."""
    block: int
    """Tokens of a block of the prefix cache."""

    @classmethod
    def of(cls, dtype: str | None) -> Numbers:
        """Numbers of a format; None: the best of this machine's vLLM. On CUDA its LoRA kernels take
        no float32."""
        cuda = torch.cuda.is_available()
        block = 16 if cuda else 128
        if dtype == "float32" or (dtype is None and not cuda):
            return cls("float32", 2e-4, block)
        return cls("bfloat16", 0.3, block)


@contextmanager
def serving(
    environment: Path,
    model: Path,
    log: Path,
    *more: str,
    dtype: str = "float32",
    tokenizer: bool = False,
) -> Iterator[str]:
    """Start vLLM and yield its URL, once it is well.

    Args:
        more: further flags.
        tokenizer: the model has one, without which no image is read.
    """
    port = free_port()
    flags = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "tiny",
        "dtype": dtype,
        "max-loras": 3,
        "max-lora-rank": 8,
        "max-num-seqs": SEQUENCES,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": MAX_LOGPROBS,
        "generation-config": "vllm",
        "scheduling-policy": "priority",
    }
    command = [str(environment / "bin" / "vllm"), "serve", str(model)]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command += ["--enable-lora", "--enforce-eager"]
    command += [] if tokenizer else ["--skip-tokenizer-init"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *more]
    surroundings = os.environ | {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",  # it looks for ninja
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile for 20 s at the first logprobs
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=surroundings, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"vLLM ended while it started: {log.read_text()[-3000:]}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise AssertionError(f"vLLM was not well after {START_S} s: {log.read_text()[-3000:]}")
