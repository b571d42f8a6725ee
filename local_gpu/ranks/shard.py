"""The frozen base cut over the ranks (FSDP2), for one that fits on no single GPU.

Only the decoder layers are cut. Embedding, final norm and head stay whole on every rank: the head
runs apart from the body. Adapters stay whole, too, so their gradients are summed as always, and
nothing is ever scattered or divided. There is one module, and it wears one adapter at a time.

Rule: ranks enter the same passes in the same order, because each layer is gathered from all of
them. A rank that leaves a pass ends, and all of them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.fsdp import fully_shard

from local_gpu.device import out_of_memory
from local_gpu.learn.passes import PassBudget
from local_gpu.learn.world import OutOfStep
from local_gpu.model.lora import BaseModel, adapter_parameters
from local_gpu.ranks.distributed import Distributed
from local_gpu.tree.prefix_tree import grow
from tinker_claw.errors import ClawError

T = TypeVar("T")


class Shards:
    """Implements `Sharding`: how a base in this machine's memory comes onto the ranks' devices."""

    def __init__(self, base: BaseModel, world: Distributed) -> None:
        """`base.device` is where it computes; its tensors may lie elsewhere, and are taken."""
        self._base = base
        self._mesh = world.mesh()

    def cut(self, module: Any) -> None:
        """Cut the layers of a module over the base, in place, and empty the base's own module.

        Layer by layer, so that the base never stands whole on a GPU: a layer is moved there to be
        cut, and the base's own module has the same tensors, so it must let go of each at once.
        """
        body, kept = module.base_model, set(adapter_parameters(module).values())
        for layer, whole in zip(body.layers, self._base.module.base_model.layers, strict=True):
            fully_shard(layer, mesh=self._mesh, ignored_params=kept)
            whole.to("meta")
        cut = {id(p) for layer in body.layers for p in layer.parameters()}
        uncut = kept | {p for p in module.parameters() if id(p) not in cut}
        for tensor in chain(uncut, module.buffers()):
            tensor.data = tensor.data.to(self._base.device)
        # The root has nothing of its own; it lets a layer be gathered while another computes.
        fully_shard(body, mesh=self._mesh, ignored_params=uncut)
        self._base.module.to("meta")  # nobody computes with it any more

    def budget(self, tokens: int | None) -> Lockstep:
        return Lockstep(tokens)


class Lockstep(PassBudget):
    """As many passes on every rank, and none that is cut in two."""

    def run(
        self,
        passes: Sequence[Sequence[int]],
        compute: Callable[[Sequence[int]], list[T]],
        *,
        sequences: Sequence[Tensor],
        undo: Callable[[], None],
        idle: Callable[[], None],
        most: int,
    ) -> dict[int, T]:
        """Compute every pass, and idle while others have more.

        Raises:
            OutOfStep: a pass was left in the middle.
        """
        results: dict[int, T] = {}
        failure: ClawError | None = None
        for indices in (*passes, *[()] * (most - len(passes))):
            try:
                if indices:
                    results.update(zip(indices, compute(indices), strict=True))
                else:
                    idle()
                    undo()
            except ClawError as error:  # told after the pass was through
                failure = failure or error
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise _out_of_step(error, [sequences[i] for i in indices]) from error
        if failure is not None:
            raise failure
        return results


def _out_of_step(error: Exception, sequences: Sequence[Tensor]) -> OutOfStep:
    if not (isinstance(error, RuntimeError) and out_of_memory(error)):
        return OutOfStep(f"{type(error).__name__}: {error}", halve=None)
    if len(sequences) < 2:
        return OutOfStep("One sample alone does not fit in the memory.", halve=None)
    tokens = len(grow(sequences).tokens)
    return OutOfStep(f"A pass of {tokens} tokens does not fit in the memory.", halve=tokens)
