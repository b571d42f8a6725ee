"""Settings of the local backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinker_claw.errors import ConfigError
from tinker_claw.policy import KEPT_SAMPLERS, KEPT_STATES

Say = Callable[[str], None]
"""Called with a sentence for the user: what is waited for, what was chosen, what goes wrong."""


def ignore(sentence: str) -> None:
    """Ignore a sentence: the default of a `Say`."""


Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Settings of the local backend."""

    model: str
    """A folder with a causal LM in Hugging Face format, or a hub id."""
    root: Path
    """Folder of adapters and states; a later process with the same root finds them again."""
    name: str | None = None
    """Name shown to users; None shows `model`."""
    rank: int = 32
    alpha: int = 32
    seed: int = 0
    """Seed of the initial adapter's weights."""
    device: str = "auto"
    """auto, or torch's name of a device; auto is CUDA where available, else the CPU."""
    dtype: Dtype = "auto"
    """Number format of the base; adapters are float32. auto: bfloat16 on CUDA, else float32."""
    quantization: Literal["none", "4bit"] = "none"
    """Quantization of the base's linear layers (bitsandbytes, nf4)."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward and backward pass, each shared prefix counted once; None: by the
    memory."""
    gpu_memory: float | None = None
    """Share of a GPU's memory that a rank may take, where others need the rest; None: all of it."""
    ranks: int = 1
    """Number of training processes on this machine."""
    in_process: bool = True
    """Train in this process, if it is one rank on a CPU; False: in a process of its own, as always
    on CUDA."""
    train_gpus: tuple[int, ...] = ()
    """Indices of the visible GPUs that learn, one per rank; () takes the first ones."""
    shard: Literal["on", "off"] = "off"
    """Shard the frozen base over the ranks (FSDP2), where a GPU has too little memory for it."""
    sampler_urls: tuple[str, ...] = ()
    """URLs of vLLM servers that sample; () samples in this process."""
    sampler_api_key: str | None = field(default=None, repr=False)
    """API key for all of `sampler_urls`; None: they need none."""
    student_topk: int = 0
    """Top-k logprobs per token that will be asked for; servers that give fewer are refused."""
    context_tokens: int | None = None
    """Longest prompt and reply together; None: as many tokens as the model has positions."""
    keep_states: int = KEPT_STATES
    """Newest states that are kept, each with optimizer moments three times an adapter's size."""
    keep_adapters: int = KEPT_SAMPLERS
    """Newest published versions that are kept on disk, besides those that are open."""
    threads: int | None = None
    """Threads of torch, in the whole process; None leaves torch's own choice."""

    def __post_init__(self) -> None:
        counts = {
            "rank": self.rank,
            "alpha": self.alpha,
            "context_tokens": self.context_tokens,
            "keep_states": self.keep_states,
            "keep_adapters": self.keep_adapters,
            "micro_batch_tokens": self.micro_batch_tokens,
            "ranks": self.ranks,
            "threads": self.threads,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.quantization == "4bit" and self.shard == "on":
            raise ConfigError(
                "A base in 4 bits is not split over GPUs: each one holds it whole. Leave out the 4 "
                "bits (--base-quantization), or the split (shard)."
            )
