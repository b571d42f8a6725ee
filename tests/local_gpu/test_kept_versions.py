"""Which versions and states stay on disk, whatever ends the process."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from local_gpu.trainer import LocalTrainer
from tests.support.backends import start_local
from tests.support.local_reference import WARM, rl_datum
from tinker_claw.errors import BackendError
from tinker_claw.policy import KEPT_DAYS, Sampler
from tinker_claw.types import LossPass

TOKENS: Final = tuple((i * i + 7) % 50 for i in range(24))
STEP: Final = [LossPass("ppo", (rl_datum(20, 8, 3),))]


async def start(folder: Path) -> LocalTrainer:
    return await start_local(folder, dtype="bfloat16")


async def scores(sampler: Sampler) -> list[float]:
    return list((await sampler.logprobs(TOKENS, start=1)).logprobs)


def on_disk(folder: Path) -> set[str]:
    there = folder / "run" / "adapters"
    return {one.name for one in there.iterdir()} if there.is_dir() else set()


async def test_a_version_that_nobody_was_answered_by_is_not_kept(tmp_path: Path) -> None:
    trainer = await start(tmp_path)
    state = await trainer.save_state("start")
    kept = await trainer.publish()
    await trainer.train_step(STEP, WARM)
    refused = await trainer.publish()
    await trainer.save_state("of what is not committed")
    await refused.aclose()
    await trainer.load_state(state)
    assert on_disk(tmp_path) == {kept.ref}
    assert {one.name for one in (tmp_path / "run" / "states").iterdir()} == {state}
    with pytest.raises(BackendError, match="no adapter"):
        await trainer.open(refused.ref)
    again = await trainer.publish()
    await trainer.load_state(state)
    assert await scores(again) == await scores(kept), "what is open stays"
    assert on_disk(tmp_path) == {kept.ref, again.ref}
    await trainer.aclose()


async def test_a_bad_week_can_be_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 11, 1, 9, tzinfo=UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now

    monkeypatch.setattr("local_gpu.model.files.datetime", Clock)
    trainer = await start_local(tmp_path, dtype="bfloat16", keep_states=2, keep_adapters=2)
    made = list[tuple[str, str]]()
    for day in range(20):
        for hour in (0, 1, 2):
            now = datetime(2026, 11, 1 + day, 9 + hour, tzinfo=UTC)
            sampler = await trainer.publish()
            made.append((sampler.ref, await trainer.save_state(f"day {day}")))
            await sampler.aclose()
            await trainer.train_step(STEP, WARM)
    stays = {made[0], *made[-2:], *made[2::3][-KEPT_DAYS:]}
    assert on_disk(tmp_path) == {sampler for sampler, _ in stays}
    assert {one.name for one in (tmp_path / "run" / "states").iterdir()} == {s for _, s in stays}
    version, state = made[12 * 3 + 2]  # of a week ago
    await trainer.load_state(state)
    assert await scores(await trainer.open(version)) == await scores(await trainer.publish())
    await trainer.aclose()
