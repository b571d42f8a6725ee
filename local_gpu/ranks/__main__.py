"""Run one rank, alone or under torchrun: `torchrun ... -m local_gpu.ranks`.

The control process starts the ranks of its own machine. Those of further machines are started by
hand and get their settings from rank 0: only the model must be there under the same name. They end
with the ranks of the first machine, so let the shell restart them.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from local_gpu.config import LocalConfig
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.world import World
from local_gpu.model.load import keep_memory_whole, open_base
from local_gpu.ranks.distributed import Distributed
from local_gpu.ranks.rank import live
from local_gpu.ranks.shard import Shards


def build(config: LocalConfig, world: World) -> LearningCore:
    """Build a learner with the whole base on this rank's device, or with its layers sharded over
    all ranks."""
    if config.shard != "on" or not isinstance(world, Distributed):
        base = open_base(
            config.model,
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            quantization=config.quantization,
        )
        return LearningCore(config, base, world)
    cuda = torch.device(config.device).type == "cuda"
    if cuda:
        keep_memory_whole()
    dtype = "bfloat16" if config.dtype == "auto" and cuda else config.dtype
    # It does not fit on one GPU: every rank loads it into CPU memory first.
    base = open_base(config.model, device="cpu", dtype=dtype, threads=config.threads)
    base = replace(base, device=world.device)
    return LearningCore(config, base, world, Shards(base, world))


if __name__ == "__main__":
    sys.exit(live(build))
