"""`python -m benchmarks.gpu_rows STAGE`: the rows of one stage of the day on a GPU.

Every row is written to the file as a line of JSON before the next one begins. A run that is started
again continues after the rows that are there. A failure is a row with its reason.

Rule: after a failure of the device nothing more is computed in this process. It ends with status 3,
and its parent starts the next one, which continues after the failed row.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.training import Options, measure
from benchmarks.training_peers import LossRows
from benchmarks.training_report import document
from benchmarks.training_run import MemoryPeak
from benchmarks.training_shapes import (
    PRESETS,
    Batches,
    Preset,
    Shape,
    adapter_of,
    batches,
    build,
    save,
    useful_tokens,
)
from benchmarks.training_sides import Ours, Settings, Side
from benchmarks.training_work import ceiling, clock, flops
from local_gpu.backend import LocalBackend
from local_gpu.config import LocalConfig
from local_gpu.device import device_fault, out_of_memory
from local_gpu.halves import ScoreAsk
from local_gpu.learn.learning import LearningCore
from local_gpu.model.fused import fuse
from local_gpu.model.load import keep_memory_whole, open_base
from local_gpu.model.lora import BaseModel, LoraShape
from local_gpu.plan.memory import ModelSize, adapter_part, base_bytes, counted, token_bytes
from local_gpu.tree.choice import Heads, Trial, choose, distance, kernel_failures
from local_gpu.tree.fused import FlexKernel, VarlenKernel
from local_gpu.tree.kernels import Fa3Kernel, Kernel, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree, grow
from tinker_claw.errors import ClawError
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

Figures = dict[str, Any]
BROKEN: Final = 3
"""Exit status where the device failed, and this process with it."""
KERNELS: Final[Mapping[str, type[Kernel]]] = {
    "sdpa": SdpaKernel,
    "merged": MergedKernel,
    "fa3": Fa3Kernel,
    "flex": FlexKernel,
    "varlen": VarlenKernel,
}


class Rows:
    """File of a stage's rows."""

    def __init__(self, path: Path, device: torch.device, *, small: bool) -> None:
        """`small`: sizes of a rehearsal, which a CPU does in seconds."""
        self.path, self.device, self.small = path, device, small
        self._there = {row["row"] for row in read(path)}

    def take(self, name: str, make: Callable[[], Figures]) -> None:
        """Measure a row, unless the file has it. A broken device ends the process."""
        if name in self._there:
            return
        began = time.perf_counter()
        try:
            figures, broken = make(), None
        except (*kernel_failures(), MemoryError) as error:
            broken = device_fault(error)
            memory = isinstance(error, RuntimeError) and out_of_memory(error)
            told = "out of memory" if memory else (str(error) or type(error).__name__)
            figures = {"failed": told.splitlines()[0][:300]}
        row = {"row": name, "seconds": round(time.perf_counter() - began, 3), **figures}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._there.add(name)
        print(json.dumps(row), flush=True)
        if broken is not None:
            os._exit(BROKEN)  # any further call would fail or hang
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the base on this device."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def size(self, full: int, small: int) -> int:
        return small if self.small else full


def read(path: Path) -> list[Figures]:
    """Read the rows of a file; a line that was broken off is left out."""
    rows: list[Figures] = []
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


# The machine


def probe(rows: Rows) -> None:
    """Measure the machine: what is installed, and how fast it multiplies and copies."""
    rows.take("machine", lambda: _machine(rows.device))
    rows.take("packages", _packages)
    rows.take("compilers", _compilers)
    for dtype in (torch.bfloat16, torch.float32):
        rows.take(
            f"products in {str(dtype).removeprefix('torch.')}",
            lambda dtype=dtype: {"operations_per_s": ceiling(rows.device, dtype)},
        )
    rows.take("copies", lambda: _copies(rows))


def _machine(device: torch.device) -> Figures:
    figures: Figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "shm_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
    }
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        figures |= {"gpu": of.name, "capability": [of.major, of.minor], "free": free}
        figures |= {"total": total, "cuda": torch.version.cuda}
    return figures


def _packages() -> Figures:
    names = ("transformers", "peft", "safetensors", "liger-kernel", "flash-attn", "flash-attn-3")
    names += ("flash-linear-attention", "causal-conv1d", "bitsandbytes", "triton", "vllm")
    found: Figures = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _compilers() -> Figures:
    """C compiler and Python headers, which Triton needs to compile its launchers."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {"cc": shutil.which("gcc") or shutil.which("cc"), "python_h": header.exists()}


def _copies(rows: Rows) -> Figures:
    size = rows.size(1 << 30, 1 << 24)
    here = torch.empty(size, dtype=torch.uint8)
    there = torch.empty(size, dtype=torch.uint8, device=rows.device)
    figures: Figures = {}
    for name, to, of in (("to_device", there, here), ("to_host", here, there)):
        began = clock(rows.device)
        to.copy_(of)
        figures[f"{name}_bytes_per_s"] = size / max(1e-9, clock(rows.device) - began)
    return figures


# Attention


def kernels(rows: Rows, name: str) -> None:
    """Time one kernel over trees of three shapes and sizes, forward and backward."""
    small = Heads(4, 2, 32)
    heads = small if rows.small else Heads(32, 8, 128)
    first = rows.size(8192, 256)
    for tokens in (first, rows.size(32_768, 512), rows.size(65_536, 1024)):
        for shape in TREES:
            rows.take(
                f"{name}, {shape}, {tokens}",
                lambda s=shape, n=tokens: _attended(rows, name, s, n, heads, compare=n == first),
            )


def _star(tokens: int) -> list[torch.Tensor]:
    """Sixteen samples after one prompt that has half of all tokens."""
    stem, own = torch.arange(tokens // 2), tokens // 32
    return [torch.cat([stem, tokens * (i + 1) + torch.arange(own)]) for i in range(16)]


def _chain(tokens: int) -> list[torch.Tensor]:
    """Sixteen turns of one session, each of which extends the one before."""
    return [torch.arange(tokens * (i + 1) // 16) for i in range(16)]


def _fork(tokens: int) -> list[torch.Tensor]:
    """Sixteen samples; every two share a beginning, and every two of these."""
    piece = tokens // 31
    paths = [[(level, i >> (4 - level)) for level in range(5)] for i in range(16)]
    return [
        torch.cat([(level * 16 + at + 1) * tokens + torch.arange(piece) for level, at in path])
        for path in paths
    ]


TREES: Final[Mapping[str, Callable[[int], list[torch.Tensor]]]] = {
    "star": _star,
    "chain": _chain,
    "fork": _fork,
}


def _attended(
    rows: Rows, name: str, shape: str, tokens: int, heads: Heads, *, compare: bool
) -> Figures:
    trial = _trial(grow(TREES[shape](tokens), least=1), heads, rows.device)
    kernel = KERNELS[name]()
    if rows.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rows.device)
    figures: Figures = {
        "tokens": len(trial.tree.tokens),
        "ms": 1000 * trial.seconds(kernel, rows.dtype),
    }
    if rows.device.type == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(rows.device)
    if compare:
        own, right = trial.run(kernel, rows.dtype), trial.run(SdpaKernel(), rows.dtype)
        figures["error"] = max(distance(a, b) for a, b in zip(own, right, strict=True))
    return figures


def _trial(tree: PrefixTree, heads: Heads, device: torch.device) -> Trial:
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        made = torch.randn(
            1, len(tree.tokens), count, heads.width, device=device, generator=generator
        )
        return made.transpose(1, 2)

    counts = (heads.queries, heads.keys, heads.keys, heads.queries)
    query, key, value, grad = (draw(count) for count in counts)
    return Trial(tree, (query, key, value, grad))


# Gradients


def gradients(rows: Rows) -> None:
    """Compare gradients with a reference: of a tiny model in float32, and of four layers at the
    true widths in half precision."""
    tiny = PRESETS["tiny"]
    quick = Batches(rows.size(16, 2), rows.size(2000, 64), rows.size(300, 16), (64, 128), long=0)
    wide = Preset(_shape(rows, layers=rows.size(4, 2)), quick)
    cpu = torch.device("cpu")
    exact = torch.float64 if rows.device == cpu else torch.float32
    for name, preset, dtype, reference in (
        ("tiny float32", replace(tiny, batches=quick), torch.float32, torch.float64),
        ("four layers bfloat16", wide, torch.bfloat16, exact),
    ):
        for case in ("shared", "unshared"):
            options = Options(
                preset=preset,
                device=rows.device,
                dtype=dtype,
                reference=reference,
                compared=2,
                repeat=1,
                cases=(case,),
                only=("ours", "peft-rows"),
            )
            rows.take(f"{name}, {case}", lambda options=options: _compared(options))


def _compared(options: Options) -> Figures:
    ours, peft = next(iter(document(measure(options, _unheard))["cases"].values()))
    failed = {"failed": ours["failed"]} if ours["failed"] else {}
    return {"error": ours["gradient_error"], "peft": peft["gradient_error"], **failed}


def _unheard(line: str) -> None:
    """Ignore a line: the figures are in the rows."""


def _shape(rows: Rows, layers: int | None = None) -> Shape:
    shape = PRESETS["tiny" if rows.small else "8b"].shape
    return shape if layers is None else replace(shape, layers=layers)


# Steps at the size that users have


class Bench:
    """A base with random weights, and a batch."""

    def __init__(self, rows: Rows, sizes: Batches, case: str) -> None:
        self.rows, self.shape = rows, _shape(rows)
        self.datums = batches(Preset(self.shape, sizes))[case]
        context = max(len(datum.tokens) for datum in self.datums)
        self.base = build(self.shape, device=rows.device, dtype=rows.dtype, context=context)
        self.top = ceiling(rows.device, rows.dtype)
        said: list[str] = []
        heads = Heads(self.shape.heads, self.shape.kv_heads, self.shape.head_dim)
        self.kernel = choose(
            "auto", device=rows.device, dtype=rows.dtype, heads=heads, say=said.append
        )
        self.said = said

    def settings(self, *, checkpointing: bool = True, tokens: int | None = None) -> Settings:
        lora = LoraShape(32, 32) if not self.rows.small else LoraShape(8, 8)
        return Settings(
            base=self.base,
            lora=lora,
            adapter=adapter_of(self.base, lora),
            checkpointing=checkpointing,
            pass_tokens=tokens or self.rows.size(32_768, 512),
            kernel=self.kernel,
        )

    def timed(self, make: Callable[[], Side], rank: int) -> Figures:
        """Time the second of two steps."""
        side, memory = make(), MemoryPeak(self.rows.device)
        side.step(self.datums)
        memory.begin()
        began = clock(self.rows.device)
        work = side.step(self.datums)
        seconds = clock(self.rows.device) - began
        done = flops(work, self.shape, rank)
        return {
            "step_s": seconds,
            "useful_tokens_per_s": useful_tokens(self.datums) / seconds,
            "share_of_ceiling": done / seconds / self.top,
            "peak_bytes": memory.grown() + memory.before,
            "grown_bytes": memory.grown(),
        }


def step(rows: Rows) -> None:
    """Time steps on sixteen unshared samples: what each setting costs and gains, and where the time
    goes."""
    each = rows.size(8192, 128)
    bench = Bench(rows, Batches(rows.size(16, 4), 8, 8, (each, each), 0), "unshared")

    def ours(**changed: Any) -> Figures:
        settings = bench.settings(**changed)
        return bench.timed(lambda: Ours("ours", settings), settings.lora.rank)

    rows.take("as it is", lambda: {**ours(), "attention": bench.kernel.name, "said": bench.said})
    rows.take("profile", lambda: _profiled(bench))
    for tokens in (rows.size(8192, 128), rows.size(65_536, 1024), rows.size(131_072, 2048)):
        rows.take(f"passes of {tokens}", lambda n=tokens: ours(tokens=n))
    rows.take("nothing computed again", lambda: ours(checkpointing=False, tokens=each))
    rows.take("liger", lambda: {**_fused(rows, bench.base), **ours()})


def _fused(rows: Rows, base: BaseModel) -> Figures:
    told: list[str] = []
    fuse(base.module, device=rows.device, dtype=rows.dtype, say=told.append)
    return {"said": told}


def _profiled(bench: Bench) -> Figures:
    """Shares of a step's time by kind of kernel."""
    side = Ours("ours", bench.settings())
    side.step(bench.datums)
    cuda = bench.rows.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=kinds) as seen:
        side.step(bench.datums)
        if cuda:
            torch.cuda.synchronize(bench.rows.device)
    spent: dict[str, float] = {}
    for event in seen.key_averages():
        taken = event.self_device_time_total if cuda else event.self_cpu_time_total
        spent[_kind(event.key)] = spent.get(_kind(event.key), 0.0) + taken
    total = sum(spent.values()) or 1.0
    return {"shares": {kind: round(taken / total, 3) for kind, taken in sorted(spent.items())}}


_KINDS: Final = {
    "attention": ("flash", "attention", "fmha", "flex"),
    "products": ("gemm", "::mm", "addmm", "bmm", "matmul", "cutlass", "nvjet"),
    "copies": ("memcpy", "memset", "copy", "_to_copy", "::cat", "::contiguous"),
}


def _kind(name: str) -> str:
    lower = name.lower()
    return next((k for k, words in _KINDS.items() if any(w in lower for w in words)), "the rest")


def peak(rows: Rows) -> None:
    """Measure the memory of passes, beside the planned figures."""
    each = rows.size(8192, 256)
    bench = Bench(rows, Batches(4, 8, 8, (each, each), 0), "unshared")
    model = counted(bench.base.module)
    for tokens in (each, 2 * each, 4 * each):
        rows.take(f"passes of {tokens}", lambda n=tokens: _planned(rows, bench, model, n))


def _planned(rows: Rows, bench: Bench, model: ModelSize, tokens: int) -> Figures:
    settings = bench.settings(tokens=tokens)
    found = bench.timed(lambda: Ours("ours", settings), settings.lora.rank)
    width = rows.dtype.itemsize
    planned = tokens * token_bytes(model, checkpointing=True, width=width)
    held = base_bytes(model, "none", width) + adapter_part(model, settings.lora.rank).size
    return {
        "grown_bytes": found["grown_bytes"],
        "planned_growth": planned,
        "peak_bytes": found["peak_bytes"],
        "planned_peak": planned + held,
        "grown_of_planned": found["grown_bytes"] / planned,
    }


def shared(rows: Rows) -> None:
    """Time samples after one long prompt, beside peft with the logits of the loss alone."""
    sizes = Batches(rows.size(8, 4), rows.size(20_000, 256), rows.size(3000, 32), (64, 64), 0)
    bench = Bench(rows, sizes, "shared")
    settings = bench.settings(tokens=rows.size(65_536, 2048))
    rank = settings.lora.rank
    rows.take("ours", lambda: bench.timed(lambda: Ours("ours", settings), rank))
    rows.take("peft", lambda: bench.timed(lambda: LossRows("peft", settings=settings), rank))


# A life: a training process, a sampler, and their failures


def life(rows: Rows) -> None:
    """Measure the trainer in a process of its own, and the embedded sampler beside it."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save(PRESETS["tiny" if rows.small else "0.6b"].shape, model, rows.device)
        rows.take("forced out of memory", lambda: _squeezed(rows, model, Path(folder)))
        rows.take("device assert", lambda: _asserted(rows))
        asyncio.run(_lived(rows, model, Path(folder)))


async def _lived(rows: Rows, model: Path, folder: Path) -> None:
    tokens = rows.size(16_384, 512)
    config = LocalConfig(
        model=str(model),
        root=folder,
        device=rows.device.type,
        context_tokens=tokens,
        in_process=False,
        threads=1,
    )
    began = time.perf_counter()
    backend = await LocalBackend.start(config, lambda ref: folder / ref)
    started = time.perf_counter() - began
    try:
        rows.take("start", lambda: {"start_s": started})
        for name, measured in (
            ("step", _stepped),
            ("publish", _published),
            ("kill -9", _killed),
        ):
            found = await _guarded(measured(backend, folder, tokens))
            rows.take(name, lambda found=found: found)
    finally:
        await backend.aclose()


async def _guarded(measured: Any) -> Figures:
    try:
        return await measured
    except ClawError as error:
        return {"failed": str(error).splitlines()[0]}


def _datums(tokens: int) -> tuple[Datum, ...]:
    half = tokens // 2
    ids = tuple((i * i * 5 + 7 * i) % 1000 for i in range(half))
    return tuple(
        Datum((*ids[salt:], *ids[:salt]), half - 16, (-7.0,) * 16, (0.1,) * 16) for salt in range(4)
    )


async def _stepped(backend: LocalBackend, folder: Path, tokens: int) -> Figures:
    passes = [LossPass("ppo", _datums(tokens))]
    began = time.perf_counter()
    report = await backend.step(lambda: backend.learning.step(passes, Adam(1e-4)))
    await backend.run(lambda: backend.learning.write_state(folder / "state"))
    return {"step_s": time.perf_counter() - began, "grad_norm": report.grad_norm}


async def _published(backend: LocalBackend, folder: Path, tokens: int) -> Figures:
    """Time a publication by part: writing, opening, and the first token of a new prompt."""
    at = [time.perf_counter()]
    await backend.run(lambda: backend.learning.write_adapter(folder / "v1"))
    at.append(time.perf_counter())
    sampler = await backend.serving.open("v1", folder / "v1")
    at.append(time.perf_counter())
    prompt = tuple(i % 997 for i in range(tokens // 4))
    (drawn,) = await sampler.sample(prompt, SamplingParams(max_tokens=16, seed=1), 1)
    at.append(time.perf_counter())
    ask = ScoreAsk.of(backend.learning.facts, (*prompt, *drawn.tokens), len(prompt), None, 0)
    scored = await backend.score("v1", ask)
    apart = [abs(a - b) for a, b in zip(scored.logprobs, drawn.logprobs, strict=True)]
    await sampler.aclose()
    parts = [later - before for before, later in pairwise(at)]
    names = ("written_s", "opened_s", "sampled_s")
    return {**dict(zip(names, parts, strict=True)), "apart_nats": sum(apart) / len(apart)}


async def _killed(backend: LocalBackend, folder: Path, tokens: int) -> Figures:
    """Kill the training process: the running step is void, and training resumes from the saved
    state."""
    ranks = _ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    passes = [LossPass("ppo", _datums(tokens))]
    began, told = time.perf_counter(), ""
    try:
        await backend.step(lambda: backend.learning.step(passes, Adam(1e-4)))
    except ClawError as error:
        told = str(error).splitlines()[0]
    noticed = time.perf_counter() - began
    await backend.run(lambda: backend.learning.read_state(folder / "state"))
    await backend.step(lambda: backend.learning.step(passes, Adam(1e-4)))
    figures: Figures = {"killed": len(ranks), "noticed_s": noticed, "told": told}
    return figures | {"back_s": time.perf_counter() - began - noticed}


def _ranks() -> list[int]:
    """Ids of the processes below this one that learn."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
            if parent == os.getpid() and b"local_gpu.ranks" in command:
                found.append(int(stat.parent.name))
    return found


def _squeezed(rows: Rows, model: Path, folder: Path) -> Figures:
    """Train with a tenth of the memory that a pass wants (CUDA): passes are split until they fit.

    On a CPU, whose memory has no such limit, an impossible allocation is recognised.
    """
    if rows.device.type != "cuda":
        try:
            torch.empty(1 << 60)
        except RuntimeError as error:
            return {"recognised": out_of_memory(error)}
        return {"failed": "an allocation of 4 EiB went well"}
    base = open_base(str(model), device=rows.device.type, dtype="auto", threads=1)
    tokens = 8192
    config = LocalConfig(model=str(model), root=folder, micro_batch_tokens=4 * tokens)
    core = LearningCore(config, base, say=_unheard)
    passes = [LossPass("ppo", _datums(tokens))]
    core.step(passes, Adam(0.0))
    most = torch.cuda.max_memory_allocated(rows.device)
    held = torch.cuda.memory_allocated(rows.device)
    total = torch.cuda.get_device_properties(rows.device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((held + (most - held) / 2) / total, rows.device)
    try:
        report = core.step(passes, Adam(0.0))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, rows.device)
    return {"grad_norm": report.grad_norm, "bytes": most - held}


def _asserted(rows: Rows) -> Figures:
    """Trigger a GPU's assertion in a process of its own, which it breaks."""
    code = (
        "import sys, torch\n"
        "from local_gpu.device import device_fault\n"
        "try:\n"
        "    table = torch.zeros(4, device=sys.argv[1])\n"
        "    print(float(table[torch.tensor([9], device=sys.argv[1])].sum()))\n"
        "except (RuntimeError, IndexError) as error:\n"
        "    print(type(error).__name__, '|', device_fault(error))\n"
    )
    words = [sys.executable, "-c", code, rows.device.type]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    kind, _, told = done.stdout.strip().rpartition("\n")[2].partition(" | ")
    broken = told not in ("", "None")
    # On a CPU it is an error of what was asked for, and of no device.
    right = broken if rows.device.type == "cuda" else kind == "IndexError" and not broken
    return {"raised": kind, "fault": told, "recognised": right}


# Families


def families(rows: Rows) -> None:
    """Compare steps of tiny models of other kinds on the device with the same steps on the CPU."""
    for name, kind, settings in FAMILIES:
        rows.take(name, lambda k=kind, s=settings: _family(rows, k, s, "none"))
    rows.take("Qwen3 in 4 bits", lambda: _family(rows, "qwen3", {}, "4bit"))


_LINEAR: Final = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: Final[Sequence[tuple[str, str, Mapping[str, Any]]]] = (
    ("Qwen3.5", "qwen3_5_text", _LINEAR),
    ("Qwen3-MoE", "qwen3_moe", _EXPERTS),
)


def _family(rows: Rows, kind: str, settings: Mapping[str, Any], quantization: Any) -> Figures:
    shape: Mapping[str, Any] = {
        **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False},
        **{"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None},
    }
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape, **settings))
        made.save_pretrained(folder)
        found = [
            _one_step(folder, place, quantization)
            for place in dict.fromkeys((rows.device.type, "cpu"))
        ]
    here, there = found[0], found[-1]
    far = max(abs(a - b) for a, b in zip(here[0], there[0], strict=True))
    return {"apart_nats": far, "grad_norm": here[1], "grad_norm_cpu": there[1]}


def _one_step(folder: str, device: str, quantization: Any) -> tuple[list[float], float | None]:
    base = open_base(folder, device=device, dtype="float32", threads=1, quantization=quantization)
    config = LocalConfig(
        model=folder, root=Path(folder), rank=4, alpha=8, dtype="float32", quantization=quantization
    )
    core = LearningCore(config, base, say=_unheard)
    report = core.step([LossPass("ppo", _datums(256))], Adam(0.01))
    again = core.step([LossPass("ppo", _datums(256))], Adam(0.0))
    return [x for row in again.logprobs[0] for x in row], report.grad_norm


STAGES: Final[Mapping[str, Callable[[Rows], None]]] = {
    "probe": probe,
    "gradients": gradients,
    "step": step,
    "peak": peak,
    "shared": shared,
    "life": life,
    "families": families,
}


def parser() -> argparse.ArgumentParser:
    """Command line of the rows."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_rows", description=__doc__)
    made.add_argument("stage", choices=[*STAGES, "kernels"])
    made.add_argument("--kernel", choices=list(KERNELS), default="sdpa", help="of stage kernels")
    made.add_argument("--device", default="cuda")
    made.add_argument("--small", action="store_true", help="sizes that a CPU does in seconds")
    made.add_argument("--rows", type=Path, required=True, help="the file, a line of JSON each")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Measure the rows that are missing. Returns 3 if the device is broken."""
    given = parser().parse_args(words)
    torch.set_num_threads(1)
    device = torch.device(given.device)
    if device.type == "cuda":
        keep_memory_whole()
    rows = Rows(given.rows, device, small=given.small)
    if given.stage == "kernels":
        kernels(rows, given.kernel)
    else:
        STAGES[given.stage](rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
