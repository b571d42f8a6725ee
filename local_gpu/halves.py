"""Interfaces of the backend's two halves, training and serving, and the records they exchange.

    LocalBackend ── Learning   in this process, or in one or more of its own (`ranks/`)
                 └─ Serving    the embedded sampler, or vLLM servers over HTTP

They exchange only weights, as folders in PEFT's format, and prompts and logprobs, as numbers, so
every kind of training works with every kind of serving.

Rule: a folder passed here is complete, and its name was never used before.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tinker_claw.errors import SamplerError
from tinker_claw.policy import Sampler, check_sampling, check_scoring
from tinker_claw.types import (
    Adam,
    Charge,
    Images,
    LossPass,
    SamplingParams,
    StepReport,
    TokenLogprobs,
    Tokens,
    uncharged,
)

if TYPE_CHECKING:  # it needs torch, which sampling over HTTP does not
    from local_gpu.model.vision import Vision

BASE_REF = "base"
"""The ref of the base model without an adapter."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a base model, known once it is loaded."""

    vocabulary: int
    context_tokens: int
    """Longest sequence: the length its positions were trained for, or the setting if that is
    less."""
    notes: tuple[str, ...] = ()
    """Sentences about this model that a user should know."""
    image_token: int | None = None
    """Id of the token that stands for a part of an image; None: the model reads text only."""
    mixture: bool = False
    """Whether it is a mixture of experts, of which rounding may choose others."""
    trains_images: bool = False
    """Whether it trains on and scores sequences with images."""


@dataclass(frozen=True, slots=True)
class ScoreAsk:
    """Tokens to score from `start` on (see `Sampler.logprobs`). Checked on construction."""

    tokens: tuple[int, ...]
    start: int
    targets: tuple[tuple[int, ...], ...] | None
    """[len(tokens) - start, K], or None."""
    top_k: int
    images: Images = ()

    @classmethod
    def of(
        cls,
        facts: Facts,
        tokens: Sequence[int],
        start: int,
        targets: Sequence[Sequence[int]] | None,
        top_k: int,
        images: Images = (),
    ) -> ScoreAsk:
        """Make a checked request. Raises AlignmentError, ContextLengthError or SamplerError naming
        what does not fit."""
        check_scoring(tokens, start, targets, facts.context_tokens)
        wanted = None if targets is None else tuple(tuple(row) for row in targets)
        ids = (*tokens, *(i for row in wanted or () for i in row))
        if min(ids) < 0 or max(ids) >= facts.vocabulary:
            raise SamplerError(f"logprobs: an id lies outside 0..{facts.vocabulary - 1}")
        return cls(tuple(tokens), start, wanted, min(top_k, facts.vocabulary), images)


def check_request(
    prompt: Tokens, params: SamplingParams, *, context_tokens: int, vocabulary: int
) -> None:
    """Raise like `check_sampling`, or SamplerError for another model's tokens."""
    check_sampling(prompt, params, context_tokens)
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise SamplerError(
            f"The prompt has a token outside 0..{vocabulary - 1}: another model's tokenizer made "
            "it."
        )


Score = Callable[[str, ScoreAsk], Coroutine[Any, Any, TokenLogprobs]]
"""Scores tokens under the weights of a ref, with the trainer."""


class TrainerScores:
    """A sampler's `logprobs`, computed by the trainer: the same numbers that training sees."""

    def __init__(self, ref: str, facts: Facts, score: Score) -> None:
        self.ref = ref
        self._facts = facts
        self._score = score

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
        charge: Charge = uncharged,
    ) -> TokenLogprobs:
        ask = ScoreAsk.of(self._facts, tokens, start, targets, top_k, images)
        return await self._score(self.ref, ask)


class Learning(Protocol):
    """One policy in training over a base, and exact scoring. Synchronous, for use by one thread.

    The policy is LoRA weights with Adam's moments, of the settings' rank.

    Every failure is a ClawError; after one in `step`, weights and moments are unchanged or suspect,
    and `read_state` restores them.
    """

    facts: Facts

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        """Accumulate the gradients of all passes, then take one AdamW step: all or nothing."""
        ...

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        """Score under a published adapter, or under the base; prefixes are computed once."""
        ...

    def write_adapter(self, folder: Path) -> None:
        """Write the present weights as a new folder."""
        ...

    def write_probe(self, folder: Path, size: float) -> None:
        """Write an adapter with random weights, of the policy's rank, as a new folder.

        `size` is, to first order, the share of its own output by which each layer changes. With it
        servers are tested for applying adapters.
        """
        ...

    def export_adapter(self, folder: Path) -> None:
        """Write the present weights into a folder of the user's, replacing an adapter that is
        there."""
        ...

    def write_state(self, folder: Path) -> None:
        """Write weights and moments as a new folder."""
        ...

    def read_state(self, folder: Path, moments: bool = True) -> None:
        """Load weights and moments; without `moments` these start anew, and a published adapter is
        enough.

        Raises:
            BackendError: the files are missing, damaged, or of another base or shape.
        """
        ...

    def close(self) -> None: ...


class Serving(Protocol):
    """Samplers of immutable versions."""

    context_tokens: int
    """Longest prompt and reply together; at most that of `Facts`."""
    rounds_otherwise: bool
    """Whether the same weights give other logprobs here than in `Learning`, beyond float32
    rounding."""
    sees: bool
    """Whether samplers take images."""
    vision: Vision | None
    """The vision half of the model; None: it is not in this process."""

    async def open(self, ref: str, folder: Path) -> Sampler:
        """Open a sampler of a published adapter, which is loaded only when needed.

        Raises:
            BackendError: the adapter is missing, damaged or of another base model.
        """
        ...

    async def base(self) -> Sampler: ...

    def live(self) -> frozenset[str]:
        """Refs of the samplers that are open: their folders must stay."""
        ...

    def forget(self) -> None:
        """Forget recent prompts, which a new version would compute before it serves."""
        ...

    async def aclose(self) -> None: ...
