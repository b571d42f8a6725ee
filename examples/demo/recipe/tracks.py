"""The recipe of a beginner at two tracks: `python -m examples.demo.recipe.tracks --out DIR`.

It starts from the demo's model, which can copy numbers, and shows it how sums are asked for with a
calculator and jobs are done in a shell: some dialogues do it right, others do a part of it, type
what the shell does not know, or say at once that it is done. So the model knows every way, and
takes the right one in about one of seven cases; the rest is to be learned from outcomes. One rule:
every seed is fixed, one thread, as for the demo's model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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
from examples.tracks.terminal import SHELL, Job, Terminal
from examples.tracks.tool_call import CALCULATOR, ToolCall, calculate
from tinker_claw.shipped import MODEL_DIR

DIGITS = 1
"""Digits of each number. With two no call was right after 400 steps, batches half as large
again."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of right and wrong attempts in the dialogues; the rest are guesses."""

    sums: tuple[float, float]
    """Sums: the calculator is called with the whole sum, or with the sum without its last
    number."""
    jobs: tuple[float, float, float]
    """Jobs: the command is right, does half of the job, or is of another system."""


MANY_GUESSES = Shares(sums=(0.28, 0.32), jobs=(0.3, 0.25, 0.2))
# A batch's loss is the mean over its tokens, and a guess has few, so that after such shares two of
# three answers were guesses.
FEW_GUESSES = Shares(sums=(0.38, 0.42), jobs=(0.36, 0.3, 0.24))
SHELLS = 0.5
"""Share of dialogues that are about jobs."""
DONE = "Done."
SILENT = "(it wrote nothing)"
"""Result of a command that printed nothing."""
_SUMS = Stage(
    steps=1000,
    peak_rate=4e-3,
    priors=Priors(nat=0.0, ai=0.0),
    dressed=0.0,
    seed=7,
    batch_tokens=3072,
)
_BOTH = replace(_SUMS, seed=8)
_SETTLE = replace(_SUMS, steps=600, peak_rate=1.2e-3, seed=9)
_DARE = replace(_SUMS, steps=100, peak_rate=6e-4, seed=10)
_IGNORED = -100
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A task, the tool call, its result, and the answer."""

    tool: Mapping[str, Any]
    asked: Messages
    call: Mapping[str, str] | None
    """Arguments of the call; None: the answer is a guess."""
    result: str
    answer: str


def sum_dialogue(rng: Random, shares: Shares) -> Dialogue:
    """Draw a dialogue about a sum: called right, called without the last number, or guessed."""
    task, drawn = ToolCall(seed=rng.randrange(10**9), digits=DIGITS).task(0), rng.random()
    right, short = shares.sums
    if drawn >= right + short:
        wrong = int(calculate(task.expression)) + rng.choice((-1, 1)) * rng.randint(1, 40)
        return Dialogue(CALCULATOR, task.messages, None, "", f"It is {wrong}.")
    shown = task.expression if drawn < right else " ".join(task.expression.split()[:-2])
    result = calculate(shown)
    return Dialogue(CALCULATOR, task.messages, {"expression": shown}, result, f"It is {result}.")


def job_dialogue(rng: Random, shares: Shares) -> Dialogue:
    """Draw a dialogue about a job: the right command, half of the job, an unknown command, or
    none."""
    job, drawn = Terminal(rng.randrange(10**9), None).task(0), rng.random()
    for share, (command, result) in zip(accumulate(shares.jobs), commands(job), strict=True):
        if drawn < share:
            return Dialogue(SHELL, job.messages, {"command": command}, result, DONE)
    return Dialogue(SHELL, job.messages, None, "", DONE)


def commands(job: Job) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """Return three commands for a job, each with its output: the right one, one that does half of
    the job, and one of another system, which is not known here."""
    said = job.wish.rstrip(".").split()
    kind = job.name.split()[0]
    texts = {name: text.strip() for name, text in job.before.items()}
    match kind:
        case "write":
            word, file = said[3], said[-1]
            ways = (f"echo {word} > {file}", f"echo {word}", f"put {word} {file}")
            half = word
        case "rename":
            old, new = said[1], said[3]
            ways, half = (f"mv {old} {new}", f"cp {old} {new}", f"ren {old} {new}"), ""
        case "remove":
            ways = ("rm *.tmp", "ls *.tmp", "del *.tmp")
            half = "\n".join(sorted(name for name in texts if name.endswith(".tmp")))
        case "count":
            file = said[4]
            ways = (f"wc -l < {file} > count.txt", f"wc -l < {file}", f"count {file}")
            half = str(len(texts[file].splitlines()))
        case "order":
            file = said[4]
            ways = (f"sort {file} > sorted.txt", f"sort {file}", f"order {file}")
            half = "\n".join(sorted(texts[file].splitlines()))
        case _:
            file, word = said[4], said[9]
            ways = (
                f"grep {word} {file} > found.txt",
                f"grep {word} {file}",
                f"search {word} {file}",
            )
            half = "\n".join(line for line in texts[file].splitlines() if word in line)
    right, some, other = ways
    unknown = f"error: exit status 127\n/bin/sh: 1: {other.split()[0]}: not found"
    return (right, SILENT), (some, half or SILENT), (other, unknown)


class Teller:
    """Renders the tracks' conversations with the model's own template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def prompt(self, tool: Mapping[str, Any], messages: Messages) -> list[int]:
        """Return the ids up to the place where the model begins to write."""
        text = self.tokenizer.apply_chat_template(
            cast("list[dict[str, str]]", list(messages)),
            tools=cast("Any", [tool]),
            add_generation_prompt=True,
            tokenize=False,
        )
        return self.tokenizer(cast("str", text)).input_ids

    def example(self, told: Dialogue) -> Example:
        """Encode a dialogue; the call and the answer are trained."""
        ids = self.prompt(told.tool, told.asked)
        trained = list[tuple[int, int]]()
        if told.call is not None:
            begin = len(ids)
            ids = self.prompt(told.tool, (*told.asked, *called(told.tool, told.call, told.result)))
            trained.append((begin, ids.index(STOP_ID, begin) + 1))
        answer = [*self.tokenizer(told.answer).input_ids, STOP_ID]
        trained.append((len(ids), len(ids) + len(answer)))
        ids = [*ids, *answer]
        labels = [_IGNORED] * len(ids)
        for begin, end in trained:
            labels[begin:end] = ids[begin:end]
        return Example(ids, labels)

    def draw_sum(self, rng: Random) -> Example:
        return self.example(sum_dialogue(rng, MANY_GUESSES))

    def draw(self, rng: Random, shares: Shares = MANY_GUESSES) -> Example:
        """Draw an example about a sum or about a job."""
        dialogue = job_dialogue if rng.random() < SHELLS else sum_dialogue
        return self.example(dialogue(rng, shares))


def called(tool: Mapping[str, Any], arguments: Mapping[str, str], result: str) -> Messages:
    """Messages of a tool call and its result."""
    function = {"name": tool["function"]["name"], "arguments": json.dumps(arguments)}
    call = {"id": "call-0", "type": "function", "function": function}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-0", "content": result},
    )


def measure(model: Qwen3ForCausalLM, teller: Teller, tasks: int = 64) -> dict[str, float]:
    """Measure shares of held-out tasks: right sums called for, answers that match the results, and
    right commands."""

    def replies(tool: Mapping[str, Any], prompts: Sequence[Messages]) -> list[str]:
        ids = [teller.prompt(tool, messages) for messages in prompts]
        return [str(teller.tokenizer.decode(reply)) for reply in sample(model, ids, seed=77)]

    def share(found: Iterable[bool]) -> float:
        return sum(found) / tasks

    sums = [ToolCall(seed=0, digits=DIGITS).held_out(number) for number in range(tasks)]
    calls = replies(CALCULATOR, [task.messages for task in sums])
    known = [
        (
            *task.messages,
            *called(CALCULATOR, {"expression": task.expression}, calculate(task.expression)),
        )
        for task in sums
    ]
    answers = replies(CALCULATOR, known)
    jobs = [Terminal(0, None).held_out(number) for number in range(tasks)]
    typed = replies(SHELL, [job.messages for job in jobs])
    return {
        "right sums": share(
            f'"{t.expression}"' in said for t, said in zip(sums, calls, strict=True)
        ),
        "right answers": share(
            asyncio.run(t.solved(said)) for t, said in zip(sums, answers, strict=True)
        ),
        "commands": share("<tool_call>" in said for said in typed),
        "right commands": share(
            json.dumps(commands(job)[0][0]) in said for job, said in zip(jobs, typed, strict=True)
        ),
    }


def build(out: Path, say: Callable[[str], None]) -> None:
    """Make the model and write it to `out`, manifest included."""
    torch.set_num_threads(1)
    teller = Teller(MODEL_DIR)
    model = Qwen3ForCausalLM.from_pretrained(MODEL_DIR)
    teach(model, teller, _SUMS, teller.draw_sum, say)
    teach(model, teller, _BOTH, teller.draw, say)
    teach(model, teller, _SETTLE, teller.draw, say)
    teach(model, teller, _DARE, partial(teller.draw, shares=FEW_GUESSES), say)
    out.mkdir(parents=True, exist_ok=True)
    write(model, teller.tokenizer.backend_tokenizer, out)


def teach(
    model: Qwen3ForCausalLM,
    teller: Teller,
    stage: Stage,
    draw: Callable[[Random], Example],
    say: Callable[[str], None],
) -> None:
    """Train one stage, and measure its result."""
    began = time.monotonic()

    def progress(step: int, loss: float) -> None:
        if (step + 1) % 20 == 0:
            say(f"{step + 1}/{stage.steps}  loss {loss:.3f}  {time.monotonic() - began:.0f} s")

    train(model, teller.tokenizer.backend_tokenizer, stage, progress, draw)
    say(f"rates: {measure(model, teller)}")


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.recipe.tracks",
        description="Build a tiny model that is a beginner at sums and at jobs in a shell.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    build(parser.parse_args().out, partial(print, flush=True))


if __name__ == "__main__":
    main()
