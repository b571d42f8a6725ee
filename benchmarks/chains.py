"""`python -m benchmarks.chains`: steps over an agent's turns, which extend one another, and over
captured requests of OpenClaw, whose volatile end forks each turn from the next.

The tree is compared with one whose segments also end where a sample ends, though nothing
forks there, and with no tree at all.

Rule: as in `benchmarks.training`, whose sides these are: on the same samples, in turn, a figure is
the median. The gradients are compared with those of samples one by one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

import torch
from rich.table import Table

from benchmarks import vocabulary
from benchmarks.training_report import screen
from benchmarks.training_run import Measurement, Say
from benchmarks.training_shapes import PRESETS, Shape, adapter_of, build, with_loss
from benchmarks.training_sides import Ours, Settings
from benchmarks.training_work import ceiling
from local_gpu.model.lora import LoraShape
from local_gpu.plan.memory import DEFAULT_TOKENS
from local_gpu.tree.choice import Heads, Setting, choose
from local_gpu.tree.cuts import cut
from local_gpu.tree.fused import layout_of
from local_gpu.tree.kernels import Attend, Kernel, pieces_of
from local_gpu.tree.prefix_tree import PrefixTree, Rows, Segment, grow
from tests.captures import load
from tinker_claw.formats.chat import parse_chat
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Datum

TREE, SPLIT, NONE = "tree", "tree, split where samples end", "no tree"
SHAPE: Final = Shape(2, 64, 192, 4, 2, 16, 8192)
RANK: Final = 8
CPU: Final = torch.device("cpu")
SCENARIOS: Final = ("tools_multiturn", "variant_affinity", "variant_reasoning")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a batch, in tokens but for the turns."""

    turns: int = 16
    first: int = 2000
    """An agent's first prompt: instructions, tools and task."""
    reply: int = 120
    result: int = 480
    """Output of the tool that the agent called."""


def agent(sizes: Sizes, vocabulary: int) -> list[Datum]:
    """Make turns of one terminal session, each of which begins with the one before."""
    rng = random.Random(0)
    known, found = _words(rng, sizes.first, vocabulary), list[Datum]()
    for _ in range(sizes.turns):
        known += _words(rng, sizes.reply, vocabulary)
        found.append(with_loss(rng, known, vocabulary, tail=sizes.reply))
        known += _words(rng, sizes.result, vocabulary)
    return found


def openclaw(sizes: Sizes, vocabulary: int, tokenizer: Path) -> list[Datum]:
    """Make samples of captured requests as the gateway renders them, with replies of random
    tokens."""
    renderer, rng = Renderer.load(str(tokenizer), "qwen3"), random.Random(0)
    short: dict[int, int] = {}
    found: list[Datum] = []
    captured = [one for one in load() if one.scenario in SCENARIOS][: sizes.turns]
    for request in (parse_chat(one.encoded()) for one in captured):
        prompt = renderer.prompt(request.messages, request.tools).tokens
        # The model's vocabulary is small: a number for each id that occurs, the same for all.
        ids = tuple(short.setdefault(token, len(short)) for token in prompt)
        ids += _words(rng, sizes.reply, vocabulary)
        found.append(with_loss(rng, ids, vocabulary, tail=sizes.reply))
    if len(short) > vocabulary:
        raise ValueError(f"{len(short)} ids occur, and the model has {vocabulary}")
    return found


def _words(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary) for _ in range(count))


class Split:
    """A kernel over a tree whose segments end where a sample ends, too."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self._kernel = kernel

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        return self._kernel.prepare(split(tree), device)


def split(tree: PrefixTree) -> PrefixTree:
    """Cut the segments of a tree where one of its sequences ends."""
    ends = sorted({int(rows[-1]) + 1 for rows in tree.rows})
    found: list[Segment] = []
    parts: dict[Rows, tuple[Rows, ...]] = {}
    for one in tree.segments:
        cuts = [one.first, *(end for end in ends if one.first < end < one.last), one.last]
        parts[one.first, one.last] = own = tuple(pairwise(cuts))
        above = tuple(part for rows in one.ancestors for part in parts[rows])
        found += [
            Segment(*rows, one.position + rows[0] - one.first, (*above, *own[:at]), one.subtree)
            for at, rows in enumerate(own)
        ]
    return replace(tree, segments=tuple(found))


@dataclass(frozen=True)
class Row:
    """Figures of one side over one batch."""

    case: str
    side: str
    tokens: int
    """Tokens that the body computed in a step."""
    pairs: int
    """Pairs of a query and a key that it sees."""
    segments: int
    calls: int
    """Calls of attention in a layer, forward."""
    keys: int
    """Rows of keys that the kernel for unequal lengths copies in a layer."""
    seconds: float
    gradient_error: float
    """Relative error compared with samples one by one."""


def measure(
    batches: Mapping[str, Sequence[Datum]],
    shape: Shape,
    say: Say,
    *,
    repeat: int = 3,
    pass_tokens: int = DEFAULT_TOKENS,
    attention: Setting = "auto",
    device: torch.device = CPU,
) -> list[Row]:
    """Take steps over each batch with each side."""
    longest = max(len(datum.tokens) for datums in batches.values() for datum in datums)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    base = build(shape, device=device, dtype=dtype, context=longest)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    kernel = choose(attention, device=device, dtype=dtype, heads=heads, say=say)
    lora = LoraShape(RANK, RANK)
    cuda = device.type == "cuda"
    settings = Settings(base, lora, adapter_of(base, lora), cuda, pass_tokens, kernel)
    sides: dict[str, Any] = {
        TREE: partial(Ours, TREE, settings),
        SPLIT: partial(Ours, SPLIT, replace(settings, kernel=Split(kernel))),
        NONE: partial(Ours, NONE, settings, pack=False),
    }
    top = ceiling(device, dtype)
    run = Measurement(settings, shape, sides, repeat=repeat, ceiling=top, say=say)
    found: list[Row] = []
    for case, datums in batches.items():
        truth = sides[NONE]().gradients(datums)
        for row in run.case(case, datums, (datums, truth)):
            if row.work is None or row.median_s is None or row.gradient_error is None:
                raise RuntimeError(f"{case}, {row.side}: {row.failed}")
            trees = _trees(row.side, datums, pass_tokens)
            found.append(
                Row(
                    case,
                    row.side,
                    row.work.tokens,
                    row.work.pairs,
                    sum(len(tree.segments) for tree in trees),
                    sum(len(pieces_of(tree)) for tree in trees),
                    sum(layout_of(tree).key_cuts[-1] for tree in trees),
                    row.median_s,
                    row.gradient_error,
                )
            )
    return found


def _trees(side: str, datums: Sequence[Datum], pass_tokens: int) -> list[PrefixTree]:
    """Grow the trees of a side's passes."""
    sequences = [torch.tensor(datum.tokens[:-1]) for datum in datums]
    (passes,) = cut(sequences, ranks=1, tokens=1 if side == NONE else pass_tokens, even=1.0)
    trees = [grow([sequences[i] for i in one]) for one in passes]
    return [split(tree) for tree in trees] if side == SPLIT else trees


def parser() -> argparse.ArgumentParser:
    """Command line of the benchmark."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.chains", description=__doc__)
    made.add_argument("--repeat", type=int, default=3, help="measured steps (default 3)")
    made.add_argument("--turns", type=int, default=16, help="samples of a batch (default 16)")
    made.add_argument("--case", choices=("agent", "openclaw"), help="one batch alone")
    made.add_argument("--pass-tokens", type=int, default=DEFAULT_TOKENS, help="of one pass")
    made.add_argument("--preset", choices=sorted(PRESETS), help="another model than the tiny one")
    made.add_argument("--device", default="cpu")
    made.add_argument("--attention", choices=get_args(Setting), default="auto", help="kernel")
    made.add_argument("--json", type=Path, help="write the rows here, too")
    return made


def main() -> None:
    """Read flags, measure, print a table and, where asked, write a JSON file."""
    arguments = parser().parse_args()
    torch.set_num_threads(1)
    console = screen()

    def say(line: str) -> None:
        console.print(line, style="dim")

    sizes = replace(Sizes(), turns=arguments.turns)
    shape = PRESETS[arguments.preset].shape if arguments.preset else SHAPE
    batches: dict[str, Sequence[Datum]] = {}
    if arguments.case != "openclaw":
        batches["agent"] = agent(sizes, shape.vocabulary)
    if arguments.case != "agent":
        batches["openclaw"] = openclaw(sizes, shape.vocabulary, vocabulary.load(say=say))
    rows = measure(
        *(batches, shape, say),
        repeat=arguments.repeat,
        pass_tokens=arguments.pass_tokens,
        attention=arguments.attention,
        device=torch.device(arguments.device),
    )
    ours = {row.case: row for row in rows if row.side == TREE}
    table = Table("batch", "side", "tokens", "pairs", "segments", "calls", "keys", "s", "ratio")
    for row in rows:
        first = ours[row.case]
        ratios = f"{row.tokens / first.tokens:.2f} {row.seconds / first.seconds:.2f}"
        counts = (row.tokens, row.pairs, row.segments, row.calls, row.keys)
        table.add_row(row.case, row.side, *map("{:,}".format, counts), f"{row.seconds:.2f}", ratios)
    console.print(table, "ratio: tokens and processor seconds, beside the tree", highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
