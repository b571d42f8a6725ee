"""The settings: names, defaults, bounds, what each is for and when to change it.

Rules: a setting is declared here and nowhere else; flags, their help and docs/settings.md are made
of the declarations. A secret has no flag, because a command line is there for every user of the
machine to read. Which settings exclude one another is said in `config.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
)

from tinker_claw.privacy.rules import KINDS, SECRETS

ENV_PREFIX: Final = "TINKER_CLAW_"
USERS: Final = "users"
"""The setting that is no section: a list, without flags."""
VARIABLES: Final = {
    "gpus": "NUM_GPUS",
    "actor_gpus": "ACTOR_GPUS",
    "rollout_gpus": "ROLLOUT_GPUS",
    "prm_gpus": "PRM_GPUS",
}
"""OpenClaw-RL's variables, by the fields of `Local` that they set where nothing else does."""
NEEDS_GPU: Final = ("gpus", "rollout_gpus", "prm_gpus", "rollout_tp", "base_quantization")
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


def _listed(text: str | None) -> tuple[str, ...]:
    """Split comma-separated text, without duplicates."""
    named = (name.strip() for name in (text or "").split(","))
    return tuple(dict.fromkeys(name for name in named if name))


class Section(BaseModel):
    """A group of settings, or a table of the file; the docstring heads a group in --help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )


class Run(Section):
    """What runs, and where it keeps its records"""

    method: str = _setting(
        "combine",
        "how turns become training (docs/methods.md has them); rl = binary",
        when="binary where hints cost too much, opd where verdicts mislead; docs/methods.md "
        "compares all",
    )
    model_name: str = _setting(
        "Qwen/Qwen3-8B",
        "model: a hub id, a local folder, or 'demo', 'demo-tracks' or 'demo-screen' (shipped, CPU)",
        when="for every other model",
    )
    backend: Literal["tinker", "local"] = _setting(
        "tinker",
        "who trains and samples: the Tinker service, or torch on this machine",
        when="local where nothing may leave this machine, or it has GPUs",
    )
    base_url: str | None = _setting(
        None,
        "address of another Tinker server (python -m local_gpu.tinker is one)",
        when="the model runs on a box elsewhere, behind Tinker's API",
    )
    tokenizer: str | None = _setting(
        None,
        "hub id or folder of the tokenizer; that of --model-name unless set",
        when="the model's folder has none, or the hub asks for an account",
    )
    data_dir: Path | None = _setting(
        None,
        "ledger, states and metrics; runs/<model>-<method> unless set",
        when="records go to another disk, or a second run has the same model and method",
    )
    renderer: str = _setting(
        "auto",
        "chat format from the renderers package; auto goes by the name of the model or of its "
        "folder",
        when="a folder's name does not say which family its model is of",
    )
    context_tokens: int | None = _setting(
        None,
        "longest prompt and reply together; the model's unless set",
        unit="tokens",
        ge=16,
        when="the GPUs do not hold the whole context (`tinker-claw doctor` says what fits)",
    )
    seed: int = _setting(
        0,
        "seed of the adapter's first weights",
        when="a run is repeated to compare methods over several seeds",
    )
    report_to: str | None = _setting(
        None,
        "who is told of every step in figures: tensorboard, wandb, trackio, mlflow, otel or a "
        "plug-in, with commas between them; otel also gets a span of every request (docs/sinks.md)",
        when="curves shall stand beside those of other runs, or traces beside those of the agent",
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
        description="who the agent belongs to, each as channel:sender id (telegram:123456789); "
        "unless set, whoever writes directly first in a channel, and nobody in a group",
    )
    others_judge: bool = Field(
        default=False,
        description="what other people, mails and hooks say is a next state, too, which the judge "
        "reads and which counts like a tool's result; hints come from owners alone",
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
        when="other machines call it; a tunnel (ssh -L) needs no change",
    )
    port: int = _setting(30000, "port; 0 takes a free one", ge=0, le=65535, when="30000 is taken")
    api_key: SecretStr | None = _setting(
        None,
        "key that clients must send; [[users]] gives each user their own",
        when="--host is not loopback; where others have accounts on this machine, a new data "
        "directory gets one of its own, unless this is `none`",
    )
    served_model_name: str | None = _setting(
        None,
        "name under which the model is offered; --model-name unless set",
        when="the agent's configuration names the model otherwise",
    )
    max_reply_tokens: int = _setting(
        4096,
        "longest reply where the request names no limit; --norm constant divides by it",
        unit="tokens",
        ge=1,
        when="replies are cut off (thinking counts, too)",
    )
    page: bool = _setting(
        True,
        "a page at /ui: how it goes, turns, steps and versions",
        when="nobody shall look at it in a browser (--no-page)",
    )
    max_concurrent: int = _setting(
        64,
        "replies that are sampled at the same time; others wait",
        unit="replies",
        ge=1,
        when="samplers are slow under load (lower), or idle while requests wait (higher)",
    )
    images: Literal["off", "serve", "train"] = _setting(
        "serve",
        "images in messages: refused; shown to a model that sees, and neither kept nor trained; or "
        "kept and trained, those of owners and tools (docs/images.md)",
        when="no image shall reach the model (off), or it shall learn from what it sees (train)",
    )
    image_hosts: str | None = _setting(
        None,
        "hosts from which images by address are fetched, as host or host:port, with commas between "
        "them; nothing is fetched unless set",
        when="the agent sends addresses of images, and those hosts tell nobody what is secret",
    )
    chats: Chats = _setting(
        Chats(),
        "whose words count where the agent is in chat services, a table [gateway.chats]",
        when="the agent is in a group, or several people write to it",
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _none_is_none(cls, value: Any) -> Any:
        return None if value == "none" else value

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of `image_hosts`."""
        return _listed((self.image_hosts or "").lower())


class SecondJudge(Section):
    """Another judge; a table [judge.second] of the settings file"""

    url: str = Field(description="its address, as that of --judge-url")
    role: Literal["fallback", "auditor"] = Field(
        "fallback",
        description="a fallback judges while the first does not answer; an auditor judges a share "
        "of the turns, too, and nothing is learned of what it says",
    )
    share: float = Field(
        0.05, gt=0, le=1, description="of the judged turns that an auditor is asked about"
    )
    model: str = Field("judge", description="the name of the model to ask for")
    api_key: SecretStr | None = Field(None, description="its key")
    headers: Mapping[str, SecretStr] = Field(
        {}, description="a table [judge.second.headers] of further headers; they are not shown"
    )


class JudgeSettings(Section):
    """The judge that turns a next state into votes and hints"""

    prm_m: int = _setting(
        3,
        "votes per turn; odd numbers avoid ties",
        unit="votes",
        ge=1,
        when="1 to pay for fewer votes, 5 where votes often disagree",
    )
    prm_max_tokens: int = _setting(
        4096,
        "longest answer of the judge, thinking included",
        unit="tokens",
        ge=16,
        when="`status` says that its answers are cut off",
    )
    judge_url: str | None = _setting(
        None,
        "OpenAI-compatible endpoint (…/v1) that judges; the base model judges unless set",
        when="a stronger model is to judge; that server then sees every judged turn",
    )
    judge_model: str | None = _setting(
        None,
        "model that judges: the name to ask for at --judge-url ('judge' unless set), or, with "
        "--prm-gpus, the hub id or folder to serve there",
        when="with --judge-url or --prm-gpus",
    )
    judge_api_key: SecretStr | None = _setting(
        None, "key for --judge-url", when="that endpoint asks for one"
    )
    judge_prompts: Path | None = _setting(
        None,
        "TOML file with the texts `verdict` and `hint`, or one of them, that say what the judge is "
        "to find out; the included ones unless set",
        when="the judge is to go by other rules, or by another language",
    )
    judge_images: bool = _setting(
        False,
        "shows the judge at --judge-url the images of a turn, with --images train; a judge that "
        "refuses them reads a line in their place",
        when="that judge sees, and replies are about what images show",
    )
    headers: Mapping[str, SecretStr] = _setting(
        {},
        "further headers of requests to --judge-url, a table [judge.headers]; they are not shown",
        when="that endpoint takes its key, or anything else, in a header of its own",
    )
    second: SecondJudge | None = _setting(
        None,
        "another judge, a table [judge.second]",
        when="judging is to go on while the first is away, or somebody is to check its verdicts",
    )

    @property
    def of_second(self) -> JudgeSettings:
        """Settings of the second judge."""
        second = self.second
        if second is None:
            raise ValueError("there is no second judge")
        other = {"judge_url": second.url, "judge_model": second.model, "headers": second.headers}
        return self.model_copy(update=other | {"judge_api_key": second.api_key, "second": None})

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
        when="larger for steadier steps, smaller to see a change sooner",
    )
    observe: bool = _setting(
        False,
        "judge and queue samples, and train nothing",
        when="to see first what would be learned; a start without it trains all that has queued",
    )
    learning_rate: float | Literal["auto"] = _setting(
        1e-4,
        "Adam's rate; auto: by the model's hidden size",
        when="steps change nothing (higher), or replies get worse (lower)",
    )
    lora_rank: int = _setting(
        32,
        "rank of the adapter, at most 512; alpha is 32",
        ge=1,
        le=512,
        when="adapters must be smaller; the rank of a run cannot change",
    )
    w_rl: float = _setting(
        1.0,
        "weight of the reward part",
        ge=0,
        when="verdicts are to count less or more than hints",
    )
    w_opd: float = _setting(
        1.0,
        "weight of the distillation part",
        ge=0,
        when="hints are to count less or more than verdicts",
    )
    opd_topk: int = _setting(
        4,
        "candidates per token, of the student and of the teacher; 0: the sampled token alone",
        unit="candidates",
        ge=0,
        when="0 where a server cannot score candidates; beyond 4 the paper finds next to no gain",
    )
    opd_clip: float = _setting(
        1.0,
        "bound on teacher - student; 0 = none",
        unit="nats",
        ge=0,
        when="the teacher is far from the student, and its pull is to stay small or to grow",
    )
    teacher: Literal["base", "policy"] = _setting(
        "base",
        "who scores under the hint; policy collapsed when measured",
        when="for experiments only",
    )
    recipe: Literal["default", "paper"] = _setting(
        "default",
        "paper: the gradient of OpenClaw-RL as it was published, of three hints a turn",
        when="paper to compare with its results (docs/openclaw-rl.md)",
    )
    episode_reward: Literal["steps", "outcome"] = _setting(
        "steps",
        "reward of a step of an episode: its outcome and the mean of the step's votes, or the "
        "outcome alone, and then the judge is asked about no step",
        when="the judge cannot tell good steps from bad ones, or it is to be measured what its "
        "votes bring",
    )
    norm: Literal["sample", "constant"] = _setting(
        "sample",
        "divide by each reply's length, or by --max-reply-tokens",
        when="constant where long bad replies are punished too little",
    )
    clip_low: float = _setting(
        0.8,
        "lower bound of the ratio, absolute",
        gt=0,
        le=1,
        when="lower to learn more from stale samples",
    )
    clip_high: float = _setting(
        1.28,
        "upper bound of the ratio, absolute",
        ge=1,
        when="higher to learn more from stale samples",
    )
    kl_beta: float = _setting(
        0.0,
        "pull towards the base model",
        unit="advantage per nat",
        ge=0,
        when="what was not trained gets worse; 0.01 to 0.05 are usual",
    )
    max_step_kl: float = _setting(
        0.1,
        "how far one step may move the policy: KL over the batch's tokens; 0 = no bound",
        unit="nats per token",
        ge=0,
        when="steps are taken again at a smaller rate although they do good (higher), or a step "
        "does harm (lower)",
    )
    gate: Literal["on", "shadow", "off"] = _setting(
        "on",
        "whether a version must answer the canaries, and first turns that are held out, before it "
        "serves; shadow asks, says what it would refuse, and lets it serve",
        when="shadow to see first what it would do, off where its questions cost too much",
    )
    canaries: Path | None = _setting(
        None,
        "file of the canaries; configs/canaries.toml, or the demo's, unless set",
        when="what your users rely on is to be among them (docs/operating.md)",
    )
    lessons: Literal["off", "tell", "distill"] = _setting(
        "off",
        "tell what a user asks of all replies, as the judge finds it, in the prompts of their next "
        "sessions; distill also trains the model to do it untold",
        when="nobody is to say a thing twice (docs/lessons.md)",
    )
    hint_candidates: int | None = _setting(
        None,
        "hints scored per turn; the one that fits the reply best teaches; 1 unless set, and 3 with "
        "--recipe paper",
        unit="hints",
        ge=1,
        when="hints are often beside the point; each costs a pass of the teacher",
    )
    max_staleness: int = _setting(
        4,
        "optimizer steps after which samples expire",
        unit="steps",
        ge=0,
        when="verdicts come late and samples expire unused (higher)",
    )
    save_interval: int = _setting(
        1,
        "steps between saved states",
        unit="steps",
        ge=1,
        when="saving takes longer than a step; a crash then voids the steps since",
    )

    @property
    def opd_mode(self) -> Literal["topk", "token"]:
        """Whether the teacher scores top-k candidates or only the sampled token."""
        return "topk" if self.opd_topk else "token"

    @property
    def hints_scored(self) -> int:
        """Hints that the teacher scores for one turn, at most."""
        return self.hint_candidates or (3 if self.recipe == "paper" else 1)


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
    keep_gb: float | None = _setting(
        None,
        "drop those of the oldest while the ledger is larger; kept unless set",
        unit="GB",
        gt=0,
        when="the disk is small",
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


class Spend(Section):
    """What a service may cost"""

    budget_usd: float | None = _setting(
        None,
        "stop judging and training at this sum; serving goes on",
        unit="USD",
        gt=0,
        when="a service bills you",
    )
    prices: Path | None = _setting(
        None,
        "price table; configs/prices.toml unless set",
        when="your model's row there is missing or out of date",
    )


class Local(Section):
    """The included torch backend (--backend local)"""

    gpus: int | None = _setting(
        None,
        "GPUs in all (or NUM_GPUS); those that CUDA_VISIBLE_DEVICES shows unless set",
        unit="GPUs",
        ge=1,
        when="some of them are for others, or `doctor` reckons for GPUs that are not here",
    )
    actor_gpus: int | None = _setting(
        None,
        "GPUs that learn (or ACTOR_GPUS), a quarter of them unless set; with --device cpu so many "
        "processes",
        unit="GPUs",
        ge=1,
        when="samples share short prefixes only, or the base must be split over several",
    )
    rollout_gpus: int | None = _setting(
        None,
        "GPUs that sample (or ROLLOUT_GPUS), those that are left unless set",
        unit="GPUs",
        ge=1,
        when="some of those that are left are to stay free",
    )
    prm_gpus: int = _setting(
        0,
        "GPUs of a judge of its own (or PRM_GPUS), one server over all of them, for --judge-model; "
        "0: the base model judges on the samplers",
        unit="GPUs",
        ge=0,
        when="a larger model is to judge on this machine",
    )
    rollout_tp: int = _setting(
        1,
        "GPUs per sampler server (tensor parallel)",
        unit="GPUs",
        ge=1,
        when="one GPU does not hold the model and a context",
    )
    gpu_memory_gb: float | None = _setting(
        None,
        "memory of each GPU that this may use; all that nvidia-smi says unless set",
        unit="GiB",
        gt=0,
        when="memory is to stay free for others, vLLM finds too little at its start, or nvidia-smi "
        "has no figure",
    )
    sampler_urls: str | None = _setting(
        None,
        "vLLM or SGLang servers that are there already, with commas between them; none is started",
        when="samplers run elsewhere (configs/remote-samplers.toml)",
    )
    sampler_api_key: SecretStr | None = _setting(
        None,
        "key that --sampler-urls want, as vLLM's --api-key sets it",
        when="those servers ask for one",
    )
    sampler_quantization: str | None = _setting(
        None,
        "of the samplers' weights, as vLLM names it, e.g. bitsandbytes (which is a package beside "
        "vLLM: vllm-bnb-plugin)",
        when="the weights leave no room for the cache",
    )
    base_quantization: Literal["none", "4bit"] = _setting(
        "none",
        "of the base that learns (bitsandbytes nf4); GPU only",
        when="the base does not fit beside its activations (configs/1x24GB-4bit.toml)",
    )
    torchrun: str | None = _setting(
        None,
        "further arguments of torchrun, as a string",
        when="several machines learn together (configs/two-nodes.toml)",
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
        "user", description="an admin is shown everybody's figures, spending and errors"
    )
    group: str | None = Field(
        None,
        pattern=_NAME,
        description="users of one group share what was computed of their prompts, which is faster; "
        "how fast an answer comes may tell one of them what another has asked",
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
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.gateway.served_model_name or self.run.model_name


def sections() -> dict[str, type[Section]]:
    """The groups of settings by name."""
    return {
        name: cast("type[Section]", field.annotation)
        for name, field in Settings.model_fields.items()
        if name != USERS
    }
