"""The frozen base sharded over the ranks (FSDP2), for one that fits on no single GPU.

Only the decoder layers are cut. Embedding, final norm and head stay whole on every rank: the head
runs apart from the body. Adapters stay whole, too, so their gradients are summed as always, and
nothing is ever scattered or divided. There is one module, and it holds one adapter at a time.

Rule: ranks enter the same passes in the same order, because each layer is gathered from all of
them. A rank that runs out of memory joins the remaining gathers of the pass, then computes it again
in halves; one that leaves a pass for another reason ends, and all ranks with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from local_gpu.learn.passes import PassBudget
from local_gpu.learn.world import OutOfStep
from local_gpu.model.lora import BaseModel, adapter_parameters
from local_gpu.ranks.distributed import Distributed
from tinker_claw.errors import ClawError

T = TypeVar("T")


class _Gathers(DefaultAllGather):
    """Gathers layers and counts them, after leaving out the first `skip`."""

    def __init__(self) -> None:
        self.count = 0
        self.skip = 0

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.skip:
            self.skip -= 1
            output_tensor.zero_()
            return None
        self.count += 1
        return super().__call__(output_tensor, *args, **kwargs)


class Shards:
    """Implements `Sharding`: moves a base from this machine's memory onto the ranks' devices."""

    def __init__(self, base: BaseModel, world: Distributed) -> None:
        """`base.device` is where it computes; its tensors may be elsewhere, and are consumed."""
        self._base = base
        self._mesh = init_device_mesh(world.device.type, (world.size,))
        self.world = world
        self.gathers = _Gathers()

    def cut(self, module: Any) -> None:
        """Shard the layers of a module over the base, in place, and empty the base's own module.

        Layer by layer, so that no GPU ever holds the whole base: a layer is moved there to be
        sharded, and the base's own module, which shares its tensors, must release it at once.
        """
        body, kept = module.base_model, set(adapter_parameters(module).values())
        for layer, whole in zip(body.layers, self._base.module.base_model.layers, strict=True):
            fully_shard(layer, mesh=self._mesh, ignored_params=kept)
            layer.set_custom_all_gather(self.gathers)
            whole.to("meta")
        cut = {id(p) for layer in body.layers for p in layer.parameters()}
        uncut = kept | {p for p in module.parameters() if id(p) not in cut}
        for tensor in chain(uncut, module.buffers()):
            tensor.data = tensor.data.to(self._base.device)
        # The root has no parameters; it lets a layer be gathered while another computes.
        self._body: Any = fully_shard(body, mesh=self._mesh, ignored_params=uncut)
        self._base.module.to("meta")  # no longer used

    def budget(self, tokens: int | None) -> Lockstep:
        return Lockstep(tokens, self)

    def finish(self, gathered: int, idle: Callable[[], None]) -> None:
        """Join the other ranks for the remaining layers of a pass that was left after
        `gathered`."""
        # Needed after each backward pass; FSDP2 has no public call for it.
        self._body._get_fsdp_state()._root_post_backward_final_callback()
        self.gathers.skip = gathered
        idle()


class Lockstep(PassBudget):
    """A pass budget that runs the same number of passes on every rank."""

    def __init__(self, tokens: int | None, shards: Shards) -> None:
        super().__init__(tokens)
        self._shards = shards

    def run(
        self,
        passes: Sequence[Sequence[int]],
        compute: Callable[[Sequence[int]], list[T]],
        *,
        sequences: Sequence[Tensor],
        undo: Callable[[], None],
        idle: Callable[[], None],
    ) -> dict[int, T]:
        """Compute every pass, and idle passes while other ranks have more.

        Raises:
            OutOfStep: a pass was left in the middle.
        """
        results: dict[int, T] = {}
        failure: ClawError | None = None
        waiting = [list(indices) for indices in reversed(passes)]
        gathers = self._shards.gathers
        while self._shards.world.most(len(waiting)):
            indices, before = waiting.pop() if waiting else [], gathers.count
            try:
                done = self._try(indices, compute) if indices else idle()
                if indices and done is not None:
                    results.update(zip(indices, done, strict=True))
                    continue
                if indices:
                    self._forget(undo)
                    self._shards.finish(gathers.count - before, idle)
                undo()
                waiting += self._halves(indices, sequences)
            except ClawError as error:  # raised after all passes
                failure = failure or error
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise OutOfStep(f"{type(error).__name__}: {error}") from error
        if failure is not None:
            raise failure
        return results
