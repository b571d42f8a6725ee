"""Training processes: one, or several with adapter replicas and one gradient all-reduce per step.

    control process                     torchrun, unless rank 0 is alone
    RankedLearning ── socket pair ── rank 0 ── NCCL or gloo ── rank 1 ... on this or other machines

Rule: every rank carries out the same commands in the same order; rank 0 alone answers and writes.
"""
