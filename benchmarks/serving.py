"""`python -m benchmarks.serving`: how replies feel while the model learns.

Streams ask without a pause: alone, during training steps, and during publications. Every second
step is beside streams that are not people's, which get no priority. Time to the first token, time
per token, and how long a publication takes to answer. Failed requests must be none.

Rule: one process trains, as in the gateway; sampling is by the embedded sampler, or by the servers
of `--sampler-urls`, which run already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.serving_run import PHASES, Load, Published, Traffic, quantile, run
from benchmarks.training_report import screen
from benchmarks.training_shapes import PRESETS, save
from local_gpu.config import LocalConfig
from local_gpu.trainer import LocalTrainer
from tinker_claw import shipped
from tinker_claw.errors import ClawError

FIRST_GOAL = 1.6
STEP_GOAL = 1.5


async def measure(config: LocalConfig, load: Load) -> tuple[Traffic, list[Published]]:
    """Start a trainer, and serve while it learns."""
    trainer = await LocalTrainer.start(config)
    try:
        return await run(trainer, load)
    finally:
        await trainer.aclose()


def show(traffic: Traffic, published: list[Published], console: Console) -> None:
    """Print both tables, and the failures."""
    table = Table("phase", "s", "requests", "failed", "first token ms p50", "p95", "token ms p50")
    table.add_column("p95")
    table.add_column("tok/s")
    for phase in PHASES:
        seen = traffic.figures[phase]
        times = [_ms(quantile(v, s)) for v in (seen.first, seen.each) for s in (0.5, 0.95)]
        counts = (f"{seen.seconds:.1f}", str(seen.requests), str(seen.failed))
        table.add_row(phase, *counts, *times, f"{seen.tokens_per_s:,.0f}")
    console.print(table)
    versions = Table("version", "room for persons", "step s", "publish ms", "its first token ms")
    for number, one in enumerate(published, 1):
        row = (
            "yes" if one.persons else "no",
            f"{one.step:.2f}",
            _ms(one.publish),
            _ms(one.first_token),
        )
        versions.add_row(str(number), *row)
    console.print(versions)
    if published:
        firsts = {phase: quantile(traffic.figures[phase].first, 0.95) or 0.0 for phase in PHASES}
        alone = firsts["alone"] or math.inf
        steps = [
            median(one.step for one in published if one.persons is room) for room in (True, False)
        ]
        console.print(
            f"first token p95 during a step: {firsts['step'] / alone:.1f} times alone (goal "
            f"{FIRST_GOAL}), {firsts['step beside nobody'] / alone:.1f} where no room is made; a "
            f"step that makes room takes {steps[0] / steps[1]:.2f} times as long (goal "
            f"{STEP_GOAL}); load {os.getloadavg()[0]:.0f}"
        )
    for failure in sorted(set(traffic.failures)):
        console.print(f"failed: {failure}", style="red")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"


def document(traffic: Traffic, published: list[Published]) -> dict[str, Any]:
    """All figures as JSON."""
    phases = {
        phase: {
            "seconds": seen.seconds,
            "requests": seen.requests,
            "failed": seen.failed,
            "tokens_per_s": seen.tokens_per_s,
            "first_token_s": {"p50": quantile(seen.first, 0.5), "p95": quantile(seen.first, 0.95)},
            "token_s": {"p50": quantile(seen.each, 0.5), "p95": quantile(seen.each, 0.95)},
        }
        for phase, seen in traffic.figures.items()
    }
    return {"phases": phases, "published": [asdict(one) for one in published]}


def parser() -> argparse.ArgumentParser:
    """Command line of the benchmark."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    made.add_argument("--model", help="folder or hub id (the demo's unless given)")
    made.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="random weights of that shape, written to --folder",
    )
    made.add_argument("--folder", type=Path, help="where they are written, or lie already")
    made.add_argument("--write-only", action="store_true", help="write them, and end")
    made.add_argument("--sampler-urls", nargs="*", default=[], help="servers that sample")
    made.add_argument("--device", default="auto", help="of the trainer")
    made.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    made.add_argument("--rank", type=int, default=32, help="of the adapter (default 32)")
    made.add_argument("--context-tokens", type=int, help="the model's unless given")
    made.add_argument("--streams", type=int, default=4, help="at the same time (default 4)")
    made.add_argument("--shared", type=int, default=1000, help="tokens that prompts begin with")
    made.add_argument("--own", type=int, default=100, help="tokens behind them")
    made.add_argument("--new-tokens", type=int, default=48, help="sampled by a request")
    made.add_argument("--seconds", type=float, default=4.0, help="alone, before each step")
    made.add_argument(
        "--steps", type=int, default=3, help="that make room, and as many that do not"
    )
    made.add_argument("--samples", type=int, default=16, help="of a step")
    made.add_argument("--json", type=Path, help="write the figures here, too")
    return made


def main() -> int:
    """Read flags, measure, print. Returns 1 if a request failed."""
    arguments, console = parser().parse_args(), screen()
    if arguments.preset and not arguments.folder:
        console.print("--preset needs --folder: where the random weights are to lie.", style="red")
        return 2
    if arguments.preset and not (arguments.folder / "config.json").exists():
        where = "cuda" if torch.cuda.is_available() else "cpu"
        save(PRESETS[arguments.preset].shape, arguments.folder, torch.device(where))
    if arguments.write_only:
        return 0
    model = str(arguments.folder if arguments.preset else arguments.model or shipped.MODEL_DIR)
    vocabulary = int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    load = Load(
        streams=arguments.streams,
        shared=arguments.shared,
        own=arguments.own,
        new_tokens=arguments.new_tokens,
        seconds=arguments.seconds,
        steps=arguments.steps,
        samples=arguments.samples,
        vocabulary=vocabulary,
    )
    with tempfile.TemporaryDirectory() as root:
        config = LocalConfig(
            model=model,
            root=Path(root),
            device=arguments.device,
            threads=arguments.threads,
            rank=arguments.rank,
            alpha=arguments.rank,
            context_tokens=arguments.context_tokens,
            sampler_urls=tuple(arguments.sampler_urls),
        )
        try:
            traffic, published = asyncio.run(measure(config, load))
        except ClawError as error:
            console.print(str(error), style="red")
            return 2
    show(traffic, published, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(document(traffic, published), indent=2) + "\n")
    return 1 if traffic.failures else 0


if __name__ == "__main__":
    sys.exit(main())
