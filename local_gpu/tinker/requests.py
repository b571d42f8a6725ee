"""The JSON bodies of Tinker's requests, as far as this server reads them.

Rule: an unsupported field that would change the result is read, so that it can be refused by name;
the others are ignored. Values of a numbered request are checked in its turn, not here: one that is
refused on arrival would leave a gap that all later ones wait for. Integers fit 64 bits: Python can
neither print nor parse one of 5,000 digits.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Base64Encoder, BaseModel, ConfigDict, EncodedBytes, Field

Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Number = Annotated[int, Field(ge=0, lt=1 << 63)]
"""Sequence number of a request, a model or a sampler. A sampler that was sent to another process
counts from a random one below 10^18."""


class Body(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore", frozen=True)


class Changing(Body):
    """A body whose every field changes the result, so that none may be ignored."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> str | None:
        """The name of a field that is not served here."""
        return next(iter(self.model_extra or ()), None)


class Lora(Changing):
    rank: Whole = 32
    seed: Whole | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Changing):
    type: str = "adamw"


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None


class OfSession(Body):
    session_id: str


class OfModel(Body):
    model_id: str
    seq_id: Annotated[Number, Field(ge=1)] | None = None


class CreateModel(OfSession):
    model_seq_id: Number
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: dict[str, Any] | None = None


class AdamParams(Changing):
    """Tinker's defaults, for fields that a client leaves out."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfModel):
    adam_params: AdamParams | None = None
    optimizer_params: Optimizer | None = None


class SaveWeights(OfModel):
    """Clients may send ttl_seconds, too, which is ignored: nothing expires here."""

    path: str | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Number | None = None


class SaveExternal(SaveWeights):
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Annotated[Number, Field(ge=1)] | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(OfSession):
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[Whole] = []
    data: Annotated[bytes, EncodedBytes(encoder=Base64Encoder)] = b""
    """File of an image."""
    format: Literal["png", "jpeg"] = "png"
    expected_tokens: Whole | None = None


class PromptBody(Body):
    chunks: list[Chunk]


class Params(Changing):
    max_tokens: Whole | None = None
    seed: Whole | None = None
    stop: str | list[Whole] | list[str] | None = None
    temperature: float = 1.0
    top_k: Whole = -1
    top_p: float = 1.0


class TensorField(Body):
    data: list[Whole]
    dtype: Literal["int64"]
    shape: list[Whole]
    sparse_crow_indices: list[Whole] | None = None
    sparse_col_indices: list[Whole] | None = None


class SampleRequest(Body):
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: PromptBody
    sampling_params: Params = Params()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Whole | None = None
    topk_prompt_logprobs: Number = 0
    topk_sample_logprobs: Number = 0
    target_prompt_logprobs: TensorField | None = None
    prompt_alt_tokens_k: Number = 0


class OfRequest(Body):
    request_id: str


class OfPath(Body):
    tinker_path: str
