"""Wiring: effects of a failing part on the rest, versions by name, rates and sources."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.support.fakes import FakeSampler, FakeTrainer
from tinker_claw.app.main import guarded
from tinker_claw.app.wiring import MOST_OPEN, VersionSamplers
from tinker_claw.backends.model_files import Source, source
from tinker_claw.backends.open import learning_rate
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError, LearningEndedError
from tinker_claw.learner.health import PartHealth
from tinker_claw.learner.recovery import restore
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.retry import Backoff
from tinker_claw.shipped import MODEL_DIR, MODELS

SOON = Backoff(first_s=0.001, longest_s=0.002)


async def test_part_that_ends_by_accident_starts_again_and_says_so_meanwhile() -> None:
    part, seen, starts = PartHealth("waiting"), list[tuple[str, str | None, bool]](), 0

    async def fails_twice() -> None:
        nonlocal starts
        starts += 1
        seen.append((part.state, part.error, part.next_try_s is not None))
        if starts < 3:
            raise ExceptionGroup("tasks", [ExceptionGroup("more", [OSError(f"no {starts}")])])

    async with asyncio.TaskGroup() as group:
        group.create_task(guarded("a part", fails_twice, part, SOON))
        while part.state != "failed":  # noqa: ASYNC110 - an observer
            await asyncio.sleep(0)
        assert part.error == "OSError: no 1"
        assert part.next_try_s is not None
    assert seen == [("waiting", None, False)] * 3
    assert part.state == "waiting"


async def test_cancelled_part_ends_although_its_own_task_fails_meanwhile() -> None:
    async def fails_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("no end without it")

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails_when_cancelled())
            await asyncio.Event().wait()

    task = asyncio.create_task(guarded("judging", work, PartHealth("waiting"), SOON))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()


async def test_part_that_ends_on_purpose_stays_ended() -> None:
    part, starts = PartHealth(), 0

    async def gives_up() -> None:
        nonlocal starts
        starts += 1
        raise ExceptionGroup("tasks", [LearningEndedError("they do not agree")])

    await guarded("a part", gives_up, part, SOON)
    assert (starts, part.state, part.ended) == (1, "failed", True)
    assert part.error == "LearningEndedError: they do not agree"


async def test_versions_are_opened_once_and_the_one_unused_longest_is_closed(
    tmp_path: Path,
) -> None:
    ledger, trainer = Ledger(tmp_path), FakeTrainer()
    version = (await restore(ledger, trainer)).version
    for _ in range(MOST_OPEN):
        ref = (await trainer.publish()).ref
        step = ledger.steps.begin(version.id, [])
        version = ledger.steps.commit(step, version, state_ref="s", sampler_ref=ref, metrics={})
    before = trainer.asked["open"]
    versions = VersionSamplers(ledger, trainer)
    first, again = await asyncio.gather(versions.open(0), versions.open(0))
    assert first is again
    opened = [await versions.open(number) for number in range(1, MOST_OPEN)]
    assert await versions.open(0) is first
    opened.append(await versions.open(MOST_OPEN))
    assert trainer.asked["open"] == before + MOST_OPEN + 1, "each once"
    await asyncio.sleep(0)
    closed = [sampler.closed for sampler in (first, *opened) if isinstance(sampler, FakeSampler)]
    assert closed == [False, True, *[False] * (MOST_OPEN - 1)]
    with pytest.raises(LookupError):
        await versions.open(99)
    await versions.aclose()
    ledger.close()


def test_automatic_rate_goes_by_the_models_hidden_size(tmp_path: Path) -> None:
    automatic, config = load([]), tmp_path / "config.json"
    assert learning_rate(load(["--learning-rate", "1e-4"]), "anywhere") == 1e-4
    llama = {"model_type": "llama", "hidden_size": 4096}
    for fields, rate in (
        (json.loads((MODEL_DIR / "config.json").read_text()), 6.327e-4),
        (llama, 2.857e-4),
        ({"model_type": "llava", "text_config": llama}, 2.857e-4),
        ({"model_type": "gpt2", "n_embd": 2000}, 5e-4),
    ):
        config.write_text(json.dumps(fields))
        assert learning_rate(automatic, str(tmp_path)) == pytest.approx(rate, rel=1e-3)
    config.unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        learning_rate(automatic, str(tmp_path))


def test_sources() -> None:
    for name, folder in MODELS.items():
        shipped = source(load(["--model-name", name]))
        family = "qwen3-vl" if name == "demo-screen" else "qwen3"
        assert (shipped.tokenizer, shipped.family) == (str(folder), family)
    mine = source(load(["--model-name", str(MODEL_DIR), "--renderer", "qwen3"]))
    assert (mine.tokenizer, mine.weights, mine.family) == (str(MODEL_DIR), str(MODEL_DIR), "qwen3")


@pytest.mark.parametrize(
    ("name", "family"), [("Qwen3-8B", "qwen3"), ("qwen3-0.6b", "qwen3"), ("my-model", "auto")]
)
def test_a_folder_named_like_a_known_model_speaks_its_format(
    name: str, family: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(MODEL_DIR, folder)
    assert mine(folder).family == family
    assert mine(folder, "--renderer", "default").family == "default"


def mine(folder: Path, *flags: str) -> Source:
    return source(load(["--backend", "local", "--model-name", str(folder), *flags]))


def test_a_tokenizer_from_elsewhere_leaves_the_weights_where_they_are(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    found = mine(tmp_path, "--tokenizer", str(MODEL_DIR))
    assert (found.tokenizer, found.weights) == (str(MODEL_DIR), str(tmp_path))
