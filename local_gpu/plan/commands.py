"""Command lines and environments of the vLLM servers of a layout.

Rule: pure but for the choice of ports. Every setting that matters to training is passed explicitly,
not left to vLLM's defaults or to a model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from local_gpu.plan.fits import MAX_ADAPTERS
from local_gpu.plan.layout import Gpu, names
from local_gpu.plan.memory import SAMPLER_BATCH, room_for
from local_gpu.sample.supervisor import KEY, Launch, free_ports

BASE: Final = "base"
"""The name under which samplers serve the base model."""
_LOGPROBS: Final = 20
_IMAGES: Final = ("--enable-scale-out", "--limit-mm-per-prompt", '{"video": 0}')
"""Opens the route that takes images beside token ids; no memory is kept for videos."""
_OURS: Final = (
    "TINKER_",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables of this process that servers must not inherit: its keys, its packages, and how the
trainer's memory is allocated, which vLLM's processes cannot always use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servings:
    """Settings shared by every sampler of a layout."""

    vllm: Path
    """The executable."""
    model: str
    """The folder of the base model."""
    context_tokens: int
    rank: int
    memory: float
    """Share of each GPU."""
    cache: int | None
    """Bytes of KV cache; None: what vLLM finds left of its share when it starts."""
    targets: tuple[str, ...]
    """Layers that adapters are on; for others, such as each expert of a mixture, vLLM would reserve
    memory that no adapter uses."""
    streams: int
    """Sequences that each computes at once."""
    logprobs: int
    """Most top-k logprobs per token that are asked for."""
    logs: Path
    sees: bool = False
    """Whether prompts may have images."""


def samplers(
    groups: Sequence[Sequence[int]], gpus: Sequence[Gpu], settings: Servings
) -> list[Launch]:
    """Plan a server for each group of GPUs."""
    ports = free_ports(len(groups))
    return [
        Launch(
            name=f"sampler {number}",
            command=_command(settings, port, len(group)),
            environment=_environment(os.environ, settings.vllm) | names(gpus, group),
            port=port,
            log=settings.logs / f"sampler-{number}.log",
            model=BASE,
        )
        for number, (group, port) in enumerate(zip(groups, ports, strict=True), 1)
    ]


def _command(settings: Servings, port: int, size: int) -> tuple[str, ...]:
    """Write the command that starts a server over `size` GPUs."""
    options: list[tuple[str, ...]] = [
        ("--served-model-name", BASE),
        ("--host", "127.0.0.1"),
        ("--port", str(port)),
        ("--generation-config", "vllm"),  # the folder's would change how it samples
        ("--enable-prefix-caching",),
        ("--disable-uvicorn-access-log",),  # a line for each request would fill the disk
        ("--dtype", "bfloat16"),
        ("--max-model-len", str(settings.context_tokens)),
        ("--max-num-batched-tokens", str(SAMPLER_BATCH.tokens)),
        ("--max-num-seqs", str(settings.streams)),
        ("--gpu-memory-utilization", str(settings.memory)),
        ("--tensor-parallel-size", str(size)),
        ("--enable-lora",),
        ("--max-loras", str(MAX_ADAPTERS)),
        ("--max-cpu-loras", str(2 * MAX_ADAPTERS)),
        ("--max-lora-rank", str(room_for(settings.rank))),
        ("--lora-target-modules", *settings.targets),
        ("--logprobs-mode", "processed_logprobs"),
        ("--max-logprobs", str(max(_LOGPROBS, settings.logprobs + settings.sees))),
        ("--enable-prompt-tokens-details",),
        ("--scheduling-policy", "priority"),  # people first
        ("--stream-interval", "1"),  # every token at once, whatever a release does by itself
    ]
    if settings.sees:
        options.append(_IMAGES)
    if settings.cache is not None:
        options.append(("--kv-cache-memory-bytes", str(settings.cache)))
    return (str(settings.vllm), "serve", settings.model, *chain.from_iterable(options))


def _environment(ours: Mapping[str, str], vllm: Path) -> dict[str, str]:
    kept = {name: value for name, value in ours.items() if not name.startswith(_OURS)}
    return kept | {
        "PATH": os.pathsep.join([str(vllm.parent), *filter(None, [ours.get("PATH")])]),
        "VLLM_API_KEY": KEY,  # not on the command line, which every account can read
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",  # nothing leaves this machine
        "HF_HUB_OFFLINE": "1",  # the model is a folder that is there
    }
