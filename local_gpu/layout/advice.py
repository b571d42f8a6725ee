"""What to change where a layout does not fit.

Rule: nothing is advised that was not reckoned and found to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from local_gpu.layout.fits import Demand, reckon
from local_gpu.layout.gpus import Gpu
from local_gpu.layout.plan import Layout

_MOST_ADVICE: Final = 3
_COUNTS: Final = (2, 4, 8)
_SHORTEST: Final = 8192
"""Of a context that is worth advising: an agent's system prompt and tools need it."""
_CONTEXT: Final = "--context-tokens"
_QUANTIZED: Final = "bitsandbytes"

Case = tuple[Layout, Demand]
Change = tuple[str, Callable[[Case], Case]]


def advice(layout: Layout, gpus: Sequence[Gpu], demand: Demand) -> list[str]:
    """Settings that would fit, fewest first; a shorter context is as long as it can be."""
    changes = list(_changes(layout, demand))
    least = min(gpus, key=lambda gpu: gpu.total - gpu.used)
    found: dict[frozenset[str], str] = {}
    for count, shorter in ((1, False), (0, True), (2, False), (1, True), (2, True)):
        for chosen in combinations(changes, count):
            texts = [text for text, _ in chosen]
            flags = frozenset(text.split()[0] for text in [*texts, *([_CONTEXT] * shorter)])
            if any(known <= flags for known in found):
                continue  # that is enough already
            where, what = layout, demand
            for _, change in chosen:
                where, what = change((where, what))
            fit = reckon(where, _enough(where, gpus, least), what)
            longest = fit.longest // 1024 * 1024
            if shorter and _SHORTEST <= longest < what.context_tokens:
                texts.append(f"{_CONTEXT} {longest}")
                what = replace(what, context_tokens=longest)
                fit = reckon(where, _enough(where, gpus, least), what)
            if not fit.short:
                found[flags] = " ".join(texts)
    return list(found.values())[:_MOST_ADVICE]


def _changes(layout: Layout, demand: Demand) -> Iterator[Change]:
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
