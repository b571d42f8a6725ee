"""The JSON bodies of Tinker's requests, as far as this server reads them.

Rule: a field that would change the result and that we do not carry out is read, so that it can be
refused by name; the others are ignored. Values of a numbered request are checked in its turn, not
here: one that is refused on arrival would leave a hole that all later ones wait for.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Ask(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore", frozen=True)


class Lora(Ask):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Ask):
    type: str = "adamw"


class CreateSession(Ask):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None


class OfSession(Ask):
    session_id: str


class OfModel(Ask):
    model_id: str
    seq_id: int | None = Field(default=None, ge=1)


class CreateModel(OfSession):
    model_seq_id: int = Field(ge=0)
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: dict[str, Any] | None = None


class AdamParams(Ask):
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
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: int | None = None


class SaveExternal(SaveWeights):
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Ask):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(OfSession):
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Ask):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Ask):
    chunks: list[Chunk]


class Params(Ask):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorAsk(Ask):
    data: list[int]
    dtype: Literal["int64"]
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Ask):
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: Params = Params()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: TensorAsk | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0)


class OfRequest(Ask):
    request_id: str


class OfPath(Ask):
    tinker_path: str
