"""`python -m benchmarks.agreement`: how far sampler and trainer are apart, well and with one fault.

A sampler draws replies token by token, a trainer scores them in one row, and the table has what the
comparison of a step sees. The adapter is a random one. It is scaled so that it moves the policy by
the nats a token in the column "moved" (mean |d| over replies of the base).
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinker_claw.learner.diagnostics import compare
from tinker_claw.shipped import MODEL_DIR

QUESTIONS = (
    "Give me a shopping list for a picnic.",
    "How much is 17 plus 25? Show how you reckon.",
    "Write two sentences about the sea.",
    "Explain what a prime number is.",
)
SYSTEM = "You are a helpful assistant. Answer in plain words."
REPLIES = 8
TOKENS = 32
MOVED = (0.05, 0.1, 0.2, 0.5)

Drawn = list[tuple[list[int], list[int], list[float]]]
"""The prompt as the trainer has it, a reply, and its logprobs by the sampler."""


@dataclass(frozen=True)
class Faults:
    """Deviations of a sampler from what it was asked for."""

    temperature: float = 1.0
    top_p: float = 1.0
    system: bool = True
    """Whether its template shows the system prompt."""


RIGHT = Faults()


@torch.no_grad()  # adapters are switched, never trained
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of a model")
    folder = parser.parse_args().model
    torch.set_num_threads(1)
    bench = Bench(folder)
    print("| sampler | moved | tokens | k3 | |\n|---|---|---|---|---|")
    full, half = bench.full, bench.half
    for moved in MOVED:
        bench.move(moved)
        bench.row("right, float32", moved, bench.drawn(full, RIGHT), full)
        bench.row("right, bfloat16", moved, bench.drawn(half, RIGHT), half)
        bench.row("right, bfloat16; trainer float32", moved, bench.drawn(half, RIGHT), full)
        for name, sampling in (
            ("no adapter", full.disable_adapter()),
            ("alpha doubled", scaled(full, 2.0)),
            ("alpha halved", scaled(full, 0.5)),
        ):
            with sampling:
                wrong = bench.drawn(full, RIGHT)
            bench.row(name, moved, wrong, full)
    for temperature in (0.5, 0.7, 0.9, 1.1):
        warmer = bench.drawn(full, Faults(temperature=temperature))
        bench.row(f"temperature {temperature}", MOVED[-1], warmer, full)
    for top_p in (0.8, 0.95):
        bench.row(f"top_p {top_p}", MOVED[-1], bench.drawn(full, Faults(top_p=top_p)), full)
    drawn = bench.drawn(full, Faults(system=False))
    bench.row("template without the system prompt", MOVED[-1], drawn, full)


class Bench:
    """A model in two number formats with one adapter, and replies of samplers."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.full, self.half = (adapted(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
        self._seed = 0
        with self.full.disable_adapter():
            self._of_base = self.drawn(self.full, RIGHT)[::4]

    def move(self, wanted: float) -> None:
        """Scale the adapter until it moves the policy by so many nats a token."""
        for _ in range(3):
            distance = fmean(map(abs, gaps(self._of_base, self.full)))
            for weights in lora_b(self.full):
                weights.mul_(wanted / distance)
        for ours, theirs in zip(lora_b(self.half), lora_b(self.full), strict=True):
            ours.copy_(theirs)

    def row(self, name: str, moved: float, drawn: Drawn, trainer: Any) -> None:
        """Print what a trainer finds in the replies of a sampler."""
        agreement = compare(gaps(drawn, trainer))
        verdict = "" if agreement.agrees else "stops"
        print(
            f"| {name} | {moved} | {agreement.tokens} | {agreement.k3:.1e} | {verdict} |",
            flush=True,
        )

    def drawn(self, model: Any, faults: Faults) -> Drawn:
        """Draw replies, with a cache of keys and values as samplers have one."""
        return [reply for question in QUESTIONS for reply in self._replies(model, faults, question)]

    def _replies(self, model: Any, faults: Faults, question: str) -> Drawn:
        self._seed += 1
        draw = torch.Generator().manual_seed(self._seed)
        prompt, right = self._prompt(question, faults), self._prompt(question, RIGHT)
        out = model(torch.tensor([prompt] * REPLIES), use_cache=True)
        tokens, logprobs = list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(TOKENS):
            scores = (out.logits[:, -1].float() / faults.temperature).log_softmax(-1)
            scores = cut(scores, faults.top_p)
            tokens.append(torch.multinomial(scores.exp(), 1, generator=draw))
            logprobs.append(scores.gather(1, tokens[-1]))
            out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        replies = list[tuple[list[int], list[int], list[float]]]()
        for ids, q in zip(
            torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True
        ):
            end = next(
                (n + 1 for n, i in enumerate(ids) if i == self._tokenizer.eos_token_id), TOKENS
            )
            replies.append((right, ids[:end], q[:end]))
        return replies

    def _prompt(self, question: str, faults: Faults) -> list[int]:
        messages = [{"role": "system", "content": SYSTEM}] if faults.system else []
        messages.append({"role": "user", "content": question})
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def gaps(drawn: Drawn, trainer: Any) -> Sequence[float]:
    """The trainer's logprobs less the sampler's, of all tokens drawn."""
    differences = list[float]()
    for prompt, reply, logprobs in drawn:
        rows = trainer(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        scores = rows.float().log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0]
        differences += (scores - torch.tensor(logprobs)).tolist()
    return differences


def cut(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Leave the likeliest tokens of this mass."""
    if top_p == 1.0:
        return scores
    ordered, at = scores.exp().sort(descending=True)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, at, ordered.cumsum(-1) - ordered < top_p)
    return scores.masked_fill(~kept, -torch.inf).log_softmax(-1)


def adapted(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model with an adapter of random weights."""
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base, config).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    for weights in lora_b(model):
        weights.copy_(torch.randn(weights.shape, generator=draw) * 1e-3)
    return model


def lora_b(model: Any) -> Iterator[torch.Tensor]:
    return (weights for name, weights in model.named_parameters() if "lora_B" in name)


@contextmanager
def scaled(model: Any, by: float) -> Generator[None]:
    """Multiply the adapter's alpha meanwhile."""
    for weights in lora_b(model):
        weights.mul_(by)
    yield
    for weights in lora_b(model):
        weights.div_(by)


if __name__ == "__main__":
    main()
