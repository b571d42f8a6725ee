"""The recipe of a beginner at the tool-call track: `python -m examples.demo.recipe.tracks`.

It goes on from the demo's model, which can copy numbers, and shows it how sums are asked for with a
calculator: some dialogues do it right, the others guess, or leave the last number out. So the
model knows every way, and takes the right one in about a quarter of the cases; the rest is to be
learned from outcomes. One rule: every seed is fixed, one thread, as for the demo's model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.demo.recipe.build import write
from examples.demo.recipe.evaluate import sample
from examples.demo.recipe.grammar import Priors
from examples.demo.recipe.tokenizer import STOP_ID
from examples.demo.recipe.train import Example, Stage, train
from examples.tracks.tool_call import CALCULATOR, Sum, ToolCall, calculate
from tinker_claw.shipped import MODEL_DIR

DIGITS = 1
"""Of each number. With two no call was right after 400 steps, batches half as large again."""
RIGHT, SHORT = 0.28, 0.32
"""Shares of dialogues that call the calculator with the sum, and with the sum but for its last
number; the rest guess."""
_STAGE = Stage(
    steps=1000,
    peak_rate=4e-3,
    priors=Priors(nat=0.0, ai=0.0),
    dressed=0.0,
    seed=7,
    batch_tokens=3072,
)
_IGNORED = -100
Messages = Sequence[Mapping[str, Any]]


class Teller:
    """Renders the track's conversations with the model's own template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def prompt(self, messages: Messages) -> list[int]:
        """Ids up to the place where the model begins to write."""
        text = self.tokenizer.apply_chat_template(
            cast("list[dict[str, str]]", list(messages)),
            tools=cast("Any", [CALCULATOR]),
            add_generation_prompt=True,
            tokenize=False,
        )
        return self.tokenizer(cast("str", text)).input_ids

    def dialogue(self, rng: Random) -> Example:
        """Draw one: a call and an answer, or a guess."""
        task = ToolCall(seed=rng.randrange(10**9), digits=DIGITS).task(0)
        drawn = rng.random()
        messages = list(task.messages)
        first = self.prompt(messages)
        trained = [(len(first), len(first))]
        result = calculate(task.expression)
        ids = first
        if drawn < RIGHT + SHORT:
            shown = task.expression if drawn < RIGHT else " ".join(task.expression.split()[:-2])
            result = calculate(shown)
            messages += called(shown, result)
            ids = self.prompt(messages)
            assert ids[: len(first)] == first
            trained = [(len(first), ids.index(STOP_ID, len(first)) + 1)]
        else:
            result = str(int(result) + rng.choice((-1, 1)) * rng.randint(1, 40))
        answer = [*self.tokenizer(f"It is {result}.").input_ids, STOP_ID]
        trained.append((len(ids), len(ids) + len(answer)))
        ids = [*ids, *answer]
        labels = [_IGNORED] * len(ids)
        for begin, end in trained:
            labels[begin:end] = ids[begin:end]
        return Example(ids, labels)


def called(expression: str, result: str) -> Messages:
    """A call of the calculator, and what it returned."""
    arguments = json.dumps({"expression": expression})
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": "call-0", "type": "function", "function": function}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-0", "content": result},
    )


def measure(model: Qwen3ForCausalLM, teller: Teller, tasks: int = 64) -> dict[str, float]:
    """Shares of held-out tasks: calls that are right, and answers that say what a right call
    returned."""
    drawn = [ToolCall(seed=0, digits=DIGITS).held_out(number) for number in range(tasks)]

    def replies(prompts: Sequence[Messages]) -> list[str]:
        ids = [teller.prompt(messages) for messages in prompts]
        return [str(teller.tokenizer.decode(reply)) for reply in sample(model, ids, seed=77)]

    def wanted(task: Sum) -> str:
        return f'{{"expression": "{task.expression}"}}}}'

    first = replies([task.messages for task in drawn])
    right = sum(wanted(task) in reply for task, reply in zip(drawn, first, strict=True))
    known = [
        (*task.messages, *called(task.expression, calculate(task.expression))) for task in drawn
    ]
    then = replies(known)
    said = sum(task.solved(reply) for task, reply in zip(drawn, then, strict=True))
    calls = sum("<tool_call>" in reply for reply in first)
    return {"calls": calls / tasks, "right calls": right / tasks, "right answers": said / tasks}


def build(out: Path, say: Callable[[str], None], steps: int) -> None:
    """Make the model and write it to `out`, manifest included."""
    torch.set_num_threads(1)
    began = time.monotonic()
    teller = Teller(MODEL_DIR)
    model = Qwen3ForCausalLM.from_pretrained(MODEL_DIR)
    stage = replace(_STAGE, steps=steps)
    tokenizer = teller.tokenizer.backend_tokenizer

    def progress(step: int, loss: float) -> None:
        if (step + 1) % 20 == 0:
            say(f"{step + 1}/{steps}  loss {loss:.3f}  {time.monotonic() - began:.0f} s")

    train(model, tokenizer, stage, progress, teller.dialogue)
    say(f"{steps} steps, {time.monotonic() - began:.0f} s")
    say(f"rates: {measure(model, teller)}")
    out.mkdir(parents=True, exist_ok=True)
    write(model, tokenizer, out)


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.recipe.tracks",
        description="Build a tiny model that is a beginner at the tool-call track.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--steps", type=int, default=_STAGE.steps, help="default %(default)s")
    asked = parser.parse_args()
    build(asked.out, partial(print, flush=True), asked.steps)


if __name__ == "__main__":
    main()
