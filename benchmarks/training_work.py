"""Floating-point operations that a step executed, and the most that the device can do in a second.

Matrix products are counted, two operations per multiply-add, as computed, recomputation included;
`tests/benchmarks/test_bench_training.py` compares with what PyTorch counts. With T tokens in the
body, P pairs of a query and a key that it sees, R rows in the head:

    body forward    T (base + lora) per layer, base = sum 2 in out, lora = sum 2 r (in + out)
    body backward   T (base + 2 lora): the base is frozen and gets no gradient of its own. The
                    first layer's input takes one only with checkpointing, which asks for it.
    attention       4 heads head_dim P forward, 10 backward: scores again, then four products.
    checkpointing   a second forward of body and attention
    head            2 hidden vocabulary R for each of `head_products`: forward, backward to the
                    rows, and, where logits are not kept, forward again

Rule: work that a mask throws away is not counted, so a share of the ceiling is never flattered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.smoke import Shape


@dataclass(frozen=True)
class Work:
    """Amount of computation of one step."""

    tokens: int
    """Positions that went through the body; padding counts."""
    pairs: int
    """Pairs of a query and a key that it attends to; in padded rows also at padding."""
    head_rows: int
    head_products: int
    """Matrix products of the head: 2 with logits kept for the backward pass, 3 where they are
    recomputed."""
    checkpointing: bool

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.head_rows + other.head_rows,
            self.head_products,
            self.checkpointing,
        )


def flops(work: Work, shape: Shape, rank: int) -> int:
    """Floating-point operations of a step, as the module's docstring counts them."""
    linear = _linear(shape)
    base = sum(2 * i * o for i, o in linear)
    lora = sum(2 * rank * (i + o) for i, o in linear)
    # Where the first layer's input takes none, three products of base and of A are not done.
    first = sum(2 * i * o + 2 * rank * i for i, o in linear[:3])
    forward = shape.layers * (base + lora)
    backward = shape.layers * (base + 2 * lora) - (0 if work.checkpointing else first)
    again = 2 if work.checkpointing else 1
    body = work.tokens * (again * forward + backward)
    attention = work.pairs * shape.layers * shape.heads * shape.head_dim * (4 * again + 10)
    head = work.head_rows * work.head_products * 2 * shape.hidden * shape.vocabulary
    return body + attention + head


def _linear(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(in, out) of a layer's matrices; the first three read the layer's input."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    h, f = shape.hidden, shape.feed_forward
    return ((h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h))


def causal_pairs(length: int) -> int:
    """Number of query-key pairs of one sequence under causal attention."""
    return length * (length + 1) // 2


_SECONDS = 0.5
"""Time for which one size of product is measured, and after which no larger one is."""


def clock(device: torch.device) -> float:
    """Time in seconds. With one thread on the CPU, its processor time: others may be using it,
    too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what it still has to do
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measure operations per second of a large square product of random values: the best of
    several sizes, up to one that takes long, as bfloat16 does on an older CPU."""
    sizes = (256, 512, 1024, 2048) if device.type == "cpu" else (4096, 8192, 16384)
    best = 0.0
    for size in sizes:
        speed = _product(device, dtype, size)
        best = max(best, speed)
        if 8 * size**3 / speed > _SECONDS:
            break
    return best


def _product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    out = a @ b
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        started = clock(device)
        for _ in range(4):  # so that a GPU's launches do not count
            torch.matmul(a, b, out=out)
        best = max(best, 4 * 2 * size**3 / (clock(device) - started))
    return best
