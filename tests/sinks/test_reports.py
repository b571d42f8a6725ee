"""Reports of steps to sinks: numbers of the ledger, and no words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.stories import SECRET, Told, every_state
from tinker_claw import sinks
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import FILE, open_read_only
from tinker_claw.ledger.spend import Bill
from tinker_claw.sinks import base
from tinker_claw.sinks.base import Report, TrackedRun, read_reports, read_run
from tinker_claw.types import Usage


def reports(directory: Path, after: int = 0) -> tuple[TrackedRun, list[Report]]:
    with open_read_only(directory / FILE) as ledger, ledger.moment():
        return read_run(ledger), read_reports(ledger, after)


def test_committed_steps_are_told_in_figures_and_without_a_word(tmp_path: Path) -> None:
    every_state(tmp_path)
    run, (report,) = reports(tmp_path)
    assert report.step == 1, "the void ones and the one that is open are not told"
    expected = {
        **{"step/version": 1, "step/steps_from_base": 1},
        **{"step/samples": 2, "step/reward_mean": 0, "step/losses/0": 0.25, "step/losses/1": -0.5},
        **{"step/agreement_k3": 0.03125, "step/agrees": 1, "step/clip_share": 0.125},
        **{"verdicts/good": 1, "verdicts/neutral": 0, "verdicts/bad": 1, "verdicts/none": 0},
    }
    assert expected.items() <= report.figures.items()
    assert all(type(value) is float for value in report.figures.values())
    assert SECRET not in repr((run, report))
    assert run.config == {"model": "demo", "method": "combine", "backend": "local"}
    assert (run.name, run.folder) == (tmp_path.name, tmp_path / "sinks")


def test_steps_come_in_pages_and_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PAGE", 2)
    told = Told(tmp_path)
    for name in "abcde":
        told.ledger.spend.add(Bill("serve", Usage(prefill=1), 0.5))
        told.step(told.sampled(name, 1)[1])
    told.ledger.close()
    seen, after = dict[int, float](), 0
    while page := reports(tmp_path, after)[1]:
        assert len(page) <= 2
        seen |= {report.step: report.figures["step/usd_in_all"] for report in page}
        after = page[-1].step
    assert seen == {number: 0.5 * number for number in range(1, 6)}


def test_a_run_keeps_its_id_whatever_its_user_does(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.step(told.sampled("a", 1)[1])
    before = reports(tmp_path)[0]
    told.ledger.versions.pin(0)
    assert reports(tmp_path)[0] == before, "a tracker would begin a second run, with every step"
    told.ledger.close()


def test_figures_of_every_shape_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics: dict[str, Any] = {
        **{"reward_mean": None, "grad_norm": float("nan"), "rate": 1e-4, "told": SECRET},
        "gate": {"asked": 16, "loss": 0.25, "unasked": f"{SECRET}: it took too long"},
        "rule": {"method": SECRET, "w_rl": 1.0},
    }
    monkeypatch.setattr("tests.support.stories.METRICS", metrics)
    told = Told(tmp_path)
    told.step(told.sampled("a", 1)[1])
    told.ledger.close()
    _, (report,) = reports(tmp_path)
    assert report.figures["step/rate"] == 1e-4
    gate = {name: value for name, value in report.figures.items() if name.startswith("gate/")}
    assert gate == {"gate/asked": 16.0, "gate/loss": 0.25}
    assert not {"step/reward_mean", "step/grad_norm", "step/told"} & report.figures.keys()
    assert SECRET not in repr(report)


def test_sinks_are_named_with_commas_and_known() -> None:
    assert load(["--report-to", "wandb, tensorboard,wandb"]).run.sinks == ("wandb", "tensorboard")
    assert load([]).run.sinks == ()
    with pytest.raises(ConfigError, match="no sink 'visdom'; choose tensorboard, wandb"):
        base.check_installed(("visdom",))


def test_one_file_is_a_sink_and_its_missing_package_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = "class Lines:\n    def __init__(self, run): self.run = run\nSINK = Lines\n"
    (tmp_path / "plain_lines.py").write_text(f'PACKAGE = ""\n{sink}')
    (tmp_path / "rare_lines.py").write_text(f'PACKAGE = "surely-nobody-has-this>=3"\n{sink}')
    monkeypatch.setattr(sinks, "__path__", [*sinks.__path__, str(tmp_path)])
    base.check_installed(("plain_lines",))
    run = TrackedRun("id", "name", tmp_path, {})
    assert vars(base.sink("plain_lines", run)) == {"run": run}
    with pytest.raises(ConfigError, match=r"pip install 'surely-nobody-has-this>=3'"):
        base.check_installed(("rare_lines",))
