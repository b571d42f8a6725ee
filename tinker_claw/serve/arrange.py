"""Who does what on this machine: GPUs shared out, and whether that fits.

Rule: counts and memory are reckoned before anything is loaded. What the settings leave open is
decided here, and nothing is started.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinker_claw.config import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.serve.model_files import DEMO, config_folder

if TYPE_CHECKING:  # `local_gpu` is imported where something is reckoned
    from local_gpu.layout.fits import Demand, Fit
    from local_gpu.layout.gpus import Gpu
    from local_gpu.layout.plan import Layout

_VLLM: Final = Path(".venv-vllm") / "bin" / "vllm"
_UNTIL_0_27: Final = Path("vllm/model_executor/layers/quantization/bitsandbytes.py")
_EMBEDDED_CONTEXTS: Final = 1.5
"""Contexts of KV cache per version in the embedded sampler, where no setting says how many."""
GET_VLLM: Final = (
    "vLLM is put into an environment of its own: python3.11 -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm==0.32.0"
)
_ALONE: Final = (
    "--shard on splits the base over the ranks that learn, and there is one: --actor-gpus 2"
)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which GPU does what, and what that takes."""

    layout: Layout
    gpus: tuple[Gpu, ...]
    """In the order of the layout's numbers; () on a CPU."""
    first: int
    """What torch calls the first of them."""
    vllm: Path | None
    """None: there is none, or none is wanted."""
    demand: Demand | None
    fit: Fit | None
    """None on a CPU, and for the demo's model."""
    ranks: int


def arrange(settings: Settings, *, only_reckon: bool = False) -> Arrangement:
    """Share out what there is.

    Args:
        only_reckon: for GPUs that need not be here, if --gpu-memory-gb says what they have.

    Raises:
        ConfigError: it cannot be done; says what to set.
    """
    from local_gpu.layout.fits import reckon
    from local_gpu.layout.plan import Layout, Wanted, plan

    local = settings.local
    gpus, first = _gpus(settings, only_reckon=only_reckon)
    vllm = find_vllm(settings)
    if not gpus:
        if local.shard == "on" and (local.actor_gpus or 1) * nodes(settings) == 1:
            raise ConfigError(_ALONE)
        return Arrangement(Layout((), ()), (), 0, None, None, None, local.actor_gpus or 1)
    started = not local.urls and (vllm is not None or only_reckon)
    if vllm is None and not only_reckon:
        _refuse_without_vllm(settings)
    if vllm is not None and not only_reckon:
        check_quantization(settings, vllm)
    layout = plan(
        Wanted(
            gpus=local.gpus or len(gpus),
            actor=local.actor_gpus if started or local.urls else local.actor_gpus or 1,
            rollout=local.rollout_gpus,
            judge=local.prm_gpus,
            tensor_parallel=local.rollout_tp,
            samples=started,
        )
    )
    ranks = len(layout.train)
    if local.shard == "on" and ranks * nodes(settings) == 1:
        raise ConfigError(_ALONE)
    demand = _demand(settings, embedded=not started and not local.urls)
    return Arrangement(layout, gpus, first, vllm, demand, reckon(layout, gpus, demand), ranks)


def why_not(arranged: Arrangement) -> str | None:
    """What does not fit, and what would; None where all does."""
    from local_gpu.layout.advice import advice

    fit, demand = arranged.fit, arranged.demand
    if fit is None or demand is None or not fit.short:
        return None
    would = advice(arranged.layout, arranged.gpus, demand)
    best = "; or ".join(would) or "larger GPUs, or a smaller model"
    return f"It does not fit, by arithmetic. {'. '.join(fit.short)}. What would fit: {best}"


def find_vllm(settings: Settings) -> Path | None:
    """The executable of vLLM: what was named, else the usual places.

    Raises:
        ConfigError: what was named is not there.
    """
    named = settings.local.vllm
    if named is None:
        usual = shutil.which(_VLLM) or shutil.which("vllm")
        return Path(usual).absolute() if usual else None
    found = shutil.which(Path(named).expanduser())
    if found is None:
        raise ConfigError(f"--vllm {named} is no executable; {GET_VLLM}")
    return Path(found).absolute()


def check_quantization(settings: Settings, vllm: Path) -> None:
    """vLLM has given up bitsandbytes with 0.28: since then that is a package beside it.

    Raises:
        ConfigError: it is not there.
    """
    if settings.local.sampler_quantization != "bitsandbytes":
        return
    environment = vllm.resolve().parents[1]
    for packages in environment.glob("lib/python3*/site-packages"):
        known = (packages / "vllm_bnb_plugin", packages / _UNTIL_0_27)
        if (packages / "vllm").is_dir() and not any(path.exists() for path in known):
            raise ConfigError(
                "--sampler-quantization bitsandbytes: this vLLM needs a package for that: "
                f"{environment}/bin/python -m pip install vllm-bnb-plugin"
            )


def _refuse_without_vllm(settings: Settings) -> None:
    local = settings.local
    needs = {
        "--rollout-gpus (ROLLOUT_GPUS)": local.rollout_gpus is not None,
        "--rollout-tp": local.rollout_tp > 1,
        "--prm-gpus (PRM_GPUS)": local.prm_gpus > 0,
        "--sampler-memory": local.sampler_memory is not None,
        "--sampler-quantization": local.sampler_quantization is not None,
    }
    if named := [flag for flag, given in needs.items() if given]:
        raise ConfigError(
            f"{', '.join(named)} needs vLLM, and there is none in {_VLLM} or on PATH: "
            f"name it with --vllm. {GET_VLLM}"
        )


def _gpus(settings: Settings, *, only_reckon: bool) -> tuple[tuple[Gpu, ...], int]:
    """The GPUs to use, and what torch calls the first; () for the CPU.

    Raises:
        ConfigError: there are fewer than were asked for.
    """
    from local_gpu.layout.gpus import numbered, visible

    local = settings.local
    if local.device == "cpu" or settings.run.model_name == DEMO:
        return (), 0
    if only_reckon and local.gpu_memory_gb is not None:
        return numbered(local.gpus or 1, local.gpu_memory_gb), 0
    seen, first = visible(gib=local.gpu_memory_gb), 0
    if not seen and local.gpu_memory_gb is not None:  # not Nvidia's: they cannot be asked
        seen = numbered(local.gpus or 1, local.gpu_memory_gb)
    if local.device.startswith("cuda:"):
        number = local.device.partition(":")[2]
        first = int(number) if number.isdecimal() else len(seen)
        seen = seen[first : first + 1]
    wanted = {
        f"--device {local.device}": local.device != "auto",
        "--gpus (NUM_GPUS)": local.gpus is not None,
        "--rollout-gpus (ROLLOUT_GPUS)": local.rollout_gpus is not None,
        "--prm-gpus (PRM_GPUS)": local.prm_gpus > 0,
        "--rollout-tp": local.rollout_tp > 1,
        "--base-quantization 4bit": local.base_quantization != "none",
    }
    named = [flag for flag, given in wanted.items() if given]
    if (not seen and named) or len(seen) < (local.gpus or 0):
        cure = "ask for no more" if seen else "mend the driver, or leave it out to learn on the CPU"
        raise ConfigError(
            f"{', '.join(named)}: nvidia-smi and CUDA_VISIBLE_DEVICES show {len(seen)} GPUs here; "
            f"{cure}. (`run.py doctor` also reckons with GPUs that are elsewhere: give it "
            "--gpu-memory-gb)"
        )
    return seen, first


def _demand(settings: Settings, *, embedded: bool) -> Demand:
    from local_gpu.layout.fits import Demand
    from local_gpu.layout.model_size import model_size

    local = settings.local
    model = model_size(config_folder(settings.run.model_name, "--model-name"))
    judging = local.prm_model_name
    context = min(model.context_tokens, settings.run.context_tokens or model.context_tokens)
    cache = local.kv_cache_tokens or int(context * _EMBEDDED_CONTEXTS)
    return Demand(
        model=model,
        rank=settings.training.lora_rank,
        context_tokens=context,
        quantization=local.base_quantization,
        width=4 if local.dtype == "float32" else 2,
        checkpointing=local.checkpointing != "off",
        shard=local.shard,
        nodes=nodes(settings),
        micro_batch_tokens=local.micro_batch_tokens,
        sampler_memory=local.sampler_memory,
        sampler_quantization=local.sampler_quantization,
        embedded_tokens=cache if embedded else 0,
        judge=model_size(config_folder(judging, "--prm-model-name")) if judging else None,
    )


def nodes(settings: Settings) -> int:
    """Machines that learn together: torchrun's --nnodes, of which MIN:MAX counts as MIN."""
    words = shlex.split((settings.local.torchrun or "").replace("=", " "))
    for flag, value in pairwise(words):
        if flag == "--nnodes":
            count = value.partition(":")[0]
            if not count.isdecimal() or int(count) < 1:
                raise ConfigError(f"--torchrun: --nnodes {value} is no number of machines")
            return int(count)
    return 1
