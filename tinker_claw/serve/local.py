"""The local backend at work: servers, then a trainer on the memory that they leave.

Rule: samplers start first, because they measure what is free; whatever was started ends with its
context, the trainer before them.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError, OutageError
from tinker_claw.methods import build, student_topk
from tinker_claw.policy import Trainer
from tinker_claw.serve.arrange import GET_VLLM, Arrangement, arrange, why_not
from tinker_claw.serve.model_files import judge_folder
from tinker_claw.telemetry import log

if TYPE_CHECKING:  # torch is imported only where it trains
    from local_gpu.config import LocalConfig
    from local_gpu.layout.commands import Servings
    from local_gpu.servers.processes import Launch

LORA_ALPHA: Final = 32


def check_fit(settings: Settings) -> None:
    """Say who does what, and refuse what does not fit, before anything is loaded.

    Raises:
        ConfigError: says what would fit.
    """
    arranged = arrange(settings)
    if (wrong := why_not(arranged)) is not None:
        raise ConfigError(f"{wrong}. `run.py doctor` with these flags shows the sum")
    fit = arranged.fit
    log.info(
        "layout",
        gpus=arranged.layout.told(),
        ranks=arranged.ranks,
        micro_batch_tokens=fit.micro_batch_tokens if fit else None,
        sampler_memory=fit.sampler_memory if fit else None,
        sharded=fit.shard if fit else None,
    )
    if fit is not None and not arranged.layout.serve and not settings.local.urls:
        log.warning("sampler.embedded", risk=f"this process samples; {GET_VLLM}")


@asynccontextmanager
async def open_local(
    settings: Settings, folder: str, away: Callable[[Sequence[str]], object] = len
) -> AsyncGenerator[Trainer]:
    """Servers first, then the trainer on the memory that they leave; ended in the other order.

    `away` hears which servers are out of the rotation, and why, whenever that changes.

    Raises:
        ConfigError, BackendError: something does not start.
    """
    arranged = arrange(settings)
    async with AsyncExitStack() as stack:
        urls = settings.local.urls
        if arranged.layout.serve:
            from local_gpu.layout import commands

            what = _servings(settings, arranged, folder)
            launched = commands.samplers(arranged.layout.serve, arranged.gpus, what)
            urls = await stack.enter_async_context(_running(launched))
        from local_gpu.trainer import LocalTrainer  # torch: only where it trains

        config = local_config(settings, folder, arranged, urls)
        try:
            trainer = await LocalTrainer.start(
                config, say=lambda told: log.info("local", told=told), away=away
            )
        except OutageError as error:
            if not settings.local.urls:
                raise
            raise ConfigError(
                f"--sampler-urls: {error} See that a server runs there, or mend the address"
            ) from error
        stack.push_async_callback(trainer.aclose)
        yield trainer


@asynccontextmanager
async def open_judge(settings: Settings) -> AsyncGenerator[str]:
    """The judge's own server, on its own GPUs; its address, as `--judge-url` would give it.

    Raises:
        ConfigError: it does not start.
    """
    from local_gpu.layout import commands

    arranged = arrange(settings)
    assert arranged.vllm is not None  # arrange has refused it
    assert arranged.demand is not None
    assert arranged.demand.judge is not None
    assert arranged.fit is not None
    assert arranged.fit.judge_memory is not None
    launched = commands.judge(
        arranged.layout.judge,
        arranged.gpus,
        vllm=arranged.vllm,
        model=judge_folder(settings),
        name=settings.judge.judge_model,
        context_tokens=arranged.demand.judge.context_tokens,
        memory=arranged.fit.judge_memory,
        logs=_logs(settings),
    )
    async with _running([launched]) as urls:
        yield f"{urls[0]}/v1"


@asynccontextmanager
async def _running(launched: Sequence[Launch]) -> AsyncGenerator[tuple[str, ...]]:
    from local_gpu.servers.processes import Servers

    servers = Servers(launched, lambda told: log.info("servers", told=told))
    try:
        await servers.ready()
        log.info("servers.ready", urls=servers.urls)
        yield servers.urls
    finally:
        await asyncio.to_thread(servers.stop)


def local_config(
    settings: Settings, folder: str, arranged: Arrangement, urls: tuple[str, ...]
) -> LocalConfig:
    """The trainer's part."""
    from local_gpu.config import LocalConfig
    from local_gpu.layout.gpus import ORDER

    local, fit = settings.local, arranged.fit
    if fit is not None:
        os.environ.setdefault(*ORDER)  # torch counts GPUs as nvidia-smi does
    config = LocalConfig(
        model=folder,
        name=settings.served_name,
        root=settings.run.directory,
        rank=settings.training.lora_rank,
        alpha=LORA_ALPHA,
        seed=settings.run.seed,
        device=local.device,
        dtype=local.dtype,
        quantization=local.base_quantization,
        checkpointing=local.checkpointing,
        attention=local.attention,
        micro_batch_tokens=local.micro_batch_tokens,
        ranks=arranged.ranks,
        shard=local.shard,
        torchrun=tuple(shlex.split(local.torchrun or "")),
        sampler_urls=urls,
        sampler_api_key=key.get_secret_value() if (key := local.sampler_api_key) else None,
        sampler_kind=local.sampler_kind if local.urls else "vllm" if urls else "auto",
        student_topk=student_topk(build(settings.run.method), settings.training),
        context_tokens=settings.run.context_tokens,
        kv_cache_tokens=local.kv_cache_tokens,
        threads=local.threads,
    )
    if fit is None:
        return config
    return replace(
        config,
        device="cuda" if local.device == "auto" else local.device,
        train_gpus=tuple(arranged.first + index for index in arranged.layout.train),
        shard="on" if fit.shard else "off",
        micro_batch_tokens=fit.micro_batch_tokens,
    )


def _servings(settings: Settings, arranged: Arrangement, folder: str) -> Servings:
    from local_gpu.layout.commands import Servings

    # A layout with samplers was made because there is a vLLM, and was reckoned.
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
        quantization=settings.local.sampler_quantization,
        logprobs=settings.training.opd_topk,
        logs=_logs(settings),
    )


def _logs(settings: Settings) -> Path:
    return settings.run.directory.absolute() / "logs"
