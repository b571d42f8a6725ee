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
from typing import Annotated, Any, Final, Literal, cast

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

ENV_PREFIX: Final = "TINKER_CLAW_"
USERS: Final = "users"
"""The setting that is no section: a list, without flags."""
VARIABLES: Final = {
    "gpus": "NUM_GPUS",
    "rollout_gpus": "ROLLOUT_GPUS",
}
"""OpenClaw-RL's variables, by the fields of `Local` that they set where nothing else does."""
NEEDS_GPU: Final = ("gpus", "rollout_gpus", "rollout_tp", "base_quantization")
"""Fields of `Local` that ask for GPUs."""
DEFAULT_USER: Final = "default"
"""Who calls without a key, or with the gateway's `api_key`."""
_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"


def _setting(default: Any, told: str, *, when: str, unit: str = "", **bounds: Any) -> Any:
    """Declare one setting.

    Args:
        told: what it is, as --help says it.
        when: when to change it, as the settings page says it.
        unit: what its number counts.
        bounds: what its number may be, as pydantic has it (ge, gt, le).
    """
    told_of: Any = {"description": told, "json_schema_extra": {"when": when, "unit": unit}}
    return Field(default=default, **told_of, **bounds)


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


class Run(Section):
    """What runs, and where it keeps its records"""

    method: str = _setting(
        "combine",
        "how turns become training (docs/methods.md); rl = binary",
        when="binary where hints cost too much, opd where verdicts mislead",
    )
    model_name: str = _setting(
        "Qwen/Qwen3-8B",
        "model: a hub id, a folder, or 'demo', 'demo-tracks' or 'demo-screen' (shipped, CPU)",
        when="you use another model",
    )
    backend: Literal["tinker", "local"] = _setting(
        "tinker",
        "who trains and samples: the Tinker service, or torch on this machine",
        when="nothing may leave this machine, or it has GPUs",
    )
    base_url: str | None = _setting(
        None,
        "address of another Tinker server (python -m local_gpu.tinker is one)",
        when="the model runs on a box elsewhere",
    )
    tokenizer: str | None = _setting(
        None,
        "hub id or folder of the tokenizer; that of --model-name unless set",
        when="the model's folder has none",
    )
    data_dir: Path | None = _setting(
        None,
        "ledger, states and metrics; runs/<model>-<method> unless set",
        when="records go to another disk, or a second run has the same name",
    )
    renderer: str = _setting(
        "auto",
        "chat format from the renderers package; auto goes by the model's or folder's name",
        when="the folder's name does not say the model's family",
    )
    context_tokens: int | None = _setting(
        None,
        "longest prompt and reply together; the model's unless set",
        unit="tokens",
        ge=16,
        when="the GPUs do not hold it all (`tinker-claw doctor` says what fits)",
    )
    seed: int = _setting(
        0,
        "seed of the adapter's first weights",
        when="you compare methods over several seeds",
    )
    log: Literal["auto", "json"] = _setting(
        "auto",
        "auto writes lines for people on a terminal, and JSON lines elsewhere",
        when="another program reads the terminal",
    )
    quiet: bool = _setting(
        False,
        "no line for each turn on the terminal, and no words",
        when="others see your screen",
    )
    report_to: str | None = _setting(
        None,
        "sinks for the figures of each step, such as tensorboard, with commas between them "
        "(docs/sinks.md has all)",
        when="you want curves beside others",
    )

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


class Chats(Section):
    """Whose words count in chat services; a table [gateway.chats] of the settings file"""

    owners: tuple[str, ...] = Field(
        default=(),
        description="whom the agent belongs to, as channel:sender id (telegram:123456789); unless "
        "set, the first direct writer of a channel, and nobody in a group",
    )
    others_judge: bool = Field(
        default=False,
        description="what other people, mails and hooks say is judged, like a tool's result; hints "
        "come from owners alone",
    )

    @field_validator("owners")
    @classmethod
    def _channel_and_id(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            channel, colon, sender = name.strip().partition(":")
            if not (channel and colon and sender):
                raise ValueError(
                    f"{name!r} names no owner: write channel:sender id, as telegram:123456789"
                )
        return names


class Gateway(Section):
    """The endpoint that the agent talks to"""

    host: str = _setting(
        "127.0.0.1",
        "address to bind; one that is not loopback needs a key",
        when="other machines call it without a tunnel (ssh -L)",
    )
    port: int = _setting(30000, "port; 0 takes a free one", ge=0, le=65535, when="30000 is taken")
    api_key: SecretStr | None = _setting(
        None,
        "key that clients must send; [[users]] gives each user their own",
        when="--host is not loopback; `none`: no key is made where others have accounts here",
    )
    served_model_name: str | None = _setting(
        None,
        "name under which the model is offered; --model-name unless set",
        when="the agent calls it otherwise",
    )
    models: str | None = _setting(
        None,
        "other names by which clients may ask for the model, with commas between them; one may end "
        "in *: claude-*, haiku",
        when="the agent asks for models of its own maker",
    )
    max_reply_tokens: int = _setting(
        4096,
        "longest reply where the request names no limit; training divides by it",
        unit="tokens",
        ge=1,
        when="replies are cut off (thinking counts, too)",
    )
    thinking: Literal["auto", "on", "off"] = _setting(
        "auto",
        "whether a model that can do both thinks before it replies; auto: where a client asks for "
        "it, and only there",
        when="it shall think for clients that cannot ask (on), or for none (off)",
    )
    sampling: Literal["client", "ours"] = _setting(
        "client",
        "whose temperature, top_p and top_k: the client's, which trains nothing unless they are "
        "1, 1 and none, or ours, which are",
        when="a client sets a temperature, and `status` says that its replies train nothing (ours)",
    )
    page: bool = _setting(
        True,
        "a page at /ui: how it goes, turns and versions",
        when="nobody shall see it (--no-page)",
    )
    max_concurrent: int = _setting(
        64,
        "replies sampled at the same time; others wait",
        unit="replies",
        ge=1,
        when="samplers are slow under load, or idle while requests wait",
    )
    images: Literal["off", "serve", "train"] = _setting(
        "serve",
        "images in messages: off refuses them; serve shows them to a model that sees and "
        "neither keeps nor trains them; train keeps and trains those of owners and tools",
        when="no image shall reach the model, or it shall learn from them (docs/images.md)",
    )
    allow_origin: str | None = _setting(
        None,
        "origins that may use the wires with a key, as app://obsidian.md, with commas between them",
        when="a desktop app that is a web page inside gets a 403",
    )
    chats: Chats = _setting(
        Chats(),
        "whose words count in chat services, a table [gateway.chats]",
        when="the agent is in a group, or several people write to it",
    )

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
            name.startswith(given[:-1]) if given.endswith("*") else name == given
            for given in _listed(self.models)
        )

    def aliases(self, served_name: str) -> tuple[str, ...]:
        """Return names that clients can choose from, one for each in `models`."""
        short = served_name.rstrip("/").rsplit("/", 1)[-1]
        return tuple(given.replace("*", short) for given in _listed(self.models))

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `allow_origin`, without duplicates."""
        return _listed(self.allow_origin)


class JudgeSettings(Section):
    """The judge that turns a next state into votes and hints"""

    prm_m: int = _setting(
        3,
        "votes per turn; odd numbers avoid ties",
        unit="votes",
        ge=1,
        when="votes cost too much (1) or often disagree (5)",
    )
    judge_url: str | None = _setting(
        None,
        "OpenAI-compatible endpoint (…/v1) that judges; the base model judges unless set",
        when="a stronger model is to judge; it then sees every judged turn",
    )
    judge_model: str | None = _setting(
        None,
        "model to ask for at --judge-url",
        when="that endpoint serves more than one",
    )
    judge_api_key: SecretStr | None = _setting(
        None, "key for --judge-url", when="that endpoint asks for one"
    )
    judge_prompts: Path | None = _setting(
        None,
        "TOML file with `verdict` or `hint` or both: what the judge is asked",
        when="the judge needs other rules, or another language",
    )
    judge_thinking: bool = _setting(
        False,
        "let a judge that can think do so before each answer",
        when="its verdicts are often wrong, and ten times the tokens are worth it",
    )
    judge_images: bool = _setting(
        False,
        "show the judge at --judge-url the images of a turn, with --images train",
        when="that judge sees, and replies are about images",
    )
    headers: Mapping[str, SecretStr] = _setting(
        {},
        "further headers for --judge-url, a table [judge.headers]; never shown",
        when="that endpoint takes its key in a header of its own",
    )

    @property
    def asked_model(self) -> str:
        """The name that requests to the judge's endpoint give."""
        return self.judge_model or "judge"


class Training(Section):
    """How samples become steps"""

    batch_size: int = _setting(
        16,
        "trainable samples per optimizer step",
        unit="samples",
        ge=1,
        when="steps shall be steadier (larger), or sooner (smaller)",
    )
    observe: bool = _setting(
        False,
        "judge and queue samples, train nothing",
        when="you want to see first what would be learned",
    )
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = _setting(
        "auto",
        "Adam's rate; auto: the cookbook's fit for the model's hidden size",
        when="steps change nothing (higher), or replies get worse (lower)",
    )
    lora_rank: int = _setting(
        32,
        "rank of the adapter; alpha is 32",
        ge=1,
        le=512,
        when="adapters must be smaller; a run's rank cannot change",
    )
    w_rl: float = _setting(
        1.0,
        "weight of the reward part",
        ge=0,
        when="verdicts are to count less or more",
    )
    w_opd: float = _setting(
        1.0,
        "weight of the distillation part",
        ge=0,
        when="hints are to count less or more",
    )
    opd_topk: int = _setting(
        4,
        "candidates per token, of the student and of the teacher; 0: the sampled token alone",
        unit="candidates",
        ge=0,
        when="a server cannot score candidates (0)",
    )
    recipe: Literal["default", "paper"] = _setting(
        "default",
        "paper: the gradient of OpenClaw-RL as published, of three hints a turn, and nothing "
        "beside it: gate and lessons are off unless they are set, and nothing pauses learning or "
        "lowers its rate",
        when="you compare with its results (docs/openclaw-rl.md)",
    )
    episode_reward: Literal["steps", "outcome"] = _setting(
        "steps",
        "reward of an episode's step: outcome and mean vote, or the outcome alone, "
        "without asking the judge",
        when="the judge cannot tell good steps from bad ones",
    )
    gate: Literal["on", "off"] = _setting(
        "on",
        "whether a version must pass canaries before it serves",
        when="it costs too much",
    )
    canaries: Path | None = _setting(
        None,
        "file of the canaries; configs/canaries.toml, or the demo's, unless set",
        when="you add your own (docs/operating.md)",
    )
    lessons: Literal["off", "tell", "practice"] = _setting(
        "off",
        "tell: put what a user asks of all replies into their next prompts; practice: then also "
        "train what they accepted, on their past first messages, so that it needs no telling",
        when="nobody is to say a thing twice (docs/lessons.md)",
    )
    max_staleness: int = _setting(
        4,
        "optimizer steps after which samples expire",
        unit="steps",
        ge=0,
        when="samples expire unused (higher)",
    )

    @model_validator(mode="before")
    @classmethod
    def _paper_alone(cls, given: Any) -> Any:
        if isinstance(given, dict) and cast("dict[str, Any]", given).get("recipe") == "paper":
            return {"gate": "off", "lessons": "off"} | cast("dict[str, Any]", given)
        return given

    @property
    def opd_mode(self) -> Literal["topk", "token"]:
        """Whether the teacher scores top-k candidates or only the sampled token."""
        return "topk" if self.opd_topk else "token"

    @property
    def hints_scored(self) -> int:
        """Hints that the teacher scores for one turn, at most."""
        return 3 if self.recipe == "paper" else 1


class Keeping(Section):
    """What is kept of your words, and for how long"""

    redact: str = _setting(
        SECRETS,
        f"what is never stored, judged or trained: {', '.join(KINDS)}, with commas between them; "
        "or all, or none",
        when="personal data shall not be recorded either",
    )
    keep_days: float | None = _setting(
        None,
        "drop texts and tokens of turns that old and done with; kept unless set",
        unit="days",
        gt=0,
        when="records may not be kept for ever",
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
    """What a service may cost"""

    budget_usd: float | str | None = _setting(
        None,
        "hold judging and training at this sum: of the whole run (5) or of a month (20/month)",
        unit="USD",
        when="a service bills you",
    )
    budget_serving: Literal["goes-on", "stops"] = _setting(
        "goes-on",
        "what serving does once the budget is spent",
        when="no request may be billed beyond it",
    )
    prices: Path | None = _setting(
        None,
        "price table; configs/prices.toml unless set",
        when="your model's row there is missing or out of date",
    )

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
        when="others use some of them",
    )
    rollout_gpus: int | None = _setting(
        None,
        "GPUs that sample (or ROLLOUT_GPUS), all but one unless set; the others learn",
        unit="GPUs",
        ge=1,
        when="samples share short prefixes only, or the base must be split (docs/gpus.md)",
    )
    rollout_tp: int = _setting(
        1,
        "GPUs per sampler server (tensor parallel)",
        unit="GPUs",
        ge=1,
        when="one GPU does not hold the model and a context",
    )
    sampler_urls: str | None = _setting(
        None,
        "vLLM servers that run already, with commas between them; none is started",
        when="samplers run elsewhere (configs/remote-samplers.toml)",
    )
    sampler_api_key: SecretStr | None = _setting(
        None,
        "key that --sampler-urls want (vLLM's --api-key)",
        when="those servers ask for one",
    )
    base_quantization: Literal["none", "4bit"] = _setting(
        "none",
        "quantization of the base that learns (bitsandbytes nf4); GPU only",
        when="the base does not fit (configs/1x24GB-4bit.toml)",
    )
    device: str = _setting(
        "auto",
        "auto, cpu, cuda or cuda:N",
        when="cpu for a tiny model, cuda:N for one GPU of several",
    )

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
        description="a short plain word: it stands in the ledger and in log lines",
    )
    key: SecretStr = Field(description="key that this user's clients send")
    role: Literal["user", "admin"] = Field(
        "user", description="an admin sees everybody's figures, spending and errors"
    )
    group: str | None = Field(
        None,
        pattern=_NAME,
        description="users of one group share a prompt cache: faster, but timing may tell what "
        "another has asked",
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
        given = [self.gateway.api_key, *(user.key for user in admins_first)]
        return [key.get_secret_value() for key in given if key is not None]

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.gateway.served_model_name or self.run.model_name

    @property
    def bound(self) -> dict[str, str]:
        """What a ledger is bound to: a run's cannot change."""
        run = self.run
        rank = str(self.training.lora_rank)
        return {
            **{"model": run.model_name, "method": run.method},
            **{"backend": run.backend, "lora_rank": rank},
        }


def sections() -> dict[str, type[Section]]:
    """The groups of settings by name."""
    return {
        name: cast("type[Section]", field.annotation)
        for name, field in Settings.model_fields.items()
        if name != USERS
    }
