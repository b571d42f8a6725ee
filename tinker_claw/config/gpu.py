"""Settings of the local backend that exclude one another.

Rule: a sentence names what was set, by its flag and by the variable that may have set it, and says
what works. What depends on the machine is not looked at here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tinker_claw.errors import ConfigError

if TYPE_CHECKING:
    from tinker_claw.config.settings import JudgeSettings, Local, Run


VARIABLES: Final = {
    "NUM_GPUS": "gpus",
    "ACTOR_GPUS": "actor_gpus",
    "ROLLOUT_GPUS": "rollout_gpus",
    "PRM_GPUS": "prm_gpus",
}
"""OpenClaw-RL's variables, and the fields that they set where nothing else does."""
_DEMO: Final = "demo"
_URL: Final = re.compile(r"https?://[^/\s]+")


def check_local(run: Run, judge: JudgeSettings, local: Local) -> None:
    """Refuse what cannot be meant together.

    Raises:
        ConfigError: says what to leave out, or what to set.
    """
    for wrong in _wrong(run, judge, local):
        raise ConfigError(wrong)


def _wrong(run: Run, judge: JudgeSettings, local: Local) -> Iterator[str]:
    yield from _service(run, local)
    yield from _counts(local)
    yield from _judge(judge, local)
    yield from _demo(run, local)
    yield from _servers(local)
    yield from _processor(local)
    try:
        shlex.split(local.torchrun or "")
    except ValueError as error:
        yield f"--torchrun cannot be split into arguments ({error}); mind its quotes"


def _service(run: Run, local: Local) -> Iterator[str]:
    """Whoever names his GPUs does not mean a service that bills him."""
    given = {
        "--gpus": local.gpus is not None,
        "--actor-gpus": local.actor_gpus is not None,
        "--rollout-gpus": local.rollout_gpus is not None,
        "--prm-gpus": local.prm_gpus > 0,
        "--sampler-urls": local.sampler_urls is not None,
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if run.backend == "tinker" and named:
        yield (
            f"{', '.join(named)}: with --backend tinker, the default, a service trains and "
            "samples; add --backend local, or leave it out"
        )


def _counts(local: Local) -> Iterator[str]:
    if local.rollout_gpus is not None and local.rollout_gpus % local.rollout_tp:
        yield (
            f"--rollout-gpus {local.rollout_gpus} (ROLLOUT_GPUS) cannot be split into servers of "
            f"--rollout-tp {local.rollout_tp} GPUs; give a multiple of it"
        )
    if local.gpus is None:
        return
    parts = {
        "--actor-gpus": local.actor_gpus or 0,
        "--rollout-gpus": local.rollout_gpus or 0,
        "--prm-gpus": local.prm_gpus,
    }
    wanted = sum(parts.values())
    alone = local.gpus == 1 and not local.prm_gpus  # trainer and sampler share it
    if wanted > local.gpus and not (alone and max(parts.values()) == 1):
        named = " + ".join(f"{flag} {count}" for flag, count in parts.items() if count)
        yield (
            f"{named} are {wanted} GPUs, but --gpus (NUM_GPUS) is {local.gpus}; lower one of them, "
            "or leave them out and the layout goes by --gpus"
        )


def _judge(judge: JudgeSettings, local: Local) -> Iterator[str]:
    if local.prm_gpus and local.prm_model_name is None:
        yield (
            f"--prm-gpus {local.prm_gpus} (PRM_GPUS) needs a model to judge there: set "
            "--prm-model-name, or leave it out, and the base model judges on the samplers"
        )
    if local.prm_model_name is not None and not local.prm_gpus:
        yield (
            "--prm-model-name needs GPUs of its own: set --prm-gpus; or --judge-url, where a "
            "server with that model runs already"
        )
    if local.prm_gpus and judge.judge_url is not None:
        yield "--judge-url and --prm-gpus (PRM_GPUS) name two judges; leave one of them out"


def _servers(local: Local) -> Iterator[str]:
    if local.sampler_urls is None:
        if local.sampler_kind != "auto":
            yield f"--sampler-kind {local.sampler_kind} is for --sampler-urls; leave it out"
        if local.sampler_api_key is not None:
            yield "--sampler-api-key is for --sampler-urls; leave it out"
        return
    if not local.urls:
        yield "--sampler-urls is empty; name a server, or leave it out"
    for url in local.urls:
        if not _URL.match(url):
            yield f"--sampler-urls: {url!r} is no address; write http://HOST:PORT"
    started = {
        "--rollout-gpus (ROLLOUT_GPUS)": local.rollout_gpus is not None,
        "--rollout-tp": local.rollout_tp > 1,
        "--vllm": local.vllm is not None and not local.prm_gpus,
        "--sampler-memory": local.sampler_memory is not None,
        "--sampler-quantization": local.sampler_quantization is not None,
        "--kv-cache-tokens": local.kv_cache_tokens is not None,
    }
    if unused := [flag for flag, given in started.items() if given]:
        yield (
            f"{', '.join(unused)} is for samplers that are started here; --sampler-urls names some "
            "that run already: leave one of the two out"
        )


def _demo(run: Run, local: Local) -> Iterator[str]:
    if run.model_name != _DEMO:
        return
    for_others = {
        "--gpus": local.gpus is not None,
        "--rollout-gpus": local.rollout_gpus is not None,
        "--prm-gpus": local.prm_gpus > 0,
        "--rollout-tp": local.rollout_tp > 1,
        "--base-quantization": local.base_quantization != "none",
    }
    if named := [flag for flag, given in for_others.items() if given]:
        yield (
            f"{', '.join(named)}: the model demo needs no GPU; leave it out, or name another model"
        )


def _processor(local: Local) -> Iterator[str]:
    if local.base_quantization == "4bit" and local.shard == "on":
        yield "--shard on splits a base in bfloat16; with --base-quantization 4bit leave it out"
    if local.device.startswith("cuda:") and (local.gpus or local.actor_gpus or 1) > 1:
        yield f"--device {local.device} is one GPU; for several give --gpus and --device cuda"
    if local.device != "cpu":
        return
    needs_gpu = {
        "--gpus (NUM_GPUS)": local.gpus is not None,
        "--rollout-gpus (ROLLOUT_GPUS)": local.rollout_gpus is not None,
        "--prm-gpus (PRM_GPUS)": local.prm_gpus > 0,
        "--rollout-tp": local.rollout_tp > 1,
        "--base-quantization 4bit": local.base_quantization == "4bit",
    }
    if named := [flag for flag, given in needs_gpu.items() if given]:
        yield f"{', '.join(named)} needs GPUs, but --device is cpu; leave one of the two out"
