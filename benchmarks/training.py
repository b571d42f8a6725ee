"""`python -m benchmarks.training`: steps of the local backend beside peft's.

Random weights of a preset's shape, LoRA on every linear layer. A case is one clipped-ratio step:
over a batch whose samples share a long prefix, over one whose samples share nothing, and over one
long sample. Peers get their best setting; of ours, the parts are switched off one by one. Gradients
of every side are compared with a reference of higher precision.

Rule: all sides run in one process on the same samples, in turn; a figure is a median. Nothing here
is asserted: tests do not measure time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.smoke import grown_adapter, random_base
from benchmarks.training_peers import LossRows, Padded
from benchmarks.training_reference import true_gradients
from benchmarks.training_report import OURS, Figures, document, screen, show
from benchmarks.training_run import Make, Measurement, Say
from benchmarks.training_shapes import PRESETS, Preset, batches
from benchmarks.training_sides import Ours, Settings
from benchmarks.training_work import ceiling
from local_gpu.model.load import keep_memory_whole
from local_gpu.model.lora import LoraShape
from local_gpu.tree.choice import Heads, choose
from tinker_claw.errors import ConfigError

SIDES = {
    "ours": OURS,
    "tree-off": "ours, prefixes not shared",
    "packing-off": "ours, one at a time",
    "head-off": "ours, head everywhere",
    "peft": "peft, one padded batch",
    "peft-1": "peft, one at a time",
    "peft-rows": "peft, logits of the loss",
}
_PASS_TOKENS = 65_536
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    """Settings of one run. `compared`: samples whose gradients are compared; None compares all."""

    preset: Preset
    device: torch.device
    dtype: torch.dtype
    reference: torch.dtype
    compared: int | None
    rank: int = 32
    repeat: int = 3
    attention: str | None = None
    cases: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


def measure(options: Options, say: Say) -> Figures:
    """Build the model, then run every case with every side."""
    sizes = options.preset.batches
    context = max(sizes.shared + sizes.own, sizes.lengths[1], sizes.long)
    shape = options.preset.shape
    base = random_base(shape, context=context, device=options.device, dtype=options.dtype)
    say("the ceiling: large matrix products")
    top = ceiling(options.device, options.dtype)
    lora = LoraShape(options.rank, options.rank)
    kernel = choose(
        device=options.device,
        dtype=options.dtype,
        heads=Heads.of(base.module.config),
        say=say,
        only=options.attention,
    )
    settings = Settings(
        base=base,
        lora=lora,
        adapter=grown_adapter(base, lora),
        checkpointing=options.device.type == "cuda",
        pass_tokens=_PASS_TOKENS,
        kernel=kernel,
    )
    wanted = {
        name: datums
        for name, datums in batches(options.preset).items()
        if not options.cases or name in options.cases
    }
    truths = {}
    for name, datums in wanted.items():
        say(f"{name}: gradients of the reference")
        compared = datums[: options.compared]
        truths[name] = (compared, true_gradients(settings, compared, options.reference))
    run = Measurement(
        settings,
        shape,
        _sides(settings, options.only),
        repeat=options.repeat,
        ceiling=top,
        say=say,
    )
    return Figures(
        device=_device_name(options.device),
        device_kind=options.device.type,
        dtype=str(options.dtype).removeprefix("torch."),
        torch=torch.__version__,
        attention=kernel.name,
        threads=torch.get_num_threads(),
        parameters=sum(p.numel() for p in base.module.parameters()),
        ceiling=top,
        cases={name: run.case(name, wanted[name], truths[name]) for name in wanted},
    )


def _sides(settings: Settings, only: tuple[str, ...]) -> dict[str, Make]:
    """Constructors of the sides, by the name that is shown."""
    ours = functools.partial(Ours, settings=settings)
    make: Mapping[str, Any] = {
        "ours": ours,
        "tree-off": functools.partial(ours, share=False),
        "packing-off": functools.partial(ours, pack=False),
        "head-off": functools.partial(ours, all_rows=True),
        "peft": functools.partial(Padded, settings=settings, rows=None),
        "peft-1": functools.partial(Padded, settings=settings, rows=1),
        "peft-rows": functools.partial(LossRows, settings=settings),
    }
    return {
        label: functools.partial(make[name], label)
        for name, label in SIDES.items()
        if not only or name in only
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def parser() -> argparse.ArgumentParser:
    """Command line of the benchmark."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    flags.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    flags.add_argument("--device", default="auto", help="auto takes CUDA where there is one")
    flags.add_argument("--repeat", type=int, default=3, help="measured steps (default 3)")
    flags.add_argument("--case", action="append", choices=["shared", "unshared", "long"])
    flags.add_argument("--only", action="append", choices=sorted(SIDES), help="a side; repeatable")
    flags.add_argument(
        "--attention",
        choices=["fa3", "merged", "sdpa"],
        help="kernel of ours (the first that works)",
    )
    flags.add_argument("--layers", type=int, help="fewer layers than the preset's")
    flags.add_argument(
        "--reference", choices=sorted(FORMATS), help="format of the reference (float64 on the CPU)"
    )
    flags.add_argument("--json", type=Path, help="write the figures here, too")
    return flags


def options_of(arguments: argparse.Namespace) -> Options:
    """Read the flags. Raises ConfigError where the device is not there."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if arguments.device == "auto" else arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no CUDA device here: leave --device out, or say cpu.")
    cuda = device.type == "cuda"
    preset = PRESETS[arguments.preset]
    layers = arguments.layers or preset.shape.layers
    return Options(
        preset=replace(preset, shape=replace(preset.shape, layers=layers)),
        device=device,
        dtype=torch.bfloat16 if cuda else torch.float32,
        reference=FORMATS[arguments.reference or ("float32" if cuda else "float64")],
        compared=2 if cuda else None,
        repeat=arguments.repeat,
        attention=arguments.attention,
        cases=tuple(arguments.case or ()),
        only=tuple(arguments.only or ()),
    )


def main() -> int:
    """Read flags, measure, print tables and, where asked, write a JSON file."""
    arguments = parser().parse_args()
    torch.set_num_threads(1)
    console = screen()
    try:
        options = options_of(arguments)
    except ConfigError as error:
        console.print(str(error), style="red")
        return 2
    if options.device.type == "cuda":
        keep_memory_whole()
    figures = measure(options, lambda line: console.print(line, style="dim"))
    show(figures, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(document(figures), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
