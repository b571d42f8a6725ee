"""Training in one process: one rank's part of the work, or all of it.

It trains one model, the policy. Over a sharded base its module scores published adapters, too.

Rule: synchronous, and called by one thread. With several ranks, each gets the same calls in the
same order; only the first reads and writes files. `create`, `create_from` and the parts of a step
are for one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
from cachetools import LRUCache

from local_gpu.config import LocalConfig, Say
from local_gpu.halves import Facts, ScoreAsk
from local_gpu.learn.losses import LossRecord, Scored
from local_gpu.learn.memory import free_bytes, passes_in_memory, release_free
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.scores import score
from local_gpu.learn.step import LoraOptimizer, copy_adapter
from local_gpu.learn.world import Alone, Sharding, World
from local_gpu.model.files import (
    SavedAdapter,
    export_adapter,
    new_folder,
    read_adapter,
    read_state,
    write_adapter,
    write_state,
)
from local_gpu.model.load import image_token
from local_gpu.model.lora import (
    BaseModel,
    LoraShape,
    drawn_adapter,
    fresh_adapter,
    fused_experts,
    with_lora,
)
from local_gpu.model.vision import Vision
from local_gpu.plan.memory import counted
from local_gpu.tree.body import Body
from local_gpu.tree.choice import Heads, choose
from local_gpu.tree.kernels import Kernel, SdpaKernel
from tinker_claw.errors import ClawError, ModelFileError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

T = TypeVar("T")

_SCORED_VERSIONS: Final = 2
"""Modules of published adapters that are kept for scoring, besides that in training."""


def _fitting(
    base: BaseModel, context: int, world: World, *, sharded: bool
) -> tuple[bool, int | None]:
    """Return whether activations are checkpointed, and the tokens of a pass; None: no memory bounds
    them."""
    if base.device.type == "cpu" and world.size == 1:
        with suppress(ModelFileError):  # else as where memory is no worry
            return passes_in_memory(
                counted(base.module),
                free=free_bytes(),
                width=base.dtype.itemsize,
                context_tokens=context,
            )
    # Where memory is what a long sequence runs out of.
    return base.device.type == "cuda" or sharded, None


class LearningCore:
    """Implements `local_gpu.halves.Learning`."""

    def __init__(
        self,
        config: LocalConfig,
        base: BaseModel,
        world: World | None = None,
        shards: Sharding | None = None,
        *,
        say: Say = print,
    ) -> None:
        """Choose the attention kernel, and make the policy.

        Args:
            world: the ranks; None is this process alone.
            shards: of the base; None where it is whole.
            say: called with sentences about what was chosen.
        """
        self._base = base
        self._shares = base.device.type == "cuda" and config.gpu_memory is not None
        if self._shares:
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory, base.device)
        self._world = world or Alone()
        self._shards = shards
        context = min(base.context_tokens, config.context_tokens or base.context_tokens)
        self._checkpointing, fitting = _fitting(
            base, context, self._world, sharded=shards is not None
        )
        tokens = config.micro_batch_tokens or fitting
        self.vision = Vision.of(base) if shards is None else None
        """The vision half of the base; None: no image is trained on or scored."""
        self.facts = Facts(
            base.vocabulary,
            context,
            base.notes,
            image_token=image_token(base.source),
            mixture=bool(fused_experts(base.module)),
            trains_images=self.vision is not None,
        )
        body = Body(self._kernel(say), base.device, packs=base.packs)
        self._passes = Passes(
            body, PassBudget(tokens), self._world, self.vision, together=shards is not None
        )
        self._policy = self._new_policy(LoraShape(config.rank, config.alpha), config.seed)
        self._scores_another = False
        """Whether the sharded module currently holds a published adapter, to score with it."""
        self._scored = LRUCache[Path, Any](_SCORED_VERSIONS)
        """Modules of published adapters."""
        self._present: Path | None = None
        """Folder of the published adapter that equals the policy at this moment, if any."""

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        try:
            return self._policy_to_change().step(passes, adam)
        finally:
            self._release_free()

    def _release_free(self) -> None:
        """Return what others on the machine may need until the next step."""
        if self._shares:
            torch.cuda.empty_cache()
        elif self._base.device.type == "cpu":
            release_free()

    def create(self, shape: LoraShape, seed: int) -> LoraShape:
        """Begin a policy of this shape; return that."""
        self._policy, self._present = self._new_policy(shape, seed), None
        return shape

    def create_from(self, folder: Path, *, moments: bool) -> LoraShape:
        """Begin a policy from a saved state or a published adapter, in its shape; return that."""
        shape = read_adapter(folder, self._base).shape
        state = read_state(folder, self._base, shape, moments=moments)
        policy = self._new_policy(shape, seed=0)
        policy.load(state)
        self._policy, self._present = policy, None
        return shape

    def forward_backward(self, records: Sequence[LossRecord]) -> list[Scored]:
        """Add the gradients of the records to those that the next `optim_step` takes."""
        return self._restored_policy().forward_backward(records)

    def forward(self, records: Sequence[LossRecord]) -> list[Scored]:
        """Compute the same numbers without gradients; accumulated ones are left alone."""
        return self._restored_policy().forward(records)

    def optim_step(self, adam: Adam) -> float:
        """Take one AdamW step with the accumulated gradients; return their norm before clipping."""
        try:
            return self._policy_to_change().optim_step(adam)
        finally:
            self._release_free()

    def discard(self) -> None:
        """Forget the accumulated gradients."""
        self._policy.discard()

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        return score(self._passes, self._module(adapter), asks)

    def write_adapter(self, folder: Path) -> None:
        policy = self._policy

        def write() -> None:
            # In the base's format, to which serving and scoring would round it anyway: half the
            # bytes to write and load. States, from which training resumes, keep float32.
            weights = {name: w.to(self._base.dtype) for name, w in policy.masters.adapter().items()}
            with new_folder(folder) as draft:
                write_adapter(draft, self._base, policy.shape, weights)

        self._first_rank(write)
        self._present = folder

    def write_probe(self, folder: Path, size: float) -> None:
        shape = self._policy.shape

        def write() -> None:
            weights = drawn_adapter(self._base, shape, size)
            with new_folder(folder) as draft:
                write_adapter(draft, self._base, shape, weights)

        self._first_rank(write)

    def export_adapter(self, folder: Path) -> None:
        policy = self._policy
        self._first_rank(
            lambda: export_adapter(folder, self._base, policy.shape, policy.masters.adapter())
        )

    def write_state(self, folder: Path) -> None:
        policy = self._policy
        self._first_rank(
            lambda: write_state(folder, self._base, policy.shape, policy.masters.state())
        )

    def read_state(self, folder: Path, moments: bool = True) -> None:
        policy = self._policy_to_change()
        policy.load(
            self._first_rank(lambda: read_state(folder, self._base, policy.shape, moments=moments))
        )

    def close(self) -> None:
        """Do nothing: everything is freed with the object."""

    def _new_policy(self, shape: LoraShape, seed: int) -> LoraOptimizer:
        return LoraOptimizer(
            self._base,
            shape,
            fresh_adapter(self._base, shape, seed),
            passes=self._passes,
            context_tokens=self.facts.context_tokens,
            checkpointing=self._checkpointing,
            shards=self._shards,
        )

    def _restored_policy(self) -> LoraOptimizer:
        """Return the policy, after copying its weights into its module if another's are there."""
        if self._scores_another:
            self._policy.masters.write_copies()
            self._scores_another = False
        return self._policy

    def _policy_to_change(self) -> LoraOptimizer:
        """Return the policy, whose weights are about to change."""
        self._present = None
        return self._restored_policy()

    def _module(self, adapter: Path | None) -> Any:
        """Return the module to score with: the base's, that in training, or one built from the
        files."""
        if adapter is not None and adapter == self._present:
            return self._restored_policy().module
        if self._shards is not None:
            policy = self._policy
            saved = None if adapter is None else self._read(adapter).of(policy.shape)
            self._scores_another = True  # first: `copy_adapter` may fail half way
            copy_adapter(policy.module, saved and saved.tensors)
            return policy.module
        if adapter is None:
            return self._base.module
        module = self._scored.get(adapter)
        if module is None:
            saved = self._read(adapter)
            module = with_lora(self._base, saved.shape, saved.tensors)
            self._scored[adapter] = module
        return module

    def _read(self, adapter: Path) -> SavedAdapter:
        return self._first_rank(lambda: read_adapter(adapter, self._base))

    def _kernel(self, say: Say) -> Kernel:
        """Choose one attention kernel for all ranks: the first one checks it."""
        base = self._base
        if not base.packs:
            return SdpaKernel()
        heads = Heads.of(base.module.config)
        return self._first_rank(
            lambda: choose(device=base.device, dtype=base.dtype, heads=heads, say=say)
        )

    def _first_rank(self, call: Callable[[], T]) -> T:
        """Run a call on the first rank only and return its result, or raise its error, on every
        rank."""
        own: T | Exception | None = None
        if self._world.rank == 0:
            try:
                own = call()
            except (ClawError, OSError, RuntimeError) as error:
                own = error
        first = self._world.gather(own)[0]
        if isinstance(first, Exception):
            raise first
        return cast(T, first)
