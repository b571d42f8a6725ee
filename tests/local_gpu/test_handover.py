"""Versions are served from memory, and their refs outlive the process all the same."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from backends import start_local
from local_reference import WARM, rl_datum

from local_gpu.trainer import LocalTrainer
from tinker_claw.errors import BackendError, OutageError
from tinker_claw.policy import Sampler
from tinker_claw.types import LossPass

TOKENS: Final = tuple((i * i + 7) % 50 for i in range(24))
STEP: Final = [LossPass("ppo", (rl_datum(20, 8, 3),))]


async def start(folder: Path, **settings: Any) -> LocalTrainer:
    (folder / "memory").mkdir(parents=True, exist_ok=True)
    settings = {"dtype": "bfloat16", "handover": folder / "memory"} | settings
    return await start_local(folder, **settings)


async def scores(sampler: Sampler) -> list[float]:
    return list((await sampler.logprobs(TOKENS, start=1)).logprobs)


def on_disk(folder: Path) -> set[str]:
    there = folder / "run" / "adapters"
    return {one.name for one in there.iterdir()} if there.is_dir() else set()


def in_memory(folder: Path) -> set[str]:
    return {one.name for one in (folder / "memory").glob("tinker-claw-handover-*/*")}


async def test_a_version_is_served_from_memory_and_lasts_by_its_state(tmp_path: Path) -> None:
    trainer = await start(tmp_path)
    await trainer.train_step(STEP, WARM)
    sampler = await trainer.publish()
    assert (in_memory(tmp_path), on_disk(tmp_path)) == ({sampler.ref}, set())
    state = await trainer.save_state("one")
    weights = Path("adapter_model.safetensors")
    lasting = tmp_path / "run" / "adapters" / sampler.ref / weights
    assert lasting.samefile(tmp_path / "run" / "states" / state / weights)
    expected = await scores(sampler)
    await trainer.aclose()
    assert in_memory(tmp_path) == set()
    again = await start(tmp_path)
    assert await scores(await again.open(sampler.ref)) == expected
    await again.aclose()


async def test_a_version_without_a_state_lasts_from_the_next_step_on(tmp_path: Path) -> None:
    trainer = await start(tmp_path)
    first = await trainer.publish()
    expected = await scores(first)
    await trainer.train_step(STEP, WARM)
    assert on_disk(tmp_path) == {first.ref}
    await first.aclose()
    second = await trainer.publish()
    assert in_memory(tmp_path) == {second.ref}
    assert await scores(await trainer.open(first.ref)) == expected
    await trainer.aclose()
    assert on_disk(tmp_path) == {first.ref, second.ref}


async def test_without_room_for_two_versions_they_are_served_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await start(tmp_path)
    size = trainer._backend.learning.facts.adapter_bytes
    usage = shutil.disk_usage(tmp_path)
    for free, there in ((2 * size - 1, on_disk), (2 * size, in_memory)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, f=free: usage._replace(free=f))
        sampler = await trainer.publish()
        assert sampler.ref in there(tmp_path)
        weights = trainer._keeping.adapter(sampler.ref) / "adapter_model.safetensors"
        assert size < weights.stat().st_size < 1.5 * size
    await trainer.aclose()


async def test_what_is_no_place_for_it_is_done_without(tmp_path: Path) -> None:
    trainer = await start(tmp_path, handover=tmp_path / "nowhere")
    sampler = await trainer.publish()
    assert on_disk(tmp_path) == {sampler.ref}
    await trainer.aclose()


@pytest.mark.parametrize("handover", [True, False])
async def test_a_version_that_nobody_was_answered_by_is_not_kept(
    tmp_path: Path, *, handover: bool
) -> None:
    trainer = await start(tmp_path, **({} if handover else {"handover": None}))
    state = await trainer.save_state("start")
    kept = await trainer.publish()
    await trainer.train_step(STEP, WARM)
    refused = await trainer.publish()
    await trainer.save_state("of what is not committed")
    await refused.aclose()
    await trainer.load_state(state)
    assert on_disk(tmp_path) == {kept.ref}
    assert refused.ref not in in_memory(tmp_path)
    assert {one.name for one in (tmp_path / "run" / "states").iterdir()} == {state}
    with pytest.raises(BackendError, match="no adapter"):
        await trainer.open(refused.ref)
    again = await trainer.publish()
    await trainer.load_state(state)
    assert await scores(again) == await scores(kept), "what is open stays"
    assert on_disk(tmp_path) == {kept.ref, again.ref}
    await trainer.aclose()


async def test_what_living_processes_hand_over_is_left_alone(tmp_path: Path) -> None:
    one = await start(tmp_path)
    sampler = await one.publish()
    other = await start(tmp_path / "other", handover=tmp_path / "memory")
    assert in_memory(tmp_path) == {sampler.ref}
    await other.aclose()
    await one.aclose()
    assert os.listdir(tmp_path / "memory") == []


LIFE: Final = """
import asyncio, json, os, signal, sys
from pathlib import Path
from test_handover import STEP, WARM, scores, start

async def main():
    trainer = await start(Path(sys.argv[1]))
    await trainer.train_step(STEP, WARM)
    sampler = await trainer.publish()
    state = await trainer.save_state("one")
    print(json.dumps([sampler.ref, state, await scores(sampler)]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_ref_resolves_after_kill_9(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), str(here.parent.parent)])
    life = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-c", LIFE, str(tmp_path)),
        env={**os.environ, "PYTHONPATH": paths},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await life.communicate()
    assert life.returncode == -signal.SIGKILL
    ref, state, expected = json.loads(said)
    assert in_memory(tmp_path) == {ref}, "it was served from there when it died"
    trainer = await start(tmp_path)
    assert in_memory(tmp_path) == set(), "and that went with the next start"
    assert await scores(await trainer.open(ref)) == expected
    await trainer.load_state(state)
    assert await scores(await trainer.publish()) == expected
    await trainer.aclose()


async def test_a_version_that_no_server_takes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(ref: str, folder: Path) -> Sampler:
        raise OutageError("No server answers.")

    trainer = await start(tmp_path)
    state = await trainer.save_state("start")
    monkeypatch.setattr(trainer._backend.serving, "open", away)
    with pytest.raises(OutageError):
        await trainer.publish()
    await trainer.load_state(state)
    assert (in_memory(tmp_path), on_disk(tmp_path)) == (set(), set())
    await trainer.aclose()
