"""Several processes that learn as one: replicas of the adapter, one sum of gradients a step.

    control process                     torchrun
    RankedLearning ── socket pair ── rank 0 ── NCCL or gloo ── rank 1 ... on this or other machines

Rule: every rank carries out the same commands in the same order; rank 0 alone answers and writes.
"""
