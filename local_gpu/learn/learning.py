"""Training in one process: one rank's part of the work, or all of it.

Models of one shape share a module, which has the weights of one of them at a time; each has its own
masters, moments and gradients. A sharded base has one module for all of them.

Rule: synchronous, and called by one thread. With several ranks, each gets the same calls in the
same order; only the first reads and writes files, and counts memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
from cachetools import LRUCache

from local_gpu.config import LocalConfig, Say
from local_gpu.halves import POLICY, Facts, ScoreAsk
from local_gpu.learn.losses import RecordPass, Scored
from local_gpu.learn.memory import ModelMemory, free_bytes, passes_in_memory, release_free
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.scores import score
from local_gpu.learn.step import LoraOptimizer, put_on
from local_gpu.learn.world import Alone, Sharding, World
from local_gpu.model.files import (
    SavedAdapter,
    SavedState,
    export_adapter,
    new_folder,
    read_adapter,
    read_state,
    write_adapter,
    write_state,
)
from local_gpu.model.fused import fuse
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
from tinker_claw.errors import (
    BackendError,
    ClawError,
    ConfigError,
    ModelFileError,
    RequestError,
)
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

T = TypeVar("T")

_SCORED_VERSIONS: Final = 2
"""Modules of published adapters that are kept for scoring, besides those in training."""


def _fitting(
    base: BaseModel, context: int, world: World, *, sharded: bool
) -> tuple[bool, int | None]:
    """Return whether activations are checkpointed, and the tokens of a pass; None: no memory bounds
    them."""
    if base.device.type == "cpu" and world.size == 1:
        with suppress(ModelFileError):  # else as where memory is no worry
            return passes_in_memory(
                counted(base.module),
                free=free_bytes(base.device),
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
        """Choose the attention kernel, and make the policy if there is one.

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
        self._shape = LoraShape(config.rank, config.alpha, head=not config.policy)
        """Shape of the policy's LoRA; over a sharded base, of the one module that all models
        share."""
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
        if base.device.type == "cuda":
            fuse(base.module, dtype=base.dtype, say=say)
        body = Body(self._kernel(say), base.device, packs=base.packs)
        self._passes = Passes(
            body, PassBudget(tokens), self._world, self.vision, together=shards is not None
        )
        self._models: dict[str, LoraOptimizer] = {}
        self._learners: dict[LoraShape, Any] = {}
        """Modules in training, here and below by shape."""
        self._worn: dict[LoraShape, str] = {}
        """Name of the model whose weights a module currently holds."""
        self._scored = LRUCache[Path, Any](_SCORED_VERSIONS)
        """Modules of published adapters."""
        self._present: Path | None = None
        """Folder of the published adapter that equals the policy at this moment, if any."""
        if config.policy or shards is not None:
            self._make(POLICY, self._shape, config.seed)
        if not config.policy:
            self._models.clear()
        self._memory = ModelMemory(base)  # once a sharded base is on its GPUs

    def create(self, model: str, shape: LoraShape, seed: int) -> None:
        self.drop(model)
        # The first rank decides for all, as their own figures may differ.
        self._first_rank(lambda: self._memory.take(model, shape))
        try:
            self._make(model, shape, seed)
        except BaseException:
            self.drop(model)
            raise

    def drop(self, model: str) -> None:
        self._memory.give_back(model)
        gone = self._models.pop(model, None)
        kept = {other.shape for other in self._models.values()}
        if gone is not None and gone.shape not in kept and self._shards is None:
            del self._learners[gone.shape]

    def step(self, passes: Sequence[LossPass], adam: Adam, model: str = POLICY) -> StepReport:
        try:
            return self._changing(model).step(passes, adam)
        finally:
            self._release_free()

    def _release_free(self) -> None:
        """Return what others on the machine may need until the next step."""
        if self._shares:
            torch.cuda.empty_cache()
        elif self._base.device.type == "cpu":
            release_free()

    def forward_backward(self, wanted: RecordPass, model: str) -> list[Scored]:
        return self._model(model).forward_backward(wanted)

    def forward(self, wanted: RecordPass, model: str) -> list[Scored]:
        return self._model(model).forward(wanted)

    def optim_step(self, adam: Adam, model: str) -> float:
        try:
            return self._changing(model).optim_step(adam)
        finally:
            self._release_free()

    def discard(self, model: str) -> None:
        self._model(model).discard()

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        return score(self._passes, self._module(adapter), asks)

    def write_adapter(self, folder: Path, model: str = POLICY) -> None:
        learner = self._model(model)

        def write() -> None:
            weights = learner.adapter()
            if model == POLICY:
                # In the base's format, to which serving and scoring would round it anyway: half the
                # bytes to write and load. States, from which training resumes, keep float32.
                weights = {name: w.to(self._base.dtype) for name, w in weights.items()}
            with new_folder(folder) as draft:
                write_adapter(draft, self._base, learner.shape, weights)

        self._first_rank(write)
        if model == POLICY:
            self._present = folder

    def write_probe(self, folder: Path, size: float) -> None:
        shape = replace(self._shape, head=False)  # servers get no LoRA on the head

        def write() -> None:
            weights = drawn_adapter(self._base, shape, size)
            with new_folder(folder) as draft:
                write_adapter(draft, self._base, shape, weights)

        self._first_rank(write)

    def export_adapter(self, folder: Path, model: str = POLICY) -> None:
        of = self._model(model)
        self._first_rank(lambda: export_adapter(folder, self._base, of.shape, of.adapter()))

    def write_state(self, folder: Path, model: str = POLICY) -> None:
        of = self._model(model)
        self._first_rank(lambda: write_state(folder, self._base, of.shape, of.state()))

    def read_state(self, folder: Path, model: str = POLICY) -> None:
        def read(shape: LoraShape) -> SavedState:
            return read_state(folder, self._base, shape)

        self._load(model, folder, read)

    def read_adapter(self, folder: Path, model: str) -> None:
        def read(shape: LoraShape) -> SavedState:
            return SavedState(read_adapter(folder, self._base).of(shape).tensors, {}, 0)

        self._load(model, folder, read)

    def close(self) -> None:
        """Do nothing: everything is freed with the object."""

    def _load(self, model: str, folder: Path, read: Callable[[LoraShape], SavedState]) -> None:
        known = self._models.get(model)

        def of_files() -> tuple[LoraShape, SavedState]:
            shape = known.shape if known else read_adapter(folder, self._base).shape
            return shape, read(shape)

        shape, state = self._first_rank(of_files)
        if known is None:
            self.create(model, shape, seed=0)
        try:
            self._changing(model).load(state)
        except BackendError:
            if known is None:
                self.drop(model)
            raise

    def _make(self, model: str, shape: LoraShape, seed: int) -> None:
        home = self._home(shape)
        if not home.covers(shape):
            raise RequestError(
                "The base is split over GPUs, where all models have one size: rank "
                f"{home.rank} and alpha {home.alpha}."
            )
        made = LoraOptimizer(
            self._base,
            shape,
            fresh_adapter(self._base, shape, seed),
            passes=self._passes,
            context_tokens=self.facts.context_tokens,
            checkpointing=self._checkpointing,
            shards=self._shards,
            module=self._learners.get(home),
        )
        self._models[model], self._learners[home] = made, made.module
        self._worn.pop(home, None)

    def _model(self, model: str) -> LoraOptimizer:
        """Return a model, after copying its weights into its module if another's are there."""
        found = self._models.get(model)
        if found is None:
            raise RequestError(f"There is no model {model} in training.")
        home = self._home(found.shape)
        if self._worn.get(home) != model:
            found.wear()
            self._worn[home] = model
        return found

    def _home(self, shape: LoraShape) -> LoraShape:
        """Shape of the module that a model of this shape learns with."""
        return shape if self._shards is None else self._shape

    def _changing(self, model: str) -> LoraOptimizer:
        """Return a model whose weights are about to change."""
        if model == POLICY:
            self._present = None
        return self._model(model)

    def _module(self, adapter: Path | None) -> Any:
        """The module to score with: the base's, one in training, or one built from the files."""
        if adapter is not None and adapter == self._present:
            return self._model(POLICY).module
        if self._shards is not None:
            module = self._learners[self._shape]
            saved = None if adapter is None else self._read(adapter)
            if saved is not None and not self._shape.covers(saved.shape):
                saved.of(self._shape)  # raises with the reason
            self._worn.pop(self._shape, None)  # first: `put_on` may fail half way
            put_on(module, saved and saved.tensors)
            return module
        if adapter is None:
            return self._base.module
        module = self._scored.get(adapter)
        if module is None:
            module = self._scored[adapter] = self._built(adapter)
        return module

    def _built(self, adapter: Path) -> Any:
        saved = self._read(adapter)
        try:
            return with_lora(self._base, saved.shape, saved.tensors)
        except ConfigError as error:
            raise BackendError(str(error)) from error

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
        failure: Exception | None = None
        result: T | None = None
        if self._world.rank == 0:
            try:
                result = call()
            except (ClawError, OSError, RuntimeError) as error:
                failure = error
        failure, result = self._world.gather((failure, result))[0]
        if failure is not None:
            raise failure
        return cast(T, result)
