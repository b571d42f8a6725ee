"""The frozen base sharded over the ranks (FSDP2), for one that fits on no single GPU.

Only the decoder layers are cut. Embedding, final norm and head stay whole on every rank: the head
runs apart from the body. Adapters stay whole, too, so their gradients are summed as always, and
nothing is ever scattered or divided. There is one module, and it holds one adapter at a time.

Rule: ranks enter the same passes in the same order, because each layer is gathered from all of
them. A rank that leaves a pass in the middle ends, and all ranks with it.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from local_gpu.model.lora import BaseModel, adapter_parameters


class Shards:
    """Implements `Sharding`: moves a base from this machine's memory onto the ranks' devices."""

    def __init__(self, base: BaseModel, device: torch.device, size: int) -> None:
        """`base.device` is where it computes; its tensors may be elsewhere, and are consumed."""
        self._base = base
        self._mesh = init_device_mesh(device.type, (size,))

    def cut(self, module: Any) -> None:
        """Shard the layers of a module over the base, in place, and empty the base's own module.

        Layer by layer, so that no GPU ever holds the whole base: a layer is moved there to be
        sharded, and the base's own module, which shares its tensors, must release it at once.
        """
        body, kept = module.base_model, set(adapter_parameters(module).values())
        for layer, whole in zip(body.layers, self._base.module.base_model.layers, strict=True):
            fully_shard(layer, mesh=self._mesh, ignored_params=kept)
            whole.to("meta")
        cut = {id(p) for layer in body.layers for p in layer.parameters()}
        uncut = kept | {p for p in module.parameters() if id(p) not in cut}
        for tensor in chain(uncut, module.buffers()):
            tensor.data = tensor.data.to(self._base.device)
        # The root has no parameters; it lets a layer be gathered while another computes.
        fully_shard(body, mesh=self._mesh, ignored_params=uncut)
        self._base.module.to("meta")  # no longer used
