"""The settings of the included torch backend: devices, GPUs, samplers.

Rule: each is declared here alone; which of them exclude one another is said in `config.gpus`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from tinker_claw.config.section import Section


class Local(Section):
    """The included torch backend, and which GPU does what"""

    gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs to use (or NUM_GPUS); all that CUDA_VISIBLE_DEVICES shows unless set",
    )
    actor_gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs that learn (or ACTOR_GPUS), a quarter of them unless set; with --device "
        "cpu so many processes",
    )
    rollout_gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs that sample (or ROLLOUT_GPUS), those that are left unless set",
    )
    prm_gpus: int = Field(
        default=0,
        ge=0,
        description="GPUs of a judge of its own (or PRM_GPUS), one server over all of them; 0: the "
        "base model judges on the samplers",
    )
    prm_model_name: str | None = Field(
        default=None, description="judging model on --prm-gpus: a hub id or a folder"
    )
    rollout_tp: int = Field(
        default=1, ge=1, description="GPUs per sampler server (tensor parallel)"
    )
    gpu_memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="memory of each GPU, as its name says; nvidia-smi is asked unless set",
    )
    vllm: str | None = Field(
        default=None,
        description="vllm's executable, in an environment of its own; .venv-vllm/bin/vllm, or that "
        "on PATH, unless set",
    )
    sampler_urls: str | None = Field(
        default=None,
        description="vLLM or SGLang servers that are there already, with commas between them; "
        "none is started",
    )
    sampler_kind: Literal["auto", "vllm", "sglang"] = Field(
        default="auto", description="what --sampler-urls are; auto asks them"
    )
    sampler_api_key: SecretStr | None = Field(
        default=None, description="key that --sampler-urls want, as vLLM's --api-key sets it"
    )
    sampler_memory: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of a GPU's memory that its sampler takes; by the layout unless set",
    )
    sampler_quantization: str | None = Field(
        default=None,
        description="of the sampler's weights, as vllm names it, e.g. bitsandbytes (which is a "
        "package beside vllm: vllm-bnb-plugin)",
    )
    base_quantization: Literal["none", "4bit"] = Field(
        default="none", description="of the base that learns (bitsandbytes nf4); GPU only"
    )
    shard: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="split the base over the GPUs that learn (FSDP2); auto: where it is over 45 % "
        "of one",
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=16,
        description="tokens of one forward and backward pass; by the memory unless set",
    )
    attention: Literal["auto", "sdpa", "merged", "flex", "varlen"] = Field(
        default="auto", description="attention kernel of training and scoring"
    )
    torchrun: str | None = Field(
        default=None, description="further arguments of torchrun, for several machines, as a string"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="base weights; auto: float32 on a CPU, bfloat16 on a GPU"
    )
    checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compute activations again in the backward pass to save memory; auto: on a GPU",
    )
    kv_cache_tokens: int | None = Field(
        default=None,
        ge=256,
        description="tokens of KV cache per live version, where this process samples; 1.5 contexts "
        "unless set",
    )
    threads: int | None = Field(
        default=None, ge=1, description="torch threads; torch decides unless set"
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers of `sampler_urls`, each without a slash at its end."""
        named = (url.strip().rstrip("/") for url in (self.sampler_urls or "").split(","))
        return tuple(url for url in named if url)
