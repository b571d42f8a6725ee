"""What all groups of settings have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tinker_claw.config.gpu import check_local
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback
from tinker_claw.privacy.rules import KINDS, SECRETS


class Section(BaseModel):
    """A group of settings; its docstring heads the group in --help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )


# Who may call the gateway: loopback, users and their keys.
#
# Rule: an address that other machines can reach needs a key, and no sentence here ever holds one.


DEMO = "demo"
DEFAULT_USER = "default"
"""Who calls without a key, or with --api-key."""
MIN_KEY_CHARACTERS = 16
_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"
_KEY = re.compile(r"[!-~]{1,512}")
"""What can be sent in a header as it is."""
_MAKE_ONE = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a good one"


class User(BaseModel):
    """One who may call; a table [[users]] of the settings file"""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(
        pattern=_NAME,
        description="a short plain word: it stands in the ledger and in log lines",
    )
    key: SecretStr = Field(description="key that this user's clients send")
    role: Literal["user", "admin"] = Field(
        "user", description="an admin is shown everybody's figures, spending and errors"
    )
    group: str | None = Field(
        None,
        pattern=_NAME,
        description="users of one group share what was computed of their prompts, which is faster; "
        "how fast an answer comes may tell one of them what another has asked",
    )


def check_access(host: str, api_key: SecretStr | None, users: Sequence[User]) -> None:
    """Refuse what would let strangers in, or users be taken for one another.

    Raises:
        ConfigError: says what to set.
    """
    keys = dict(_keys(api_key, users))
    if not is_loopback(host) and not keys:
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --api-key, or give each user a "
            "key ([[users]] in the settings file), or bind to 127.0.0.1"
        )
    names = [user.name for user in users] + ([DEFAULT_USER] if api_key is not None else [])
    for name in names:
        if names.count(name) > 1:
            twice = f"users: the name {name!r} is given twice"
            raise ConfigError(f"{twice}; --api-key is the key of the user {DEFAULT_USER!r}")
    for whose, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{whose}: a key is made of ASCII letters, digits and signs, without blanks, at "
                f"most 512 of them; {_MAKE_ONE}"
            )
        if len(key) < MIN_KEY_CHARACTERS:
            raise ConfigError(
                f"{whose}: a key of fewer than {MIN_KEY_CHARACTERS} characters can be guessed; "
                f"{_MAKE_ONE}"
            )
    if len(set(keys.values())) < len(keys):
        raise ConfigError("users: two users have the same key; a key must name one user")


def _keys(api_key: SecretStr | None, users: Sequence[User]) -> Iterator[tuple[str, str]]:
    """Every key, and how to speak of it."""
    if api_key is not None:
        yield "--api-key", api_key.get_secret_value()
    for n, user in enumerate(users):
        yield f"users[{n}].key", user.key.get_secret_value()


# The settings of the included torch backend: devices, GPUs, samplers.
#
# Rule: each is declared here alone; which of them exclude one another is said in `config.gpus`.


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


# The tree of settings: names, defaults, bounds and what each is for.
#
# Rule: a setting is declared here and nowhere else; the flags and their help are derived from it.


ENV_PREFIX = "TINKER_CLAW_"


class Run(Section):
    """What runs, and where it keeps its records"""

    method: str = Field(
        default="combine",
        description="how turns become training (docs/methods.md has them); rl = binary",
    )
    model_name: str = Field(
        default="Qwen/Qwen3-8B",
        description="model: a hub id, a local folder, or 'demo' (shipped, CPU)",
    )
    backend: Literal["tinker", "local"] = Field(
        default="tinker",
        description="who trains and samples: the Tinker service, or torch on this machine",
    )
    base_url: str | None = Field(
        default=None,
        description="address of another Tinker server (python -m local_gpu.tinker is one)",
    )
    tokenizer: str | None = Field(
        default=None,
        description="hub id or folder of the tokenizer; --model-name unless set",
    )
    data_dir: Path | None = Field(
        default=None, description="ledger, states and metrics; runs/<model>-<method> unless set"
    )
    resume: bool = Field(
        default=True, description="go on with the run that the data directory holds"
    )
    renderer: str = Field(
        default="auto",
        description="chat format from the renderers package; auto goes by the name of the model or "
        "of its folder",
    )
    context_tokens: int | None = Field(
        default=None, ge=16, description="context, at most the model's; the model's unless set"
    )
    seed: int = Field(default=0, description="seed of the adapter's first weights")
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: readable on a terminal, JSON lines otherwise"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _accept_rl(cls, value: Any) -> Any:
        return "binary" if value == "rl" else value

    @property
    def directory(self) -> Path:
        """The data directory in force."""
        name = self.model_name.rstrip("/").rsplit("/", 1)[-1]
        return self.data_dir or Path("runs") / f"{name}-{self.method}"


class Gateway(Section):
    """The OpenAI-compatible endpoint that the agent talks to"""

    host: str = Field(
        default="127.0.0.1", description="address to bind; one that is not loopback needs a key"
    )
    port: int = Field(default=30000, ge=0, le=65535, description="port; 0 takes a free one")
    api_key: SecretStr | None = Field(
        default=None, description="key that clients must send; [[users]] gives each user his own"
    )
    served_model_name: str | None = Field(
        default=None, description="name under which the model is offered; --model-name unless set"
    )
    max_reply_tokens: int = Field(
        default=4096, ge=1, description="tokens of a reply when the request names no limit"
    )
    max_body_bytes: int = Field(
        default=16_000_000, ge=1024, description="largest request body, bytes"
    )
    body_timeout_s: float = Field(
        default=60.0, gt=0, description="longest wait for a request's body, seconds"
    )
    max_concurrent: int = Field(
        default=64, ge=1, description="replies that are sampled at the same time"
    )
    max_queue: int = Field(
        default=256, ge=0, description="requests of one user that may wait behind them"
    )
    keepalive_s: float = Field(default=10.0, gt=0, description="seconds between keep-alive chunks")
    session_idle_s: float = Field(
        default=21600.0,
        gt=0,
        description="a session without a request for so long is closed until it goes on, seconds",
    )
    outage_patience_s: float = Field(
        default=240.0,
        ge=0,
        description="how long a request is tried again while the service is away, seconds",
    )


class JudgeSettings(Section):
    """The judge that turns a next state into votes and hints"""

    prm_m: int = Field(default=3, ge=1, description="votes per turn; odd numbers avoid ties")
    prm_temperature: float = Field(default=0.6, ge=0, description="temperature of the votes")
    prm_max_tokens: int = Field(
        default=4096, ge=16, description="tokens per vote, thinking included"
    )
    judge_url: str | None = Field(
        default=None,
        description="OpenAI-compatible endpoint (…/v1); the base model judges unless set",
    )
    judge_model: str = Field(default="judge", description="model name to ask for at --judge-url")
    judge_api_key: SecretStr | None = Field(default=None, description="key for --judge-url")
    judge_timeout_s: float = Field(
        default=120.0, gt=0, description="seconds per answer of --judge-url"
    )
    judge_concurrency: int = Field(default=8, ge=1, description="turns judged at the same time")


class Training(Section):
    """How samples become steps (the README's part "Methods")"""

    batch_size: int = Field(default=16, ge=1, description="trainable samples per optimizer step")
    observe: bool = Field(default=False, description="judge and queue samples, and train nothing")
    max_steps: int | None = Field(
        default=None, ge=0, description="stop learning after so many steps"
    )
    learning_rate: float | Literal["auto"] = Field(
        default=1e-4, description="Adam's rate; auto: by hidden size"
    )
    lora_rank: int = Field(
        default=32, ge=1, le=512, description="rank of the adapter, at most 512; alpha is 32"
    )
    w_rl: float = Field(default=1.0, ge=0, description="weight of the reward part")
    w_opd: float = Field(default=1.0, ge=0, description="weight of the distillation part")
    opd_mode: Literal["topk", "token"] = Field(
        default="topk", description="what the teacher scores"
    )
    opd_topk: int = Field(default=4, ge=1, description="candidates per token in topk mode")
    opd_clip: float = Field(
        default=1.0, ge=0, description="bound on teacher - student, nats; 0 = none"
    )
    teacher: Literal["base", "policy"] = Field(
        default="base", description="who scores under the hint; policy collapsed when measured"
    )
    baseline: Literal["batch_mean", "none"] = Field(
        default="batch_mean", description="subtracted from rewards; none is plain REINFORCE"
    )
    norm: Literal["sample", "constant"] = Field(
        default="sample", description="divide by each reply's length, or by the longest reply's"
    )
    clip_low: float = Field(
        default=0.8, gt=0, le=1, description="lower bound of the ratio, absolute"
    )
    clip_high: float = Field(default=1.28, ge=1, description="upper bound of the ratio, absolute")
    kl_beta: float = Field(default=0.0, ge=0, description="pull towards the base model, per nat")
    hint_candidates: int = Field(
        default=1, ge=1, description="hints scored per turn; each costs a pass"
    )
    max_staleness: int = Field(
        default=4, ge=0, description="optimizer steps after which samples expire"
    )
    save_interval: int = Field(default=1, ge=1, description="steps between saved states")


class Tinker(Section):
    """The Tinker service; its key is taken from TINKER_API_KEY"""

    sample_timeout_s: float = Field(
        default=300.0, gt=0, description="longest wait for one reply or score, seconds"
    )
    step_timeout_s: float = Field(
        default=900.0, gt=0, description="longest wait for one optimizer step, seconds"
    )
    save_timeout_s: float = Field(
        default=600.0, gt=0, description="longest wait to save, load or publish weights, seconds"
    )
    start_timeout_s: float = Field(
        default=60.0, gt=0, description="longest wait for the service at start, seconds"
    )


class Keeping(Section):
    """What is kept of your words, and for how long"""

    redact: str = Field(
        default=SECRETS,
        description=f"what is never stored, judged or trained: {', '.join(KINDS)}, with commas "
        "between them; or all, or none",
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="drop texts and tokens of turns that old and done with; kept unless set",
    )
    keep_gb: float | None = Field(
        default=None,
        gt=0,
        description="drop those of the oldest while the ledger is larger; kept unless set",
    )

    @field_validator("redact")
    @classmethod
    def _known_kinds(cls, value: str) -> str:
        unknown = {kind.strip() for kind in value.split(",")} - {*KINDS, "all", "none"}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))!r} is none of {', '.join(KINDS)}")
        return value

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that are redacted."""
        named = {kind.strip() for kind in self.redact.split(",")}
        return frozenset(KINDS) if "all" in named else frozenset(named) - {"none"}


class Spend(Section):
    """What a service may cost"""

    budget_usd: float | None = Field(
        default=None, gt=0, description="stop judging and training at this sum; serving goes on"
    )
    prices: Path | None = Field(
        default=None, description="price table; configs/prices.toml unless set"
    )


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
        hide_input_in_errors=True,
    )

    run: Run = Run()
    gateway: Gateway = Gateway()
    judge: JudgeSettings = JudgeSettings()
    training: Training = Training()
    tinker: Tinker = Tinker()
    privacy: Keeping = Keeping()
    spend: Spend = Spend()
    local: Local = Local()
    users: tuple[User, ...] = ()
    """Who may call, each with a key of his own; nobody: whoever has --api-key, if that is set."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The caller merges command line and file; nothing is read behind its back."""
        return (init_settings,)

    @property
    def served_name(self) -> str:
        return self.gateway.served_model_name or self.run.model_name

    def check(self) -> None:
        """Refuse settings that exclude one another.

        Raises:
            ConfigError: says which, and what works.
        """
        check_access(self.gateway.host, self.gateway.api_key, self.users)
        check_local(self.run, self.judge, self.local)
        if self.training.clip_low >= self.training.clip_high:
            raise ConfigError("--clip-low must be below --clip-high")
