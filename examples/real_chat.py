"""A real model of 1.5 billion parameters on this machine's CPU, through the whole product.

    make real-chat            Qwen2.5-Coder-1.5B-Instruct, of `make judge`, as a folder of 16 bits
    python -m examples.real_chat --cache runs/models --base-dtype float32

The openai SDK talks to the gateway: eight questions with a wish in the system prompt and without
it, three turns and their ratings, a call of a tool, one step of four samples with the gate and
canaries, and the first turn again. A table says what came of each. It shows that a real model runs
through every part; it shows no learning: one step of four samples teaches nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from examples import as_ctrl_c
from examples.demo import DemoError, server
from local_gpu.model.small import default_cache, model_folder
from tinker_claw.errors import ClawError

NAME: Final = "real"
WISH: Final = "Answer every question in one short sentence."
_MOST_WORDS: Final = 25
QUESTIONS: Final = (
    "Why is the sky blue?",
    "What does a compiler do?",
    "How do bees make honey?",
    "What is a hash table good for?",
    "Why do leaves fall in autumn?",
    "What is the difference between a list and a tuple in Python?",
    "How does a refrigerator cool?",
    "What does the command `git rebase` do?",
)
TURNS: Final[Sequence[tuple[str, int, Callable[[str], bool]]]] = (
    ("My sister's name is Mira. What could I cook for her tonight?", -1, lambda text: brief(text)),
    ("Shorter: one dish, in one short sentence.", 1, lambda text: brief(text)),
    ("What is my sister's name?", 1, lambda text: "Mira" in text),
)
"""What is said in one conversation, how the reply is rated, whatever it is, and what it should
be."""
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature outside, in a city, now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
BATCH: Final = 4
MOST_TOKENS: Final = 96
STEP_S: Final = 1800.0
_SIDE: Final = {"X-Turn-Type": "side"}


class Talk:
    """The openai SDK before the gateway, and the rows of the table."""

    def __init__(self, url: str) -> None:
        from openai import AsyncOpenAI

        self.http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self._client: Any = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=STEP_S, max_retries=0
        )
        self.rows: list[tuple[str, str, float]] = []

    @contextmanager
    def row(self, what: str) -> Generator[list[str]]:
        """Time one part; what is added to the list is its result."""
        started, result = time.monotonic(), list[str]()
        yield result
        self.rows.append((what, ", ".join(result), time.monotonic() - started))
        print(f"{what}: {self.rows[-1][1]}", flush=True)

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        headers: Mapping[str, str],
        **more: Any,
    ) -> Any:
        """Ask for a reply, and return the SDK's."""
        return await self._client.chat.completions.create(
            model=NAME,
            messages=messages,
            max_tokens=MOST_TOKENS,
            extra_headers=headers,
            **more,
        )

    async def streamed(
        self, messages: Sequence[Mapping[str, Any]], headers: Mapping[str, str]
    ) -> tuple[str, str]:
        """Return a streamed reply, and its id."""
        text, reply = "", ""
        async for chunk in await self.ask(messages, headers, stream=True):
            reply = chunk.id
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return text, reply

    async def rate(self, reply: str, score: int) -> str:
        """Rate a reply; return the rating in words."""
        body = {"response_id": reply, "score": score}
        (await self.http.post("/v1/feedback", json=body)).raise_for_status()
        return f"rated {score:+}"


def brief(text: str) -> bool:
    """Whether a text is one short sentence."""
    return len(text.split()) <= _MOST_WORDS and len(re.findall(r"[.!?](?=\s|$)", text)) <= 1


async def _wish(talk: Talk) -> None:
    """Eight questions, each with the wish in the system prompt and without it."""
    for what, system in (("without the wish", []), ("with it", [_says("system", WISH)])):
        with talk.row(f"eight questions {what}") as result:
            asked = [talk.ask([*system, _says("user", one)], _SIDE) for one in QUESTIONS]
            replies = [one.choices[0].message.content or "" for one in await asyncio.gather(*asked)]
            result.append(f"{sum(map(brief, replies))} of {len(replies)} in one short sentence")


async def _conversation(talk: Talk) -> None:
    said = list[Mapping[str, Any]]()
    headers = {"X-Session-Id": "three-turns"}
    for number, (text, score, good) in enumerate(TURNS, 1):
        with talk.row(f"turn {number}, streamed") as result:
            said.append(_says("user", text))
            reply, its_id = await talk.streamed(said, headers)
            said.append(_says("assistant", reply))
            result += [_as_meant(reply, good(reply)), await talk.rate(its_id, score)]


async def _tool(talk: Talk) -> None:
    """A call of a tool, left to the model and forced; then the result, and the reply to it."""
    said: list[Mapping[str, Any]] = [_says("user", "How warm is it in Oslo right now?")]
    headers = {"X-Session-Id": "tool"}
    with talk.row("a tool is offered") as result:
        found = await talk.ask(said, _SIDE, tools=TOOLS)
        called = found.choices[0].message.tool_calls
        result.append("called" if called else "text, no call")
    with talk.row("a call is forced") as result:
        found = await talk.ask(said, headers, tools=TOOLS, tool_choice="required")
        (call, *_) = found.choices[0].message.tool_calls or [None]
        result.append(
            f"{call.function.name} {call.function.arguments}" if call else "text, no call"
        )
    said.append(found.choices[0].message.model_dump(exclude_none=True))
    said.append(
        {"role": "tool", "tool_call_id": call.id, "content": "-3 degrees Celsius"}
        if call
        else _says("user", "It has -3 degrees Celsius. So?")
    )
    with talk.row("its result") as result:
        found = await talk.ask(said, headers, tools=TOOLS)
        text = found.choices[0].message.content or ""
        result += [_as_meant(text, "3" in text), await talk.rate(found.id, 1)]


def _as_meant(reply: str, good: bool) -> str:
    print(f"  {reply!r}")
    return f"{len(reply.split())} words, {'as' if good else 'not as'} it should be"


async def _step(talk: Talk, metrics: Path) -> None:
    with talk.row(f"one step of {BATCH} samples, gate and canaries") as result:
        try:
            async with asyncio.timeout(STEP_S):
                while not (steps := list(_steps(metrics))):  # noqa: ASYNC110 - by another process
                    await asyncio.sleep(1)
        except TimeoutError as error:
            raise DemoError(f"no step was taken within {STEP_S:g} s") from error
        step = steps[0]
        gate, apart = step.get("gate") or {}, step.get("agreement_k3")
        result.append(f"version {step['version']}, {step['seconds']:.0f} s in the trainer")
        if apart is not None:
            result.append(f"sampler and trainer apart by a k3 of {apart:.1g}")
        if "moved" in gate:
            result.append(
                f"{gate['asked']} canaries asked, {gate['loss']:+.3f} nats lost in the mean, "
                f"moved by {gate['moved']:.3f}"
            )
        else:
            result.append(f"canaries not asked: {gate.get('unasked', 'refused')}")
    with talk.row("first turn, by the new version") as result:
        reply, _ = await talk.streamed([_says("user", TURNS[0][0])], _SIDE)
        result.append(f"{len(reply.split())} words")


def _steps(metrics: Path) -> Iterator[dict[str, Any]]:
    if metrics.is_file():
        events = map(json.loads, metrics.read_text().splitlines())
        yield from (one for one in events if one["event"] == "step")


def _says(role: str, text: str) -> Mapping[str, Any]:
    return {"role": role, "content": text}


async def run(flags: Sequence[str], folder: Path) -> None:
    """Start the gateway, go through everything, and print the table."""
    flags = (*flags, f"--data-dir={folder / 'run'}", f"--served-model-name={NAME}")
    flags += ("--backend=local", f"--batch-size={BATCH}", f"--max-reply-tokens={MOST_TOKENS}")
    flags += ("--prm-m=1",)  # the model judges itself what follows the call
    async with server.running(server.Launch(folder, flags)) as child:
        talk = Talk(child.url)
        await _wish(talk)
        await _conversation(talk)
        await _tool(talk)
        await _step(talk, folder / "run" / "metrics.jsonl")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n| | | seconds |\n|---|---|---|")
    print(
        *(f"| {what} | {result} | {seconds:.0f} |" for what, result, seconds in talk.rows), sep="\n"
    )
    print(
        f"\nProcessor time {(used.ru_utime + used.ru_stime) / 60:.1f} minutes, memory at most "
        f"{used.ru_maxrss / 1e6:.1f} GB."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model, and talk to it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.real_chat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="its folder")
    parser.add_argument("--model", type=Path, help="another model's folder, in its place")
    own, rest = parser.parse_known_args(arguments)
    as_ctrl_c()
    try:
        model = own.model or model_folder(own.cache)
        flags = [f"--model-name={model}", "--base-dtype=bfloat16", "--context-tokens=4096", *rest]
        with tempfile.TemporaryDirectory() as folder:
            try:
                asyncio.run(run(flags, Path(folder)))
            except DemoError as error:
                log = server.last_lines(Path(folder) / "server.log")
                raise DemoError(f"{error}\n{log}") from error
    except (ClawError, DemoError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
