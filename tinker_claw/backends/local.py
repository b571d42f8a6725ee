"""The local backend: the layout of this machine's GPUs, whether it fits, the servers and trainer.

`arrange` is called once per start. It decides what the settings leave open and starts nothing; its
result is passed to `open_local`.

Rule: counts and memory are computed before anything is loaded. Samplers start first, because they
measure what is free; whatever was started ends with its context, the trainer before them.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tinker_claw.backends.model_files import checked_folder
from tinker_claw.backends.vllm import GET_VLLM, VLLM, find_vllm
from tinker_claw.config.settings import NEEDS_GPU, Settings
from tinker_claw.errors import BackendError, ConfigError, ModelFileError, OutageError
from tinker_claw.methods import build
from tinker_claw.policy import Trainer
from tinker_claw.shipped import MODELS, SMALL
from tinker_claw.telemetry import log

if TYPE_CHECKING:
    from local_gpu.config import LocalConfig
    from local_gpu.plan.commands import Servings
    from local_gpu.plan.fits import Demand, Fit
    from local_gpu.plan.layout import Gpu, Layout
    from local_gpu.sample.supervisor import Launch, Servers


LORA_ALPHA = 32
_TORCH_S = 180.0
"""Seconds for torch to be imported and to use a GPU, on a busy machine."""


_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[Bb](?![A-Za-z0-9])")
"""Parameters in a model's name, as 8 in Qwen3-8B."""
_SHORTEST = 256
"""Tokens of a context below which a model is of no use, and a multiple of which is advised."""
_MOST_ON_CPU = 4
"""Billions of parameters from which on a model is not started on the CPU unless it is asked for."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Layout of the GPUs, and the memory that it takes."""

    layout: Layout
    gpus: tuple[Gpu, ...]
    """GPUs in the order of the layout's indices; () on a CPU."""
    first: int
    """torch's index of the first GPU."""
    vllm: Path | None
    """Executable of vLLM; None: there is none, or none is wanted."""
    demand: Demand | None
    fit: Fit | None
    """Whether it fits, by arithmetic; None on a CPU and for the demo's model."""

    @property
    def ranks(self) -> int:
        """Processes that learn."""
        return max(1, len(self.layout.train))


def arrange(settings: Settings, *, only_reckon: bool = False) -> Arrangement:
    """Lay out the available GPUs.

    Args:
        only_reckon: also for samplers whose vLLM is not here yet.

    Raises:
        ConfigError: it cannot be done; says what to set.
    """
    from local_gpu.plan.fits import reckon
    from local_gpu.plan.layout import Layout, Wanted, plan

    local = settings.local
    gpus, first = _gpus(settings)
    vllm = find_vllm()
    if not gpus:
        return Arrangement(Layout((), ()), (), 0, None, None, None)
    if local.base_dtype == "float32":
        raise ConfigError("--base-dtype float32 is for a CPU, and GPUs take bfloat16: leave it out")
    if vllm is None and not only_reckon:
        refuse_without_vllm(settings)
    layout = plan(
        Wanted(
            gpus=local.gpus or len(gpus),
            rollout=local.rollout_gpus,
            tensor_parallel=local.rollout_tp,
            samples=not local.urls,
        )
    )
    demand = _demand(settings)
    return Arrangement(layout, gpus, first, vllm, demand, reckon(layout, gpus, demand))


def why_not(arranged: Arrangement) -> str | None:
    """Explain what does not fit and what would; None if everything fits."""
    from local_gpu.plan.fits import cure

    fit, demand = arranged.fit, arranged.demand
    if fit is None or demand is None or not fit.short:
        return None
    would = cure(arranged.layout, arranged.gpus, demand)
    return f"It does not fit, by arithmetic. {'. '.join(fit.short)}. What would fit: {would}"


def cpu_memory(settings: Settings) -> tuple[str, str | None]:
    """Describe the memory that a model takes on this CPU's machine, and a cure where its context
    does not fit.

    Raises:
        ConfigError: the model does not fit.
    """
    from local_gpu.learn.memory import machine_bytes
    from local_gpu.plan.memory import GIB, cpu_parts, sequence_bytes, total_of

    demand, has = _demand(settings), machine_bytes()
    chosen = _cpu_dtype(settings)
    dtype = "float32" if chosen == "auto" else chosen
    parts = cpu_parts(demand.model, demand.rank, dtype)
    needs, each = total_of(parts), sequence_bytes(demand.model, dtype)
    needed = (
        f"{needs / GIB:.1f} GiB ({', '.join(f'{p.what} {p.size / GIB:.1f}' for p in parts)}) "
        f"and {each * 1000 / GIB:.2f} for 1,000 tokens of a sequence, estimated"
    )
    if has is None:
        return needed, None
    balance = f"{needed}; this machine, or its container, has {has / GIB:.1f}"
    longest = int((has - needs) / each) // _SHORTEST * _SHORTEST
    if longest < _SHORTEST:
        halved = total_of(cpu_parts(demand.model, demand.rank, "bfloat16"))
        fits = dtype != "bfloat16" and halved + _SHORTEST * each < has
        smaller = "--base-dtype bfloat16" if fits else "a smaller model"
        raise ConfigError(f"--model-name {settings.run.model_name} needs {balance}: take {smaller}")
    if longest >= demand.context_tokens:
        return balance, None
    short = f"{balance}, too little for a context of {demand.context_tokens:,} tokens"
    return short, f"--context-tokens {longest}"


def _cpu_dtype(settings: Settings) -> Literal["auto", "float32", "bfloat16"]:
    """Return the number format of the base on a CPU; `small` is in bfloat16 where the processor
    computes in it."""
    dtype = settings.local.base_dtype
    if dtype == "auto" and settings.run.model_name == SMALL and computes_bfloat16():
        return "bfloat16"
    return dtype


def computes_bfloat16() -> bool:
    """Return whether this processor multiplies matrices in bfloat16."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


async def served_at(url: str, settings: Settings) -> str:
    """Describe what an inference server named by --sampler-urls serves.

    Raises:
        ConfigError: it does not answer, or cannot be used.
    """
    from local_gpu.sample.vllm import NEVER_LOADED, connect

    try:
        key = settings.local.sampler_api_key
        (server,) = await connect([url], key.get_secret_value() if key else None)
        try:
            info = await server.info()
            await server.unload(NEVER_LOADED)
        finally:
            await server.aclose()
    except (BackendError, ConfigError) as error:
        raise ConfigError(f"--sampler-urls: {error}") from error
    return f"{url} serves {info.model}, context {info.context_tokens} tokens"


def refuse_without_vllm(settings: Settings) -> None:
    """Raise ConfigError where vLLM is needed, which is not there: on GPUs only vLLM samples."""
    named = settings.local.given("rollout_gpus", "rollout_tp")
    if named or not settings.local.urls:
        raise ConfigError(
            f"{named or 'Sampling on GPUs'} needs vLLM, and there is none in {VLLM} or on PATH. "
            f"{GET_VLLM}. Or learn on the CPU: --device cpu"
        )


def _gpus(settings: Settings) -> tuple[tuple[Gpu, ...], int]:
    """The GPUs to use, and torch's index of the first; () for the CPU.

    Raises:
        ConfigError: there are fewer than were asked for, or none for a large model.
    """
    from local_gpu.plan.layout import visible

    local = settings.local
    if local.device == "cpu" or settings.run.model_name in MODELS:
        return (), 0
    seen, first = visible(), 0
    if local.device.startswith("cuda:"):
        number = local.device.partition(":")[2]
        first = int(number) if number.isdecimal() else len(seen)
        seen = seen[first : first + 1]
    named = local.given("device", *NEEDS_GPU)
    if (not seen and named) or len(seen) < (local.gpus or 0):
        cure = "ask for no more" if seen else "fix the driver, or leave it out to learn on the CPU"
        raise ConfigError(
            f"{named}: nvidia-smi and CUDA_VISIBLE_DEVICES show {len(seen)} GPUs here; {cure}"
        )
    name = settings.run.model_name
    sizes = [float(billions) for billions in _BILLIONS.findall(Path(name).name)]
    if not seen and max(sizes, default=0) > _MOST_ON_CPU:
        raise ConfigError(
            f"--model-name {name} has {max(sizes):g} billion parameters by its name, and there is "
            "no GPU here (nvidia-smi shows none): a processor is too slow for it. Choose --backend "
            "tinker, a machine with a GPU, or --model-name demo; --device cpu tries it all the same"
        )
    return seen, first


def _demand(settings: Settings) -> Demand:
    from local_gpu.plan.fits import Demand
    from local_gpu.plan.memory import model_size

    local = settings.local
    model = model_size(checked_folder(settings.run.model_name, ["config.json"]))
    if local.base_quantization == "4bit" and model.experts:
        raise ConfigError(
            f"--base-quantization 4bit: the experts of {settings.run.model_name} are no linear "
            "layers, and would stay in 16 bits; leave it out, or take a dense model"
        )
    context = min(model.context_tokens, settings.run.context_tokens or model.context_tokens)
    return Demand(
        model=model,
        rank=settings.training.lora_rank,
        context_tokens=context,
        quantization=local.base_quantization,
    )


def check_fit(settings: Settings) -> Arrangement:
    """Log the layout, and refuse one that does not fit before anything is loaded.

    Raises:
        ConfigError: says what would fit.
    """
    arranged = arrange(settings)
    if not arranged.gpus and settings.run.model_name not in MODELS:
        with suppress(ModelFileError):  # loading says what is wrong with it
            cpu_memory(settings)
    if (wrong := why_not(arranged)) is not None:
        raise ConfigError(f"{wrong}. `tinker-claw doctor` with these flags shows the sum")
    event = log.bind(gpus=arranged.layout.describe())
    if (fit := arranged.fit) is not None:
        event = event.bind(
            ranks=arranged.ranks,
            micro_batch_tokens=fit.micro_batch_tokens,
            sampler_memory=fit.sampler_memory,
            sharded=fit.shard,
        )
    event.info("layout")
    return arranged


def ask_torch(arranged: Arrangement) -> None:
    """Let torch use the GPUs that learn, in a process of its own that ends again.

    Before anything is loaded, because vLLM takes minutes to start, and a driver that is too old for
    this torch shows only when it is used.

    Raises:
        ConfigError: it cannot; the sentence says what to do.
    """
    from local_gpu.plan.layout import ORDER

    counted = os.environ | dict([ORDER])  # torch counts GPUs as nvidia-smi does
    for index in arranged.layout.train:
        device = f"cuda:{arranged.first + index}"
        command = [sys.executable, "-c", f"import torch; torch.empty(1, device={device!r})"]
        try:
            done = subprocess.run(
                command, env=counted, capture_output=True, text=True, timeout=_TORCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            why = f"it did not answer within {_TORCH_S:.0f} s"
        else:
            if done.returncode == 0:
                continue
            why = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ConfigError(
            f"torch cannot use {device}: {why.rstrip('.')}. Install a torch for this GPU and its "
            "driver (pytorch.org/get-started says which), or give --device cpu."
        )


@asynccontextmanager
async def open_local(
    settings: Settings,
    arranged: Arrangement,
    folder: str,
    away: Callable[[Sequence[str]], object] = len,
) -> AsyncGenerator[Trainer]:
    """Start the servers, then the trainer on the memory that they leave; end in reverse order.

    `away` is called with the servers out of the rotation, and why, whenever that changes.

    Raises:
        ConfigError, BackendError: something does not start.
    """
    async with AsyncExitStack() as stack:
        urls: tuple[str, ...] = settings.local.urls
        hung: Callable[[str], object] = len
        await asyncio.to_thread(ask_torch, arranged)
        if arranged.layout.serve:
            from local_gpu.plan import commands

            what = _servings(settings, arranged, folder)
            launched = commands.samplers(arranged.layout.serve, arranged.gpus, what)
            servers = await stack.enter_async_context(_running(launched))
            urls, hung = servers.urls, servers.restart
        from local_gpu.sample.member import PoolOptions
        from local_gpu.trainer import LocalTrainer  # torch: only where it trains

        config = local_config(settings, folder, arranged, urls)
        try:
            options = PoolOptions(
                say=lambda message: log.info("local", message=message), away=away, hung=hung
            )
            trainer = await LocalTrainer.start(config, options)
        except OutageError as error:
            if not settings.local.urls:
                raise
            raise ConfigError(
                f"--sampler-urls: {error} See that a server runs there, or fix the address"
            ) from error
        stack.push_async_callback(trainer.aclose)
        yield trainer


@asynccontextmanager
async def _running(launched: Sequence[Launch]) -> AsyncGenerator[Servers]:
    from local_gpu.sample.supervisor import Servers

    servers = Servers(launched, lambda message: log.info("servers", message=message))
    try:
        await servers.ready()
        log.info("servers.ready", urls=servers.urls)
        yield servers
    finally:
        await asyncio.to_thread(servers.stop)


def local_config(
    settings: Settings, folder: str, arranged: Arrangement, urls: tuple[str, ...]
) -> LocalConfig:
    """Return the trainer's configuration."""
    from local_gpu.config import LocalConfig
    from local_gpu.plan.layout import ORDER
    from local_gpu.sample.supervisor import KEY

    local, fit, shipped = settings.local, arranged.fit, settings.run.model_name in MODELS
    key = local.sampler_api_key.get_secret_value() if local.sampler_api_key else None
    if fit is not None:
        os.environ.setdefault(*ORDER)  # torch counts GPUs as nvidia-smi does
    config = LocalConfig(
        model=folder,
        name=settings.served_name,
        root=settings.run.directory,
        rank=settings.training.lora_rank,
        alpha=LORA_ALPHA,
        seed=settings.run.seed,
        device="cpu" if shipped and local.device == "auto" else local.device,
        dtype=local.base_dtype if arranged.gpus else _cpu_dtype(settings),
        quantization=local.base_quantization,
        ranks=arranged.ranks,
        sampler_urls=urls,
        sampler_api_key=key if urls == local.urls else KEY,
        student_topk=settings.training.opd_topk if build(settings.run.method).teaching else 0,
        context_tokens=settings.run.context_tokens,
    )
    if fit is None:
        return config
    return replace(
        config,
        device="cuda" if local.device == "auto" else local.device,
        train_gpus=tuple(arranged.first + index for index in arranged.layout.train),
        shard="on" if fit.shard else "off",
        micro_batch_tokens=fit.micro_batch_tokens,
        gpu_memory=fit.learner_memory,
    )


def _servings(settings: Settings, arranged: Arrangement, folder: str) -> Servings:
    from local_gpu.model.load import image_token
    from local_gpu.plan.commands import Servings

    # A layout with samplers implies that there is a vLLM, and that the fit was computed.
    assert arranged.vllm is not None
    assert arranged.demand is not None
    assert arranged.fit is not None
    assert arranged.fit.sampler_memory is not None
    return Servings(
        vllm=arranged.vllm,
        model=folder,
        context_tokens=arranged.demand.context_tokens,
        rank=settings.training.lora_rank,
        memory=arranged.fit.sampler_memory,
        cache=arranged.fit.sampler_cache,
        targets=arranged.demand.model.targets,
        streams=arranged.fit.streams,
        logprobs=settings.training.opd_topk,
        logs=settings.run.directory.absolute() / "logs",
        sees=settings.gateway.images != "off" and image_token(folder) is not None,
    )
