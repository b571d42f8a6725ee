"""Wiring: what a failing part does to the rest, versions by name, rates and sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from local_gpu.demo import MODEL_DIR
from tests.fakes import FakeSampler, FakeTrainer
from tinker_claw import config
from tinker_claw.errors import ConfigError
from tinker_claw.learner import restore
from tinker_claw.learner.health import Part
from tinker_claw.ledger import Ledger
from tinker_claw.serve import guarded
from tinker_claw.serve.backend import learning_rate
from tinker_claw.serve.model_files import source
from tinker_claw.serve.versions import MOST_OPEN, Versions


async def test_failing_part_is_recorded_and_does_not_spread() -> None:
    async def fails() -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [OSError("disk full")])])

    part = Part()
    await guarded(fails(), part)
    assert (part.state, part.error) == ("failed", "OSError: disk full")


async def test_versions_are_opened_once_and_the_one_unused_longest_is_closed(
    tmp_path: Path,
) -> None:
    ledger, trainer = Ledger(tmp_path), FakeTrainer()
    version = (await restore(ledger, trainer)).version
    for _ in range(MOST_OPEN):
        sampler = await trainer.publish()
        step = ledger.steps.begin(version.id, [])
        version = ledger.steps.commit(
            step, version, state_ref="s", sampler_ref=sampler.ref, metrics={}
        )
    versions = Versions(ledger, trainer)
    opened = [await versions.open(number) for number in range(MOST_OPEN)]
    assert await versions.open(0) is opened[0]
    await versions.open(MOST_OPEN)
    closed = [sampler.closed for sampler in opened if isinstance(sampler, FakeSampler)]
    assert closed == [False, True, False, False]
    with pytest.raises(LookupError):
        await versions.open(99)
    await versions.aclose()
    ledger.close()


def test_automatic_rate_goes_by_the_models_hidden_size() -> None:
    automatic = config.load(["--learning-rate", "auto"])
    assert learning_rate(automatic, str(MODEL_DIR)) == pytest.approx(6.327e-4, rel=1e-3)
    assert learning_rate(config.load([]), "anywhere") == 1e-4


def test_sources() -> None:
    demo = source(config.load(["--model-name", "demo"]))
    assert (demo.folder, demo.family) == (str(MODEL_DIR), "qwen3")
    mine = source(config.load(["--model-name", str(MODEL_DIR), "--renderer", "qwen3"]))
    assert (mine.folder, mine.family) == (str(MODEL_DIR), "qwen3")
    for nowhere in ("/nowhere/model", "./nowhere", "~/nowhere"):
        with pytest.raises(ConfigError, match="there is no such folder"):
            source(config.load(["--model-name", nowhere]))
