"""Environments and harnesses of verifiers, unmodified, as clients of the gateway.

    .venv-verifiers/bin/python -m examples.tracks.with_verifiers --taskset NAME --harness bash

Runs in an environment of its own, which `make verifiers` makes: verifiers wants an older
OpenAI client than this project's tests. A rollout is an episode, named by its trace's id, which
verifiers sends as X-Session-ID; the other headers stand in the client's settings, one client for
each group. Rule: a rollout that broke has no outcome; none is made up for it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import verifiers.v1 as vf
from verifiers.v1.env import RunSlot
from verifiers.v1.utils.loaders import load_environment

from examples.tracks import TrackError, cause
from examples.tracks.client import Gateway, Place, connected
from examples.tracks.sandbox import HARMLESS
from examples.tracks.track import Track

_USUAL = Track(environment="verifiers")


def outcome(trace: Any) -> float | None:
    """Rewards from 0 to 1 are outcomes from -1 to 1; None: it broke, or was not scored."""
    if trace.has_error or not any(trace.rewards.values()):
        return None
    return max(-1.0, min(1.0, 2 * trace.reward - 1))


def config_of(asked: argparse.Namespace) -> Any:
    """One agent, who plays a task set with a harness.

    Raises:
        TrackError: a real model would have a shell on this machine.
    """
    if asked.runtime == "subprocess" and asked.harness != "null" and asked.model not in HARMLESS:
        raise TrackError(
            f"The harness {asked.harness} runs what {asked.model} writes: give --runtime docker, "
            "podman or apptainer. Without it only the shipped demo models may."
        )
    agent: dict[str, Any] = {
        "harness": {"id": asked.harness},
        "runtime": {"type": asked.runtime},
        "max_turns": asked.max_turns,
    }
    return vf.SingleAgentEnvConfig.model_validate(
        {"taskset": {"id": asked.taskset}, "agent": agent}
    )


async def play(asked: argparse.Namespace, track: Track, gateway: Gateway) -> int:
    """All groups, side by side; how many rollouts broke."""
    environment = load_environment(config_of(asked))
    places = asyncio.Semaphore(track.concurrency)
    run, broken = uuid4().hex[:8], 0

    async def tell(episode: Any) -> None:
        nonlocal broken
        for trace in episode.traces:
            score = outcome(trace)
            if score is None:
                broken += 1
                print(f"{trace.id}: no outcome: {trace.last_error or 'not scored'}", flush=True)
                continue
            counts = await gateway.outcome(trace.id, score)
            late = "" if counts else ", which came too late"
            print(f"{trace.id}: outcome {score:+.2f}{late}", flush=True)

    async def group(number: int, task: Any) -> None:
        named = Place("", str(number), f"{run}-{number}", track.group_size).headers()
        del named["X-Session-Id"]  # verifiers sends the id of the trace
        client = vf.EvalClientConfig(
            base_url=track.url, api_key_var=track.key_variable, headers=named
        )
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=track.max_tokens)
        context = vf.ModelContext(track.model, client, sampling)
        slots: Sequence[RunSlot] = environment.slots(task, track.group_size)
        async with asyncio.TaskGroup() as tries:
            for slot in slots:
                tries.create_task(environment.run_slot(slot, context, places, tell))

    async with environment.serving(), asyncio.TaskGroup() as groups:
        for number, task in enumerate(itertools.islice(environment.taskset, track.groups)):
            groups.create_task(group(number, task))
    return broken


async def _main(asked: argparse.Namespace) -> int:
    track = Track(
        environment="verifiers",
        model=asked.model,
        url=asked.url,
        concurrency=asked.concurrency,
        group_size=asked.group_size,
        groups=asked.groups,
        max_tokens=asked.max_tokens,
    )
    async with connected(track) as gateway:
        return await play(asked, track, gateway)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play; 0 where no rollout broke, else 1."""
    parser = argparse.ArgumentParser(prog="python -m examples.tracks.with_verifiers")
    add = parser.add_argument
    add("--taskset", required=True, help="the name of an installed task set of verifiers")
    add("--harness", default="null", help="of verifiers: null, bash, mini_swe_agent, ...")
    add("--runtime", default="subprocess", help="where the harness runs: docker, apptainer, ...")
    add("--model", default=_USUAL.model, help="the gateway's name for it")
    add("--url", default=_USUAL.url, help="of the gateway, with /v1")
    add("--concurrency", type=int, default=_USUAL.concurrency, help="rollouts at a time")
    add("--group-size", type=int, default=_USUAL.group_size, help="rollouts of a task")
    add("--groups", type=int, default=_USUAL.groups, help="tasks to try at most")
    add("--max-turns", type=int, default=_USUAL.max_turns, help="replies of a rollout")
    add("--max-tokens", type=int, default=_USUAL.max_tokens, help="of a reply")
    os.umask(0o077)
    try:
        return min(1, asyncio.run(_main(parser.parse_args(arguments))))
    except (TrackError, ExceptionGroup) as error:
        print(f"Stopped: {cause(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
