"""Command lines and environments of the vLLM servers of a layout.

Rule: pure but for the choice of ports. Every setting that matters to training is passed explicitly,
not left to vLLM's defaults or to a model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from local_gpu.plan.fits import JUDGE_CONTEXT, MAX_ADAPTERS
from local_gpu.plan.layout import Gpu, names
from local_gpu.plan.memory import JUDGE_BATCH, SAMPLER_BATCH, Batch, room_for
from local_gpu.sample.supervisor import KEY, Launch, free_ports

BASE: Final = "base"
"""The name under which samplers serve the base model."""
_LOGPROBS: Final = 20
_IMAGES: Final = ("--enable-scale-out", "--limit-mm-per-prompt", '{"video": 0}')
"""Opens the route that takes images beside token ids; no memory is kept for videos."""
_OURS: Final = ("TINKER_", "PYTHONPATH", "PYTHONHOME")
"""Variables of this process that servers must not inherit: its keys, and its packages."""


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
    quantization: str | None
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


def samplers(groups: Sequence[Sequence[int]], gpus: Sequence[Gpu], what: Servings) -> list[Launch]:
    """A server for each group of GPUs."""
    adapters = (
        "--enable-lora",
        *("--max-loras", str(MAX_ADAPTERS)),
        *("--max-cpu-loras", str(2 * MAX_ADAPTERS)),
        *("--max-lora-rank", str(room_for(what.rank))),
        *("--lora-target-modules", *what.targets),
        *("--logprobs-mode", "processed_logprobs"),
        *("--max-logprobs", str(max(_LOGPROBS, what.logprobs + what.sees))),
        "--enable-prompt-tokens-details",
        *("--scheduling-policy", "priority"),  # people first
        *(_IMAGES if what.sees else ()),
        *(("--quantization", what.quantization) if what.quantization else ()),
        *(("--kv-cache-memory-bytes", str(what.cache)) if what.cache is not None else ()),
    )
    batch = Batch(SAMPLER_BATCH.tokens, what.streams)
    ports = free_ports(len(groups))
    return [
        _launch(
            what.vllm,
            port,
            f"sampler {number}",
            BASE,
            what.model,
            (gpus, group),
            (*_common(what.context_tokens, what.memory, len(group), batch), *adapters),
            what.logs / f"sampler-{number}.log",
        )
        for number, (group, port) in enumerate(zip(groups, ports, strict=True), 1)
    ]


def judge(
    chosen: Sequence[int],
    gpus: Sequence[Gpu],
    *,
    vllm: Path,
    model: str,
    name: str,
    context_tokens: int,
    memory: float,
    logs: Path,
) -> Launch:
    """Launch of one judge server over all of the judge's GPUs."""
    context = min(context_tokens, JUDGE_CONTEXT)
    flags = _common(context, memory, len(chosen), JUDGE_BATCH)
    (port,) = free_ports(1)
    return _launch(vllm, port, "judge", name, model, (gpus, chosen), flags, logs / "judge.log")


def _common(context_tokens: int, memory: float, size: int, batch: Batch) -> tuple[str, ...]:
    return (
        *("--generation-config", "vllm"),  # the folder's would change how it samples
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",  # a line for each request would fill the disk
        *("--dtype", "bfloat16"),
        *("--max-model-len", str(context_tokens)),
        *("--max-num-batched-tokens", str(batch.tokens)),
        *("--max-num-seqs", str(batch.sequences)),
        *("--gpu-memory-utilization", str(memory)),
        *("--tensor-parallel-size", str(size)),
    )


def _launch(
    vllm: Path,
    port: int,
    name: str,
    served: str,
    model: str,
    where: tuple[Sequence[Gpu], Sequence[int]],
    flags: Sequence[str],
    log: Path,
) -> Launch:
    command = (str(vllm), "serve", model, "--served-model-name", served)
    return Launch(
        name=name,
        command=(*command, "--host", "127.0.0.1", "--port", str(port), *flags),
        environment=_environment(os.environ, vllm) | names(*where),
        port=port,
        log=log,
        model=served,
    )


def _environment(ours: Mapping[str, str], vllm: Path) -> dict[str, str]:
    kept = {name: value for name, value in ours.items() if not name.startswith(_OURS)}
    return kept | {
        "PATH": os.pathsep.join([str(vllm.parent), *filter(None, [ours.get("PATH")])]),
        "VLLM_API_KEY": KEY,  # not on the command line, which every account can read
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",  # nothing leaves this machine
        "HF_HUB_OFFLINE": "1",  # the model is a folder that is there
    }
