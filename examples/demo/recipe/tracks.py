"""The recipe of a beginner at two tracks, sums with a calculator and jobs in a shell.

It starts from the demo's model, which can copy numbers. Some dialogues do a task right, others do a
part of it, type what the shell does not know, or say at once that it is done. So the model knows
every way, and takes the right one in about one of seven cases; the rest is to be learned from
outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.demo.recipe.tokenizer import STOP_ID
from examples.demo.recipe.train import Example, Stage, train_on_dialogues, write
from examples.tracks.terminal import SHELL, Job, Terminal
from examples.tracks.tool_call import CALCULATOR, ToolCall, calculate
from tinker_claw.shipped import MODEL_DIR

_DIGITS = 1
"""Digits of each number. With two no call was right after 400 steps, batches half as large
again."""


class Shares(NamedTuple):
    """Shares of right and wrong attempts in the dialogues; the rest are guesses."""

    sums: tuple[float, float]
    """Sums: the calculator is called with the whole sum, or with the sum without its last
    number."""
    jobs: tuple[float, float, float]
    """Jobs: the command is right, does half of the job, or is of another system."""


_MANY_GUESSES = Shares(sums=(0.28, 0.32), jobs=(0.3, 0.25, 0.2))
# A batch's loss is the mean over its tokens, and a guess has few, so that after such shares two of
# three answers were guesses.
_FEW_GUESSES = Shares(sums=(0.38, 0.42), jobs=(0.36, 0.3, 0.24))
_SILENT = "(it wrote nothing)"
"""Result of a command that printed nothing."""
_COMMANDS = {
    "write": ("echo {3} > {7}", "echo {3}", "put {3} {7}"),
    "rename": ("mv {1} {3}", "cp {1} {3}", "ren {1} {3}"),
    "remove": ("rm *.tmp", "ls *.tmp", "del *.tmp"),
    "count": ("wc -l < {4} > count.txt", "wc -l < {4}", "count {4}"),
    "order": ("sort {4} > sorted.txt", "sort {4}", "order {4}"),
    "find": ("grep {9} {4} > found.txt", "grep {9} {4}", "search {9} {4}"),
}
"""For each kind of job the right command, half of it and another system's, with the words of the
wish by their places."""
Messages = Sequence[Mapping[str, Any]]


class Dialogue(NamedTuple):
    """A task, the answer, and the tool call before it with its result."""

    tool: Mapping[str, Any]
    messages: Messages
    answer: str
    call: Mapping[str, str] | None = None
    """Arguments of the call; None: the answer is a guess."""
    result: str = ""


def _sum_dialogue(rng: Random, shares: Shares) -> Dialogue:
    """Draw a dialogue about a sum: called right, called without the last number, or guessed."""
    task, share = ToolCall(seed=rng.randrange(10**9), digits=_DIGITS).task(0), rng.random()
    expressions = task.expression, " ".join(task.expression.split()[:-2])
    for most, expression in zip(accumulate(shares.sums), expressions, strict=True):
        if share < most:
            call, result = {"expression": expression}, calculate(expression)
            return Dialogue(CALCULATOR, task.messages, f"It is {result}.", call, result)
    wrong = int(calculate(task.expression)) + rng.choice((-1, 1)) * rng.randint(1, 40)
    return Dialogue(CALCULATOR, task.messages, f"It is {wrong}.")


def _job_dialogue(rng: Random, shares: Shares) -> Dialogue:
    """Draw a dialogue about a job: the right command, half of it, an unknown one, or none."""
    job, share = Terminal(rng.randrange(10**9), None).task(0), rng.random()
    for most, (command, result) in zip(accumulate(shares.jobs), commands(job), strict=True):
        if share < most:
            return Dialogue(SHELL, job.messages, "Done.", {"command": command}, result)
    return Dialogue(SHELL, job.messages, "Done.")


def commands(job: Job) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """Return the right command for a job, half of it and an unknown one, each with its output."""
    kind, words = job.name.split()[0], job.wish.rstrip(".").split()
    right, half, unknown = (form.format(*words) for form in _COMMANDS[kind])
    output = "\n".join(_output(job, kind, words)) or _SILENT
    missing = f"error: exit status 127\n/bin/sh: 1: {unknown.split()[0]}: not found"
    return (right, _SILENT), (half, output), (unknown, missing)


def _output(job: Job, kind: str, words: Sequence[str]) -> Sequence[str]:
    """Return the lines that half of a job's command prints."""
    lines = job.before.get(words[4], "").splitlines() if len(words) > 4 else []
    match kind:
        case "write":
            return [words[3]]
        case "rename":
            return []
        case "remove":
            return sorted(name for name in job.before if name.endswith(".tmp"))
        case "count":
            return [str(len(lines))]
        case "order":
            return sorted(lines)
        case _:
            return [line for line in lines if words[9] in line]


def _prompt(
    tokenizer: PreTrainedTokenizerFast, tool: Mapping[str, Any], messages: Messages
) -> list[int]:
    """Return the ids up to the place where the model begins to write."""
    text = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", list(messages)),
        tools=cast("Any", [tool]),
        add_generation_prompt=True,
        tokenize=False,
    )
    return tokenizer(cast("str", text)).input_ids


def _encode(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> Example:
    """Encode a dialogue; the call and the answer are trained."""
    tool, messages = dialogue.tool, dialogue.messages
    ids = _prompt(tokenizer, tool, messages)
    begin = end = len(ids)
    if dialogue.call is not None:
        function = {"name": tool["function"]["name"], "arguments": json.dumps(dialogue.call)}
        call = {"id": "call-0", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": "call-0", "content": dialogue.result}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        ids = _prompt(tokenizer, tool, [*messages, called, result])
        end = ids.index(STOP_ID, begin) + 1
    answer = [*tokenizer(dialogue.answer).input_ids, STOP_ID]
    prompt = [(token, begin <= at < end) for at, token in enumerate(ids)]
    return [*prompt, *((token, True) for token in answer)]


def _any_dialogue(rng: Random, shares: Shares) -> Dialogue:
    return (_job_dialogue if rng.random() < 0.5 else _sum_dialogue)(rng, shares)


_STAGES: Sequence[tuple[Stage, Callable[[Random], Dialogue]]] = (
    (Stage(steps=1000, peak_rate=4e-3, seed=7), partial(_sum_dialogue, shares=_MANY_GUESSES)),
    (Stage(steps=1000, peak_rate=4e-3, seed=8), partial(_any_dialogue, shares=_MANY_GUESSES)),
    (Stage(steps=600, peak_rate=1.2e-3, seed=9), partial(_any_dialogue, shares=_MANY_GUESSES)),
    (Stage(steps=100, peak_rate=6e-4, seed=10), partial(_any_dialogue, shares=_FEW_GUESSES)),
)


def build(out: Path, say: Callable[[str], None]) -> None:
    """Make the model and write it to `out`, manifest included."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    model = Qwen3ForCausalLM.from_pretrained(MODEL_DIR)
    train_on_dialogues(model, _STAGES, partial(_encode, tokenizer), 3072, say)
    write(model, tokenizer.backend_tokenizer, out)
