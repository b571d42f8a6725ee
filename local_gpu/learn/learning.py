"""The half that learns, in one process: one rank's part of the work, or all of it.

Rule: synchronous, and called by one thread. With several ranks every one is given the same calls in
the same order; only the first writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from cachetools import LRUCache

from local_gpu.config import LocalConfig
from local_gpu.halves import Facts, ScoreAsk
from local_gpu.learn.passes import Body
from local_gpu.learn.scores import Scorer
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.files import (
    SavedAdapter,
    export_adapter,
    new_folder,
    read_adapter,
    read_state,
    write_adapter,
    write_state,
)
from local_gpu.model.fused import fuse
from local_gpu.model.load import checkpoints_activations
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter, with_lora
from local_gpu.ranks.shard import Shards, wear
from local_gpu.ranks.world import Alone, World
from local_gpu.tree.choice import Heads, Setting, choose
from local_gpu.tree.kernels import Kernel, SdpaKernel
from tinker_claw.errors import BackendError, ClawError, ConfigError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

T = TypeVar("T")

_SCORED_VERSIONS: Final = 2
"""Modules of published adapters that stay for scoring, besides the one that learns."""


def kernel_for(base: BaseModel, setting: Setting, say: Callable[[str], None]) -> Kernel:
    """The attention kernel that a setting means for a model on its device.

    Raises:
        ConfigError: the one that was asked for does not work here.
    """
    text = base.module.config.get_text_config()
    queries = int(text.num_attention_heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // queries
    keys = getattr(text, "num_key_value_heads", None) or queries
    heads = Heads(queries, int(keys), int(width))
    return choose(setting, device=base.device, dtype=base.dtype, heads=heads, say=say)


class LearningCore:
    """Implements `local_gpu.halves.Learning`."""

    def __init__(
        self,
        config: LocalConfig,
        base: BaseModel,
        world: World | None = None,
        shards: Shards | None = None,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        """Make the learning module, and choose how it attends.

        Args:
            world: the ranks; None is this process alone.
            shards: of the base; None where it is whole.
            say: hears, in sentences, what was chosen.

        Raises:
            ConfigError: the attention kernel that was asked for does not work here.
        """
        self._base = base
        self._world = world or Alone()
        self._shape = LoraShape(config.rank, config.alpha)
        context = min(base.context_tokens, config.context_tokens or base.context_tokens)
        count = sum(p.numel() for p in base.module.parameters())
        self._facts = Facts(base.fingerprint, base.vocabulary, context, base.notes, count)
        if base.device.type == "cuda":
            fuse(base.module, device=base.device, dtype=base.dtype, say=say)
        body = Body(self._kernel(config.attention, say), base.device, packs=base.packs)
        self._optimizer = LoraOptimizer(
            base,
            self._shape,
            fresh_adapter(base, self._shape, config.seed),
            body=body,
            context_tokens=context,
            checkpointing=checkpoints_activations(base, config.checkpointing),
            tokens=config.micro_batch_tokens,
            world=self._world,
            shards=shards,
        )
        self._one_module = shards is not None
        self._scorer = Scorer(body, self._optimizer.budget, self._world)
        self._present: Path | None = None
        """The published adapter that the learning module has at this moment, if any."""
        self._modules = LRUCache[Path, Any](_SCORED_VERSIONS)

    @property
    def facts(self) -> Facts:
        return self._facts

    def _kernel(self, setting: Setting, say: Callable[[str], None]) -> Kernel:
        """One for all ranks: by their own clocks they might choose several."""
        if not self._base.packs:
            return SdpaKernel()
        chosen: list[Kernel] = []

        def choose() -> Setting:
            chosen.append(kernel_for(self._base, setting, say))
            return cast(Setting, chosen[0].name)

        named = self._first_rank(choose)
        return chosen[0] if chosen else kernel_for(self._base, named, say)

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        self._present = None
        return self._optimizer.step(passes, adam)

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        with self._wearing(adapter) as module:
            return self._scorer.score(module, asks)

    def write_adapter(self, folder: Path) -> None:
        def write() -> None:
            # In the base's format, to which whoever serves or scores with it would round it: half
            # the bytes to write and to load. States keep float32.
            rounded = {n: w.to(self._base.dtype) for n, w in self._optimizer.adapter().items()}
            with new_folder(folder) as draft:
                write_adapter(draft, self._base, self._shape, rounded)

        self._first_rank(write)
        self._present = folder

    def export_adapter(self, folder: Path) -> None:
        def write() -> None:
            export_adapter(folder, self._base, self._shape, self._optimizer.adapter())

        self._first_rank(write)

    def write_state(self, folder: Path) -> None:
        def write() -> None:
            write_state(folder, self._base, self._shape, self._optimizer.state())

        self._first_rank(write)

    def read_state(self, folder: Path) -> None:
        read = self._first_rank(lambda: read_state(folder, self._base, self._shape))
        self._optimizer.load(read)
        self._present = None

    def close(self) -> None:
        """Nothing: what it holds goes with it."""

    @contextmanager
    def _wearing(self, adapter: Path | None) -> Generator[Any]:
        """The module to score with, while it has the weights of that adapter."""
        if not self._one_module or (adapter is not None and adapter == self._present):
            yield self._module(adapter)
            return
        saved = None if adapter is None else self._first_rank(self._reading(adapter))
        wear(self._optimizer.module, None if saved is None else saved.of(self._shape).tensors)
        try:
            yield self._optimizer.module
        finally:
            self._optimizer.wear_own()

    def _reading(self, adapter: Path) -> Callable[[], SavedAdapter]:
        return lambda: read_adapter(adapter, self._base)

    def _module(self, adapter: Path | None) -> Any:
        """The module to score with: the base's, the learning one, or one made of the files."""
        if adapter is None:
            return self._base.module
        if adapter == self._present:
            return self._optimizer.module
        if adapter not in self._modules:
            self._modules[adapter] = self._load(adapter)
        return self._modules[adapter]

    def _load(self, adapter: Path) -> Any:
        saved = self._first_rank(self._reading(adapter))
        try:
            return with_lora(self._base, saved.shape, saved.tensors)
        except ConfigError as error:
            raise BackendError(str(error)) from error

    def _first_rank(self, call: Callable[[], T]) -> T:
        """What the first rank reads, or has written, or its failure: the same on every rank."""
        failure: Exception | None = None
        result: T | None = None
        if self._world.rank == 0:
            try:
                result = call()
            except (ClawError, OSError, RuntimeError) as error:
                failure = error
        failure, result = self._world.share((failure, result))
        if failure is not None:
            raise failure
        return cast(T, result)
