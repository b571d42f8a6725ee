"""What to change where a layout does not fit.

Rule: nothing is advised that was not reckoned and found to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from local_gpu.layout.fits import Demand, Fit, reckon
from local_gpu.layout.gpus import Gpu
from local_gpu.layout.plan import Layout

_MOST_ADVICE: Final = 3
_COUNTS: Final = (2, 4, 8)
_SHORTEST: Final = 8192
"""Of a context that is worth advising: an agent's system prompt and tools need it."""
_QUANTIZED: Final = "bitsandbytes"

Case = tuple[Layout, Demand]
Change = tuple[str, Callable[[Case], Case]]


def advice(layout: Layout, gpus: Sequence[Gpu], demand: Demand, fit: Fit) -> list[str]:
    """Settings that would fit, each alone first, then two together."""
    changes = list(_changes(layout, demand, fit))
    least = min(gpus, key=lambda gpu: gpu.total - gpu.used)
    found: dict[frozenset[str], str] = {}
    for chosen in (*combinations(changes, 1), *combinations(changes, 2)):
        flags = frozenset(text.split()[0] for text, _ in chosen)
        if any(known <= flags for known in found):
            continue  # it takes no more than that
        case = layout, demand
        for _, change in chosen:
            case = change(case)
        if not reckon(case[0], _enough(case[0], gpus, least), case[1]).short:
            found[flags] = " ".join(text for text, _ in chosen)
    return list(found.values())[:_MOST_ADVICE]


def _changes(layout: Layout, demand: Demand, fit: Fit) -> Iterator[Change]:
    if demand.quantization == "none":
        yield (
            "--base-quantization 4bit",
            lambda case: (case[0], replace(case[1], quantization="4bit")),
        )
    if layout.serve and demand.sampler_quantization is None:
        yield (
            f"--sampler-quantization {_QUANTIZED}",
            lambda case: (case[0], replace(case[1], sampler_quantization=_QUANTIZED)),
        )
    if layout.shared:
        yield "--gpus 2", lambda case: (_arranged(1, 1, len(layout.judge)), case[1])
    else:
        yield from _more_gpus(layout)
    longest = fit.longest // 1024 * 1024
    if _SHORTEST <= longest < demand.context_tokens:
        yield (
            f"--context-tokens {longest}",
            lambda case: (case[0], replace(case[1], context_tokens=longest)),
        )


def _more_gpus(layout: Layout) -> Iterator[Change]:
    size = _size(layout)
    judges = len(layout.judge)
    for count in (n for n in _COUNTS if n > len(layout.train)):
        yield (
            f"--actor-gpus {count}",
            lambda case, n=count: (_arranged(n, _size(case[0]), judges), case[1]),
        )
    for group in (n for n in _COUNTS if 0 < size < n):
        yield (
            f"--rollout-tp {group}",
            lambda case, n=group: (_arranged(len(case[0].train), n, judges), case[1]),
        )


def _size(layout: Layout) -> int:
    return len(layout.serve[0]) if layout.serve else 0


def _arranged(learn: int, size: int, judges: int) -> Layout:
    """So many that learn, one server of that size, and a judge's GPUs."""
    after = learn + size
    serve = (tuple(range(learn, after)),) if size else ()
    return Layout(tuple(range(learn)), serve, tuple(range(after, after + judges)))


def _enough(layout: Layout, gpus: Sequence[Gpu], least: Gpu) -> list[Gpu]:
    """As many GPUs as the layout names, of the kind that is there."""
    named = {*layout.train, *layout.judge, *(gpu for group in layout.serve for gpu in group)}
    return [*gpus, *[least] * (max(named) + 1 - len(gpus))]
