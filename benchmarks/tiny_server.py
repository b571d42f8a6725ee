"""Run our wire server as a process, with a random model small enough for a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

NAME = "tiny"
VOCABULARY = 4096


@contextmanager
def server(folder: Path, context_tokens: int, threads: int) -> Generator[str]:
    """Run `python -m local_gpu.tinker` with a random model of two layers; yields its address."""
    model = folder / "models" / "tiny"
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(model)
    command = [sys.executable, "-m", "local_gpu.tinker", "--port", "0", "--name", NAME]
    command += ["--model", str(model), "--root", str(folder / "served")]
    alone = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=alone, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving "):
                raise RuntimeError("the wire server did not start; it says why above")
            yield line.split(" at ")[1].split()[0]
        finally:
            process.terminate()
            process.wait(60)
