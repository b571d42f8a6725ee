"""`python -m benchmarks.sampler`: the embedded sampler beside `generate` of transformers.

Both draw the same number of tokens for the same prompts at once: ours with an adapter beside the
weights, theirs with the adapter added to them. They take turns, so that other load on the machine
hits both; processor seconds leave out waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.training_report import screen
from benchmarks.training_shapes import FIRST_ID
from local_gpu.config import LocalConfig
from local_gpu.model.export import export_merged
from local_gpu.trainer import LocalTrainer
from tinker_claw import shipped
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Taken:
    """Times of one turn of one side."""

    wall: float
    """Wall-clock time in seconds."""
    cpu: float
    """Processor time of all threads of the process, in seconds."""


def timed(call: Callable[[], object]) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


async def ours(sampler: Sampler, prompts: Prompts, new_tokens: int) -> Taken:
    """Sample with our streams, as the gateway reads them, with the top-k logprobs that distillation
    wants."""
    params = SamplingParams(max_tokens=new_tokens, student_topk=4)

    async def one(prompt: tuple[int, ...]) -> None:
        async with aclosing(sampler.stream(prompt, params)) as chunks:  # pyright: ignore
            async for _ in chunks:
                pass

    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def theirs(folder: Path, prompts: Prompts, new_tokens: int) -> Callable[[], object]:
    """Sample with `generate`, drawing at temperature 1, never ending early."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    options = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "pad_token_id": 0,
    }

    def generate() -> object:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return generate


async def measure(
    config: LocalConfig, prompts: Prompts, new_tokens: int, turns: int
) -> dict[str, list[Taken]]:
    """Time turns of `generate` and of our adapter in rotation, after a warm-up turn each."""
    trainer = await LocalTrainer.start(config)
    try:
        # One step, so that the adapter is not zero.
        datum = Datum(prompts[0], 1, weights=((1.0,),) * (len(prompts[0]) - 1))
        await trainer.train_step([LossPass("cross_entropy", (datum,))], Adam(1e-3))
        version = await trainer.publish()
        merged = config.root / "merged"
        export_merged(config.model, config.root / "adapters" / version.ref, merged)
        generate = theirs(merged, prompts, new_tokens)
        found: dict[str, list[Taken]] = {"generate, merged": [], "adapter": []}
        for turn in range(turns + 1):
            one = {
                "generate, merged": timed(generate),
                "adapter": await ours(version, prompts, new_tokens),
            }
            for name, taken in one.items():
                if turn:
                    found[name].append(taken)
        return found
    finally:
        await trainer.aclose()


def main() -> int:
    """Read flags, measure, print."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.sampler", description=__doc__)
    made.add_argument("--model", default=str(shipped.MODEL_DIR), help="folder (the demo's)")
    made.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    made.add_argument("--rank", type=int, default=16, help="of the adapter (default 16)")
    made.add_argument("--batch", type=int, default=8, help="replies at once (default 8)")
    made.add_argument("--prompt", type=int, default=80, help="tokens of a prompt (default 80)")
    made.add_argument("--new-tokens", type=int, default=64, help="of a reply (default 64)")
    made.add_argument("--turns", type=int, default=5, help="of each side (default 5)")
    asked, rng = made.parse_args(), random.Random(0)
    tokens = json.loads((Path(asked.model) / "config.json").read_text())["vocab_size"]
    prompts = [
        tuple(rng.randrange(FIRST_ID, tokens) for _ in range(asked.prompt))
        for _ in range(asked.batch)
    ]
    with tempfile.TemporaryDirectory() as root:
        config = LocalConfig(
            model=asked.model,
            root=Path(root),
            threads=asked.threads,
            rank=asked.rank,
            alpha=asked.rank,
            context_tokens=asked.batch * (asked.prompt + asked.new_tokens),
            device="cpu",
        )
        found = asyncio.run(measure(config, prompts, asked.new_tokens, asked.turns))
    drawn = asked.batch * asked.new_tokens
    heads = ("side", "tok/s", "CPU ms a pass", "times generate", "by CPU", "least", "most")
    table = Table(*heads)
    usual = found["generate, merged"]
    for name, taken in found.items():
        wall, cpu = (
            [getattr(a, what) / getattr(b, what) for a, b in zip(usual, taken, strict=True)]
            for what in ("wall", "cpu")
        )
        table.add_row(
            name,
            f"{drawn / statistics.median(one.wall for one in taken):.1f}",
            f"{1000 * statistics.median(one.cpu for one in taken) / asked.new_tokens:.0f}",
            f"{statistics.median(wall):.2f}",
            f"{statistics.median(cpu):.2f}",
            f"{min(cpu):.2f}",
            f"{max(cpu):.2f}",
        )
    screen().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
