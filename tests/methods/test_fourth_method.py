"""A method of an installed package works throughout: one record, one entry, no more."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from tests.plugins.test_plugins import HERE
from tests.support.fakes import LOGPROB
from tests.support.learning import world
from tests.support.processes import LOCAL
from tests.support.stories import run
from tinker_claw.billing.estimate import forecast
from tinker_claw.billing.prices import Price
from tinker_claw.cli import main
from tinker_claw.config.load import load
from tinker_claw.config.settings import Gateway, Run, Settings, Training
from tinker_claw.ledger.ledger import Ledger

FLAGS = ("--method", "nudge", "--model-name", "demo", *LOCAL)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def test_the_doctor_knows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*FLAGS, "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert main.main(["doctor", *flags]) == 0
    assert "can do all of nudge" in capsys.readouterr().out
    wrong = [flag if flag != "nudge" else "nugde" for flag in flags]
    assert main.main(["doctor", *wrong]) == 1
    assert "there is no method 'nugde'; choose combine, " in capsys.readouterr().out


def test_a_run_by_a_name_that_no_method_has_leaves_nothing(tmp_path: Path) -> None:
    done = run("--method", "nugde", *FLAGS[2:], directory=tmp_path / "data")
    assert done.returncode == 2
    assert "there is no method 'nugde'; choose combine, " in done.stderr
    assert not (tmp_path / "data").exists()


def test_its_estimate_rests_on_its_record() -> None:
    settings = Settings(run=Run(method="nudge"), training=Training(gate="off"))
    step = forecast(settings, Price()).step
    # One verdict question, two judged turns a sample; a quarter is taught, half of the
    # samples are scored again.
    judge, teacher = 2 * 16 * 1_100, 4 * 11_360
    assert step.prefill == judge + teacher + 8 * 11_300
    assert step.trained == 16 * 11_299


def test_it_learns_and_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(_learn(tmp_path))
    capsys.readouterr()
    where = ("--data-dir", str(tmp_path))
    assert main.main(["explain", "1", *where]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for part in (
        "The teacher was told: | NO, why so?",
        "Advantage by its reward: -0.500 (above 0: more of this). On its tokens ",
        "It was trained in step 1, with 1 other sample",
    ):
        assert part in told, told
    assert "Hint, as the judge put it" not in told
    assert main.main(["explain", "3", *where]) == 0
    assert "not trained: neutral verdict, no question." in " ".join(capsys.readouterr().out.split())
    for table in ("turns", "samples", "steps"):
        assert main.main(["log", table, *where]) == 0
        assert "trained" in capsys.readouterr().out or table == "steps"


async def _learn(path: Path) -> None:
    async with world(path, method="nudge", batch_size=2) as w:
        for said in ("NO, why so?", "YES", "well"):
            w.turn(said)
        await w.version(1)
        await w.settled()
        ((ppo, distilled),) = w.trainer.steps
        # r - mean, times 0.5, over the most tokens of a reply and two samples.
        each = 0.5 / (Gateway().max_reply_tokens * 2)
        (accepted,), (rejected,) = ppo.datums, distilled.datums
        assert accepted.advantages == (each, each)
        pushed = [row[-1] for row in rejected.weights]
        assert pushed == pytest.approx([-each * (1 - math.exp(LOGPROB))] * 2)
    ledger = Ledger(path)
    ledger.bind({"model": "demo", "method": "nudge", "backend": "local"})
    ledger.close()
    assert load(["--method", "nudge"]).run.directory.name == "Qwen3-8B-nudge"
