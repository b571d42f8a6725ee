"""Settings of the wire server, and the source of a model's name.

Rule: every limit of the server is set here, with its unit in its name. Imports no torch, so that a
wrong flag is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from local_gpu.config import LocalConfig
from tinker_claw import shipped
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

KEY_PREFIX: Final = "tml-"
"""Tinker's SDK refuses a key that starts with anything else."""
KEY_LENGTH: Final = 16
"""Fewest characters of a key that nobody guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """Settings of one server."""

    local: LocalConfig
    """Settings of training and sampling, as for the gateway; checkpoints live in its `root`, and a
    later server with the same root finds them again. `alpha` is that of every adapter: Tinker's
    wire has no field for it."""
    api_key: str | None = field(default=None, repr=False)
    """None accepts any key."""
    max_rank: int = 256
    open_samplers: int = 4
    """Adapters open for sampling, besides the base; a request for another one waits."""
    keep_ephemeral: int = 16
    """Nameless sampler weights kept per model; a sampling client on older ones must be renewed."""
    sweep_s: float = 15.0
    """Seconds between sweeps for silent sessions and old answers."""
    poll_s: float = 20.0
    """Seconds that retrieve_future waits; the SDK gives it 45 s."""
    silence_s: float = 600.0
    """Seconds without a request or heartbeat until a session is ended."""
    keep_result_s: float = 600.0
    """Seconds that an answer is kept until it is first retrieved."""
    keep_retrieved_s: float = 60.0
    """Seconds that an answer is kept after it was retrieved."""
    requests: int = 10_000
    """Requests that wait, and answers that are kept, at once."""
    most_logprobs: int = 1 << 25
    """Logprobs that one request may ask for, in its tables or its samples at their longest."""
    open_sessions: int = 4096
    """Sessions at once, and as many models in one session."""
    body_bytes: int = 1 << 26
    """Bytes of one request. The SDK splits what is longer than `chunk_bytes`, but never a datum."""
    chunk_datums: int = 1024
    """The SDK splits a forward_backward into requests of so many datums ..."""
    chunk_bytes: int = 5_000_000
    """... and so many bytes."""

    def __post_init__(self) -> None:
        if self.open_samplers < 1:
            raise ConfigError(f"open_samplers is {self.open_samplers}; it must be at least 1.")
        if self.api_key is not None and not self.api_key.startswith(KEY_PREFIX):
            raise ConfigError(
                f"the API key must start with {KEY_PREFIX!r}, because Tinker's SDK sends no other"
            )
        if self.api_key is not None and len(self.api_key) < KEY_LENGTH:
            raise ConfigError(
                f"the API key must have {KEY_LENGTH} characters or more, or it can be guessed; "
                "python -c 'import secrets; print(\"tml-\" + secrets.token_urlsafe(32))' makes a "
                "good one"
            )

    @property
    def offered(self) -> str:
        """The base model's name on the wire."""
        return self.local.name or self.local.model


def source_of(model: str) -> str:
    """The folder or hub id that a model is loaded from.

    Raises:
        ConfigError: there is no such folder, or the shipped model is damaged.
    """
    if model in shipped.MODELS:
        shipped.verify(shipped.MODELS[model])
        return str(shipped.MODELS[model])
    if model.startswith(("/", "./", "../", "~")):
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--model {model}: there is no such folder")
        return str(folder)
    return model


def tokenizer_of(source: str) -> str:
    """Return what the SDK's get_tokenizer should load: an absolute folder, or the hub id."""
    folder = Path(source)
    # The trailing slash keeps the SDK from reading /models/x as <org>/<model>/<variant>.
    return f"{folder.resolve()}/" if folder.is_dir() else source


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        ConfigError: says what to add.
    """
    if not is_loopback(host) and api_key is None:
        raise ConfigError(
            f"--host {host} lets other machines in: give --api-key @FILE as well, a file "
            f"with a key that starts with {KEY_PREFIX}, and set TINKER_API_KEY to it on the clients"
        )
