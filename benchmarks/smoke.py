"""Check the trainer on this GPU in about three minutes: `python -m benchmarks.smoke`.

Random weights of Qwen3-8B's shape, so nothing is downloaded. One line of JSON follows each check:

    machine         what is installed.
    attention       merged attention beside PyTorch's own, in the format that is trained in.
    gradients       of four layers, beside plain attention in a wider format.
    memory          bytes that a token of a pass takes, beside what `doctor` reckons with.
    out of memory   a pass that is too large is halved, and gives the gradient of a smaller budget.
    speed           tokens a second of a step over 16 samples of 8,192 tokens.

On a CPU the same runs at a tiny size, in seconds. Exit status: 0 all is well, 1 something is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from random import Random
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from local_gpu.device import device_fault, first_line
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.load import keep_memory_whole
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter
from local_gpu.plan.memory import counted, token_bytes
from local_gpu.tree.body import Body
from local_gpu.tree.choice import FAILURES, Heads, checked
from local_gpu.tree.kernels import ATTENTION, Attend, Kernel, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree
from tinker_claw.errors import ClawError
from tinker_claw.types import Adam, Datum, LossPass

Row = dict[str, Any]
Gradients = dict[str, Tensor]
"""By the adapter's names, float32 on the CPU."""
_ECHO: Final = Adam(learning_rate=0.0, beta1=0.0, grad_clip_norm=0.0)
"""Leaves the weights alone, and the gradient itself in the first moment."""
_SLACK: Final = 2.0
"""Largest accepted error of a gradient, as a multiple of the error that plain attention has in the
same format."""
_SPARE: Final = 1.25
"""Largest accepted number of bytes of a token, as a multiple of the planned one."""
_LOSS_SHARE: Final = 0.1
_ROUNDING: Final = 1e-5
"""Relative error of a gradient that float32 explains by itself."""
_PACKAGES: Final = ("transformers", "flash-attn-3", "bitsandbytes", "vllm")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense Qwen3."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the checks."""

    shape: Shape
    samples: int
    tokens: int
    """Tokens of each sample."""
    rank: int


QWEN3_8B: Final = Shape(36, 4096, 12_288, 32, 8, 128, 151_936)
FULL: Final = Size(QWEN3_8B, samples=16, tokens=8192, rank=32)
TINY: Final = Size(Shape(4, 64, 128, 4, 2, 16, 512), samples=4, tokens=64, rank=4)


def random_base(
    shape: Shape, *, context: int, device: torch.device, dtype: torch.dtype
) -> BaseModel:
    """Make a base with random weights, the same each time; torch's random state is kept."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=devices), device:
            torch.manual_seed(0)
            module: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    module.eval().requires_grad_(False)
    module.set_attn_implementation(ATTENTION)
    return BaseModel(
        module=module,
        source="random",
        fingerprint="random",
        vocabulary=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        device=device,
        dtype=dtype,
    )


def grown_adapter(base: BaseModel, lora: LoraShape) -> dict[str, Tensor]:
    """Make an adapter as in the middle of training: with B = 0, A would have no gradient."""
    generator = torch.Generator().manual_seed(1)
    adapter = fresh_adapter(base, lora, seed=0)
    for name, tensor in adapter.items():
        if ".lora_B." in name:
            adapter[name] = 0.01 * torch.randn(tensor.shape, generator=generator)
    return adapter


def with_loss(rng: Random, tokens: tuple[int, ...], vocabulary: int) -> Datum:
    """Make a sample whose last tenth is trained, as an agent's reply after its prompt.

    Random weights give a probability of about 1 / vocabulary; the behaviour logprobs stray a little
    from that, so that some ratios are clipped and most are not.
    """
    tail = max(1, round(len(tokens) * _LOSS_SHARE))
    uniform = -math.log(vocabulary)
    return Datum(
        tokens=tokens,
        start=len(tokens) - tail,
        logprobs=tuple(uniform + rng.uniform(-0.1, 0.1) for _ in range(tail)),
        advantages=tuple(rng.uniform(-1.0, 1.0) / tail for _ in range(tail)),
    )


class Bench:
    """A base with random weights, and what is computed with it."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        self.size, self.lora = size, LoraShape(size.rank, size.rank)
        self.base = random_base(size.shape, context=size.tokens, device=device, dtype=dtype)
        self.adapter = grown_adapter(self.base, self.lora)

    def widened(self, dtype: torch.dtype) -> Bench:
        """Return the same weights in a wider format. This one is not to be used any more."""
        self.base = replace(self.base, module=self.base.module.to(dtype), dtype=dtype)
        return self

    def samples(self, count: int, tokens: int, *, shared: int = 0) -> list[Datum]:
        """Draw samples whose last tenth is trained, and which begin with the same tokens."""
        rng = Random(0)
        words = self.size.shape.vocabulary
        prompt = [rng.randrange(words) for _ in range(shared)]
        own = [[rng.randrange(words) for _ in range(tokens - shared)] for _ in range(count)]
        return [with_loss(rng, (*prompt, *rest), words) for rest in own]

    def optimizer(self, kernel: Kernel, pass_tokens: int, *, share: bool = True) -> LoraOptimizer:
        """Make an optimizer as the trainer has it, which keeps one activation a layer."""
        body = Body(kernel, self.base.device, share=share)
        return LoraOptimizer(
            self.base,
            self.lora,
            self.adapter,
            passes=Passes(body, PassBudget(pass_tokens)),
            context_tokens=self.base.context_tokens,
            checkpointing=True,
        )

    def gradients(self, optimizer: LoraOptimizer, datums: Sequence[Datum]) -> Gradients:
        """Return the gradients of a step on these samples."""
        optimizer.step([LossPass("ppo", tuple(datums))], _ECHO)
        moments = optimizer.masters.state().moments
        return {name: moments[f"{name}.exp_avg"].float().cpu() for name in self.adapter}


def distance(got: Gradients, true: Gradients) -> float:
    """Compute the relative distance |got - true| / |true|, over all tensors."""
    square = sum(float((got[name] - right).double().square().sum()) for name, right in true.items())
    return (square / sum(float(t.double().square().sum()) for t in true.values())) ** 0.5


# The checks


def machine(device: torch.device) -> Row:
    """Name the device, and the packages that matter here."""
    row: Row = {"well": True, "device": str(device), "torch": torch.__version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            row[name] = version(name)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        row |= {"gpu": name, "cuda": torch.version.cuda, "free_bytes": free, "total_bytes": total}
    return row


def attention(size: Size, device: torch.device, dtype: torch.dtype) -> Row:
    """Compare merged attention with PyTorch's own, forward and backward."""
    heads = Heads(size.shape.heads, size.shape.kv_heads, size.shape.head_dim)
    problem = checked(MergedKernel(), device, dtype, heads)
    return {"well": problem is None, "dtype": _name(dtype), "problem": problem}


def gradients(size: Size, device: torch.device, dtype: torch.dtype) -> Row:
    """Compare the gradients of a shared batch with those of plain attention in a wider format."""
    tokens = min(size.tokens, 2048)
    bench = Bench(replace(size, shape=replace(size.shape, layers=4)), device, dtype)
    datums = bench.samples(4, tokens, shared=tokens // 2)
    ours = bench.gradients(bench.optimizer(MergedKernel(), 4 * tokens), datums)
    plain = bench.gradients(bench.optimizer(SdpaKernel(), tokens, share=False), datums)
    wide = bench.widened(torch.float64 if dtype == torch.float32 else torch.float32)
    true = wide.gradients(wide.optimizer(SdpaKernel(), tokens, share=False), datums)
    error, usual = distance(ours, true), distance(plain, true)
    well = error <= _SLACK * usual + _ROUNDING
    return {"well": well, "dtype": _name(dtype), "error": error, "of_plain_attention": usual}


def memory(bench: Bench) -> Row:
    """Compare the memory of a pass with the plan. A CPU does not tell what a pass takes."""
    size, device = bench.size, bench.base.device
    width = bench.base.dtype.itemsize
    planned = token_bytes(counted(bench.base.module), checkpointing=True, width=width)
    row: Row = {"well": True, "planned_bytes_a_token": planned}
    if device.type != "cuda":
        return row
    tokens = 2 * size.tokens
    optimizer = bench.optimizer(MergedKernel(), tokens)
    step = LossPass("ppo", tuple(bench.samples(2, size.tokens)))
    optimizer.step([step], _ECHO)  # Adam's moments come with the first
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    optimizer.step([step], _ECHO)
    used = (torch.cuda.max_memory_allocated(device) - before) / tokens
    return row | {"well": used <= _SPARE * planned, "bytes_a_token": used}


class _Full:
    """A kernel for which a tree of more than so many tokens does not fit into the memory."""

    name = "full"

    def __init__(self, tokens: int) -> None:
        self._tokens, self._kernel = tokens, MergedKernel()
        self.refused = 0

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        attend = self._kernel.prepare(tree, device)

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            if len(tree.tokens) <= self._tokens:
                return attend(query, key, value, scale)
            self.refused += 1
            if device.type == "cuda":  # more than the device has: CUDA itself refuses it
                torch.empty(1 << 50, dtype=torch.uint8, device=device)
            raise torch.OutOfMemoryError("out of memory, as if the pass were too large")

        return over_tree


def out_of_memory(bench: Bench) -> Row:
    """Take a step with a budget of twice what fits; compare it with one that fits."""
    tokens = min(bench.size.tokens, 1024)
    datums = bench.samples(4, tokens)
    full = _Full(2 * tokens)
    tight = bench.optimizer(full, 4 * tokens)
    split = bench.gradients(tight, datums)
    right = bench.gradients(bench.optimizer(MergedKernel(), 2 * tokens), datums)
    error, budget = distance(split, right), tight.passes.budget.tokens
    rounding = _ROUNDING if bench.base.dtype == torch.float32 else 1e-2
    halved = full.refused > 0 and budget <= 2 * tokens
    return {"well": halved and error <= rounding, "budget_tokens": budget, "error": error}


def speed(bench: Bench) -> Row:
    """Time the second of two steps over samples that share nothing."""
    size, device = bench.size, bench.base.device
    datums = tuple(bench.samples(size.samples, size.tokens))
    optimizer = bench.optimizer(MergedKernel(), 4 * size.tokens)
    seconds = 0.0
    for _ in range(2):
        _wait(device)
        began = time.perf_counter()
        optimizer.step([LossPass("ppo", datums)], _ECHO)
        _wait(device)
        seconds = time.perf_counter() - began
    tokens = size.samples * size.tokens
    return {"well": True, "tokens_per_s": tokens / seconds, "step_s": seconds}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The run


def run(size: Size, device: torch.device, dtype: torch.dtype, say: Callable[[str], None]) -> bool:
    """Run all checks, and say a line after each; return whether all is well.

    After a failure of the device nothing more is computed: it would fail, too.
    """
    benches: list[Bench] = []

    def bench() -> Bench:
        if not benches:
            benches.append(Bench(size, device, dtype))
        return benches[0]

    checks: dict[str, Callable[[], Row]] = {
        "machine": lambda: machine(device),
        "attention": lambda: attention(size, device, dtype),
        "gradients": lambda: gradients(size, device, dtype),
        "memory": lambda: memory(bench()),
        "out of memory": lambda: out_of_memory(bench()),
        "speed": lambda: speed(bench()),
    }
    well = True
    for name, check in checks.items():
        began, broken = time.perf_counter(), None
        try:
            row = check()
        except (*FAILURES, ClawError, MemoryError) as error:
            broken = device_fault(error)
            row = {"well": False, "failed": first_line(error)[:300]}
        say(json.dumps({"check": name, "seconds": round(time.perf_counter() - began, 2), **row}))
        well = well and bool(row["well"])
        if broken is not None:
            return False
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return well


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.smoke",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--device", default="auto", help="cuda, cuda:1 or cpu (default: a GPU)")
    return command


def main() -> int:
    """Run the checks on the device, and print their lines."""
    name = parser().parse_args().device
    has_cuda = torch.cuda.is_available()
    if name.startswith("cuda") and not has_cuda:
        print(f"torch {torch.__version__} finds no GPU here; --device cpu tries it at a tiny size.")
        return 1
    device = torch.device(("cuda" if has_cuda else "cpu") if name == "auto" else name)
    cuda = device.type == "cuda"
    if cuda:
        keep_memory_whole()
    size, dtype = (FULL, torch.bfloat16) if cuda else (TINY, torch.float32)
    return 0 if run(size, device, dtype, lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
