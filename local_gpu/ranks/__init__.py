"""Training processes on this machine: one, or several with one all-reduce of gradients per step.

    control process ── pipe ── rank 0
                    ── pipe ── rank 1 ...      gradients by NCCL or gloo, everything else by pipes

Rule: every rank carries out the same commands in the same order; rank 0 alone writes files.
"""
