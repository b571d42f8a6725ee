"""The settings: names, defaults, bounds, what each is for and when to change it.

Rules: a setting is declared here and nowhere else; flags, their help and docs/settings.md are made
of the declarations. A secret has no flag, because a command line is there for every user of the
machine to read. Which settings exclude one another is said in `config.check`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from tinker_claw.privacy.rules import KINDS, SECRETS

ENV_PREFIX = "TINKER_CLAW_"
USERS = "users"
"""The setting that is no section: a list, without flags."""
VARIABLES = {
    "gpus": "NUM_GPUS",
    "rollout_gpus": "ROLLOUT_GPUS",
}
"""OpenClaw-RL's variables, by the fields of `Local` that they set where nothing else does."""
NEEDS_GPU = ("gpus", "rollout_gpus", "rollout_tp", "base_quantization")
"""Fields of `Local` that ask for GPUs."""
DEFAULT_USER = "default"
"""Who calls without a key, or with the gateway's `api_key`."""
_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"


def _setting(
    default: Any, description: str, *, when: str = "", unit: str = "", **bounds: Any
) -> Any:
    """Declare one setting.

    Args:
        description: what it is, as --help says it.
        when: when to change it, as the settings page says it, where that is not plain.
        unit: what its number counts.
        bounds: what its number may be, as pydantic has it (ge, gt, le).
    """
    described: Any = {
        "description": description,
        "json_schema_extra": {"when": when, "unit": unit},
    }
    return Field(default=default, **described, **bounds)


_MOST = 2**63
_VERSIONED = re.compile(r"@v\d+$")
"""End of a name that asks for a version."""


def _listed(text: str | None) -> tuple[str, ...]:
    """Split comma-separated text, without duplicates."""
    named = (name.strip() for name in (text or "").split(","))
    return tuple(dict.fromkeys(name for name in named if name))


class Section(BaseModel):
    """A group of settings, or a table of the file; the docstring heads a group in --help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:  # no path, address or name has one
            raise ValueError("it holds the character NUL; leave that out")
        return value

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        if isinstance(value, int) and not -_MOST <= value < _MOST:  # SQLite and torch take no more
            raise ValueError("it takes a number of at most 64 bits")
        return value


class Run(Section):
    """The run, and the folder of its records"""

    method: str = _setting("combine", "how turns become training (docs/methods.md); rl is binary")
    model_name: str = _setting(
        "Qwen/Qwen3-8B",
        "model: a hub id, a folder, 'small' (1.5B, fetched), or 'demo', 'demo-tracks' or "
        "'demo-screen' (shipped, CPU)",
    )
    backend: Literal["tinker", "local"] = _setting(
        "tinker", "who trains and samples: the Tinker service, or torch on this machine"
    )
    base_url: str | None = _setting(None, "address of another server that speaks Tinker's API")
    tokenizer: str | None = _setting(
        None, "hub id or folder of the tokenizer; the model's unless set"
    )
    data_dir: Path | None = _setting(
        None, "ledger, states and metrics; runs/<model>-<method> unless set"
    )
    renderer: str = _setting(
        "auto", "chat format from the renderers package; auto goes by the model's name"
    )
    context_tokens: int | None = _setting(
        None,
        "longest prompt and reply together; the model's unless set",
        unit="tokens",
        ge=16,
        when="the GPUs do not hold it (`tinker-claw doctor` says what fits)",
    )
    seed: int = _setting(0, "seed of the adapter's first weights")
    log: Literal["auto", "json"] = _setting(
        "auto", "auto: lines for people on a terminal, JSON lines elsewhere"
    )
    quiet: bool = _setting(False, "no line for each turn on the terminal, and no words")
    report_to: str | None = _setting(None, "trackers, separated by commas (docs/sinks.md)")

    @field_validator("method", mode="before")
    @classmethod
    def _accept_rl(cls, value: Any) -> Any:
        return "binary" if value == "rl" else value

    @property
    def sinks(self) -> tuple[str, ...]:
        """Names of sinks in `report_to`, without duplicates."""
        return _listed(self.report_to)

    @property
    def directory(self) -> Path:
        """The data directory in force."""
        name = self.model_name.rstrip("/").rsplit("/", 1)[-1]
        return self.data_dir or Path("runs") / f"{name}-{self.method}"


AGENTS_OF_ONE = ("hermes", "nanobot")
"""Agents in chat services that name no sender: their owner may say that nobody else reaches them.
"""


class Chats(Section):
    """Whose words count in chat services; a table [gateway.chats] of the settings file"""

    owners: tuple[str, ...] = Field(
        default=(),
        description="whom the agent belongs to in chats (telegram:123456789; hermes: nobody else "
        "can reach that bot)",
    )
    others_judge: bool = Field(
        default=False,
        description="let the words of others judge, like a tool's result",
    )

    @field_validator("owners")
    @classmethod
    def _channel_and_id(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            channel, colon, sender = name.strip().partition(":")
            alone = name.strip().lower() in AGENTS_OF_ONE
            if not alone and not (channel and colon and sender):
                raise ValueError(
                    f"{name!r} names no owner: write channel:sender id, as telegram:123456789"
                )
        return names


class Gateway(Section):
    """The endpoint that the agent talks to"""

    host: str = _setting("127.0.0.1", "address to bind; one that is not loopback needs a key")
    port: int = _setting(30000, "port; 0 takes a free one", ge=0, le=65535)
    api_key: SecretStr | None = _setting(None, "key that clients must send; none: make no key")
    served_model_name: str | None = _setting(
        None, "name under which the model is offered; --model-name unless set"
    )
    models: str | None = _setting(
        None, "other names of the model, separated by commas; one may end in *: claude-*"
    )
    max_reply_tokens: int = _setting(
        4096,
        "longest reply where the request names no limit; training divides by it",
        unit="tokens",
        ge=1,
    )
    thinking: Literal["auto", "on", "off"] = _setting(
        "auto",
        "whether a model that can thinks before it replies; auto: if the client asks",
    )
    sampling: Literal["client", "ours"] = _setting(
        "client",
        "whose temperature, top_p and top_k are used; ours are trained",
        when="`status` says that a client's replies train nothing (ours)",
    )
    page: bool = _setting(True, "a page at /ui: how it goes, turns and versions")
    max_concurrent: int = _setting(
        64, "replies sampled at the same time; others wait", unit="replies", ge=1
    )
    images: Literal["off", "serve", "train"] = _setting(
        "serve",
        "off refuses them, serve shows them to the model, train also trains them (docs/images.md)",
    )
    allow_origin: str | None = _setting(
        None,
        "origins of desktop apps that may send requests: app://obsidian.md",
    )
    agents: Literal["any", "listed"] = _setting(
        "any",
        "listed: the words of agents that docs/privacy.md does not list are nobody's",
        when="others can reach an agent of yours (listed)",
    )
    chats: Chats = _setting(Chats(), "whose words count in chat services (docs/privacy.md)")

    @field_validator("api_key", mode="before")
    @classmethod
    def _none_is_none(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("models")
    @classmethod
    def _stars_at_ends(cls, names: str | None) -> str | None:
        for name in _listed(names):
            if "*" in name[:-1]:
                raise ValueError(f"{name!r}: a * may stand at the end of a name only")
        return names

    def is_alias(self, name: str) -> bool:
        """Return whether a client may ask for the model by this name of another."""
        return _VERSIONED.search(name) is None and any(
            name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
            for pattern in _listed(self.models)
        )

    def aliases(self, served_name: str) -> tuple[str, ...]:
        """Return names that clients can choose from, one for each in `models`."""
        short = served_name.rstrip("/").rsplit("/", 1)[-1]
        return tuple(pattern.replace("*", short) for pattern in _listed(self.models))

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `allow_origin`, without duplicates."""
        return _listed(self.allow_origin)


class JudgeSettings(Section):
    """The judge that turns a next state into votes and hints"""

    prm_m: int = _setting(
        3,
        "votes per turn",
        unit="votes",
        ge=1,
        when="votes cost too much (1) or often disagree (5)",
    )
    judge_url: str | None = _setting(
        None, "OpenAI-compatible endpoint (…/v1) that judges; the base model unless set"
    )
    judge_model: str | None = _setting(None, "model to ask for at --judge-url")
    judge_api_key: SecretStr | None = _setting(None, "key for --judge-url")
    judge_prompts: Path | None = _setting(
        None, "TOML file with `user` or `tools`: what the judge is asked (docs/judges.md)"
    )
    judge_thinking: bool = _setting(
        False, "let the judge think before each answer, for ten times the tokens"
    )
    judge_images: bool = _setting(False, "show the judge at --judge-url images (docs/images.md)")
    headers: Mapping[str, SecretStr] = _setting(
        {}, "further headers for --judge-url, a table [judge.headers]"
    )

    @property
    def asked_model(self) -> str:
        """The name that requests to the judge's endpoint give."""
        return self.judge_model or "judge"


class Training(Section):
    """Training: steps made of samples"""

    batch_size: int = _setting(
        16,
        "samples per optimizer step",
        unit="samples",
        ge=1,
        when="steps should be steadier (larger), or sooner (smaller)",
    )
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = _setting(
        "auto",
        "Adam's rate; auto: by the model's hidden size",
        when="steps change nothing (higher), or replies get worse (lower)",
    )
    lora_rank: int = _setting(32, "rank of the adapter; fixed for a run", ge=1, le=512)
    w_rl: float = _setting(1.0, "weight of verdicts", ge=0)
    w_opd: float = _setting(1.0, "weight of hints", ge=0)
    opd_topk: int = _setting(
        4,
        "candidates per token, of the student and of the teacher",
        unit="candidates",
        ge=0,
        when="a server cannot score candidates (0)",
    )
    recipe: Literal["default", "paper"] = _setting(
        "default",
        "paper: the gradient of OpenClaw-RL as published, nothing beside it (docs/openclaw-rl.md)",
    )
    episode_reward: Literal["steps", "outcome"] = _setting(
        "steps", "reward of an episode's step: outcome and mean vote, or the outcome alone"
    )
    gate: Literal["on", "off"] = _setting(
        "on", "whether a version must pass canaries before it serves"
    )
    canaries: Path | None = _setting(
        None, "file of the canaries (docs/operating.md); configs/canaries.toml unless set"
    )
    lessons: Literal["on", "off"] = _setting(
        "on", "whether `/always` and kept wishes go into later sessions (docs/lessons.md)"
    )
    practice: Literal["off", "on"] = _setting(
        "off", "on: train lessons whose replies you accept, so that the model needs no telling"
    )
    max_staleness: int = _setting(
        4,
        "optimizer steps after which samples expire",
        unit="steps",
        ge=0,
        when="samples expire unused (higher)",
    )

    @field_validator("lessons", mode="before")
    @classmethod
    def _lessons_alone(cls, value: Any) -> Any:
        instead = {"tell": "--lessons on", "practice": "--practice on"}.get(value)
        if instead is not None:
            raise ValueError(f"write {instead}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _paper_alone(cls, values: Any) -> Any:
        if isinstance(values, dict) and cast("dict[str, Any]", values).get("recipe") == "paper":
            return {"gate": "off", "lessons": "off"} | cast("dict[str, Any]", values)
        return values

    @model_validator(mode="after")
    def _practice_of_lessons(self) -> Training:
        if self.practice == "on" and self.lessons == "off":
            raise ValueError("practice trains lessons: leave --lessons off out, or --practice on")
        return self

    @property
    def opd_mode(self) -> Literal["topk", "token"]:
        """Scoring by the teacher: of top-k candidates, or of the sampled token alone."""
        return "topk" if self.opd_topk else "token"

    @property
    def hints_scored(self) -> int:
        """Hints that the teacher scores for one turn, at most."""
        return 3 if self.recipe == "paper" else 1


class Keeping(Section):
    """Retention of your words"""

    redact: str = _setting(
        SECRETS,
        f"what is never stored, judged or trained: {', '.join(KINDS)}, all or none",
    )
    keep_days: float | None = _setting(
        None,
        "age at which texts and tokens of turns are dropped; kept unless set",
        unit="days",
        gt=0,
    )

    @field_validator("redact")
    @classmethod
    def _known_kinds(cls, value: str) -> str:
        unknown = {*_listed(value)} - {*KINDS, "all", "none"}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))!r} is none of {', '.join(KINDS)}")
        return value

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that are redacted."""
        named = frozenset(_listed(self.redact))
        return frozenset(KINDS) if "all" in named else named - {"none"}


@dataclass(frozen=True, slots=True)
class Budget:
    """A sum that may be spent, in US dollars."""

    usd: float
    monthly: bool = False
    """Whether it is that of each month, and not of the whole run."""

    def __str__(self) -> str:
        return f"${self.usd:g}" + " a month" * self.monthly


class Spend(Section):
    """Budget of a service"""

    budget_usd: float | str | None = _setting(
        None,
        "sum at which learning pauses: 5, or 20/month",
        unit="USD",
    )
    budget_serving: Literal["goes-on", "stops"] = _setting(
        "goes-on", "what serving does once the budget is spent"
    )
    prices: Path | None = _setting(None, "price table; configs/prices.toml unless set")

    @field_validator("budget_usd", mode="before")
    @classmethod
    def _a_sum(cls, value: Any) -> Any:
        """A number for the whole run, `<number>/month` for each month."""
        if value is None:
            return None
        number, slash, each = str(value).partition("/")
        try:
            usd = float(number)
        except ValueError:
            usd = 0.0
        if not 0 < usd < math.inf or (slash and each != "month"):
            raise ValueError(
                "a budget is a sum above 0 in US dollars, of the whole run (5) or of each month "
                "(20/month)"
            )
        return value if slash else usd

    @property
    def budget(self) -> Budget | None:
        if self.budget_usd is None:
            return None
        number, monthly, _ = str(self.budget_usd).partition("/")
        return Budget(float(number), monthly=bool(monthly))


class Local(Section):
    """The included torch backend (--backend local)"""

    gpus: int | None = _setting(
        None,
        "GPUs in all (or NUM_GPUS); those of CUDA_VISIBLE_DEVICES unless set",
        unit="GPUs",
        ge=1,
    )
    rollout_gpus: int | None = _setting(
        None,
        "GPUs that sample (or ROLLOUT_GPUS), all but one unless set (docs/gpus.md)",
        unit="GPUs",
        ge=1,
    )
    rollout_tp: int = _setting(1, "GPUs per sampler server (tensor parallel)", unit="GPUs", ge=1)
    sampler_urls: str | None = _setting(
        None, "vLLM servers that run already (configs/remote-samplers.toml)"
    )
    sampler_api_key: SecretStr | None = _setting(None, "key that --sampler-urls want")
    base_quantization: Literal["none", "4bit"] = _setting(
        "none", "quantization of the base that learns (bitsandbytes nf4); GPU only"
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto",
        "number format of the base on a CPU; auto: float32 (GPUs take bfloat16)",
        when="memory is short, or the CPU computes in bfloat16 (bfloat16)",
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N")

    def given(self, *names: str) -> str:
        """The flags of those of these fields that are set, for a sentence; "" where none is."""
        fields = type(self).model_fields
        named = (name for name in names if getattr(self, name) != fields[name].default)
        return ", ".join(
            f"--{name}".replace("_", "-") + (f" ({VARIABLES[name]})" if name in VARIABLES else "")
            for name in named
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers of `sampler_urls`, each without a slash at its end."""
        return tuple(url.rstrip("/") for url in _listed(self.sampler_urls))


class User(Section):
    """One who may call; a table [[users]] of the settings file"""

    name: str = Field(
        pattern=_NAME,
        description="a short plain word, for the ledger and the log",
    )
    key: SecretStr = Field(description="key that this user's clients send")
    role: Literal["user", "admin"] = Field("user", description="an admin sees everything")
    group: str | None = Field(
        None,
        pattern=_NAME,
        description="users of one group share a prompt cache (docs/access.md)",
    )


class Settings(Section):
    """The whole tree."""

    run: Run = Run()
    gateway: Gateway = Gateway()
    judge: JudgeSettings = JudgeSettings()
    training: Training = Training()
    privacy: Keeping = Keeping()
    spend: Spend = Spend()
    local: Local = Local()
    users: tuple[User, ...] = ()
    """Who may call, each with a key of their own; nobody: whoever has the gateway's `api_key`."""
    _key_file: Path | None = PrivateAttr(None)

    @property
    def key_file(self) -> Path | None:
        """File of the key that the gateway makes for itself; None: it makes none."""
        return self._key_file

    def with_key(self, file: Path, key: str | None) -> Settings:
        """Return a copy with the gateway's own key. `key`: None until it is made."""
        gateway = self.gateway.model_copy(update={"api_key": key and SecretStr(key)})
        settings = self.model_copy(update={"gateway": gateway})
        settings._key_file = file
        return settings

    @property
    def keys(self) -> list[str]:
        """The keys that the gateway takes, those of admins first; none: it needs none."""
        admins_first = sorted(self.users, key=lambda user: user.role != "admin")
        keys = [self.gateway.api_key, *(user.key for user in admins_first)]
        return [key.get_secret_value() for key in keys if key is not None]

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.gateway.served_model_name or self.run.model_name

    @property
    def bound(self) -> dict[str, str]:
        """Return the settings that a ledger is bound to, which a run cannot change."""
        return {
            "model": self.run.model_name,
            "method": self.run.method,
            "backend": self.run.backend,
            "lora_rank": str(self.training.lora_rank),
        }


def sections() -> dict[str, type[Section]]:
    """The groups of settings by name."""
    return {
        name: cast("type[Section]", field.annotation)
        for name, field in Settings.model_fields.items()
        if name != USERS
    }
