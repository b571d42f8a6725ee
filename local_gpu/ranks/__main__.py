"""Run one rank, alone or under torchrun: `torchrun ... -m local_gpu.ranks`.

On the machine of the control process that is done for the user. On further machines it is done by
hand, and the settings come from rank 0: only the model must be there under the same name. There
they end with the ranks of the first machine, so let the shell start them again.
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
    # It does not fit on one GPU: it comes through this machine's memory, once for every rank.
    base = open_base(config.model, device="cpu", dtype=dtype, threads=config.threads)
    base = replace(base, device=world.device)
    return LearningCore(config, base, world, Shards(base, world))


if __name__ == "__main__":
    sys.exit(live(build))
