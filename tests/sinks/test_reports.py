"""Reports of steps to sinks: numbers of the ledger, and no words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import sql, sql_connection
from tests.support.stories import SECRET, Told, every_state
from tinker_claw import sinks
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.spend import Bill
from tinker_claw.sinks import base
from tinker_claw.sinks.base import Report, TrackedRun, read_reports, read_run
from tinker_claw.types import Usage


def reports(directory: Path, after: int = 0) -> tuple[TrackedRun, list[Report]]:
    with reading(directory / FILE) as ledger, ledger.moment():
        return read_run(ledger), read_reports(ledger, after)


def test_committed_steps_are_told_in_figures_and_without_a_word(tmp_path: Path) -> None:
    every_state(tmp_path)
    run, (report,) = reports(tmp_path)
    assert report.step == 1, "the void ones and the one that is open are not told"
    expected = {
        **{"step/version": 1, "step/steps_from_base": 1, "step/void_before": 0},
        **{"step/samples": 2, "step/reward_mean": 0, "step/losses/0": 0.25, "step/losses/1": -0.5},
        **{"step/agreement_k3": 0.03125, "step/agrees": 1, "step/clip_share": 0.125},
        **{"verdicts/good": 1, "verdicts/neutral": 0, "verdicts/bad": 1, "verdicts/none": 0},
    }
    assert expected.items() <= report.figures.items()
    assert all(type(value) is float for value in report.figures.values())
    assert SECRET not in repr((run, report))
    assert run.config == {"model": "demo", "method": "combine", "backend": "local"}
    assert (run.name, run.folder) == (tmp_path.name, tmp_path / "sinks")


def test_bills_are_summed_once_however_many_steps_are_read(tmp_path: Path) -> None:
    """Counted in steps of SQLite's machine: a tracker may be named after a year, which has many."""
    story, counted = Told(tmp_path), list[int]()
    connection = sql_connection(story.ledger)

    def steps(more: int) -> int:
        for number in range(more):
            story.ledger.spend.add(Bill("serve", Usage(prefill=1), 0.5))
            story.step(story.sampled(f"{more} {number}", 1)[1])
        counted.clear()
        connection.set_progress_handler(lambda: counted.append(1), 1)
        found = read_reports(sql(story.ledger), 0)
        connection.set_progress_handler(None, 1)
        spent = [one.figures["step/usd_in_all"] for one in found]
        assert spent == [0.5 * (number + 1) for number in range(len(found))]
        return len(counted)

    few = steps(16)
    assert steps(48) < 5 * few, "four times as many"
    later = read_reports(sql(story.ledger), 40)[0]
    assert later.figures["step/usd_in_all"] == 20.5, "of the steps before, too"
    story.ledger.close()


def test_a_run_keeps_its_id_whatever_its_user_does(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.step(told.sampled("a", 1)[1])
    before = reports(tmp_path)[0]
    told.ledger.pin.to(0)
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
    known = {n: v for n, v in report.figures.items() if not n.startswith(("step/", "verdicts/"))}
    assert known == {
        **{"gate/asked": 16.0, "gate/loss": 0.25},
    }
    assert report.figures["step/rate"] == 1e-4
    assert not {"step/reward_mean", "step/grad_norm", "step/told"} & report.figures.keys()


def test_steps_come_in_pages_and_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PAGE", 2)
    told = Told(tmp_path)
    for name in "abcde":
        told.step(told.sampled(name, 1)[1])
    told.ledger.close()
    seen, after = list[int](), 0
    while page := reports(tmp_path, after)[1]:
        seen += [report.step for report in page]
        after = seen[-1]
    assert seen == [1, 2, 3, 4, 5]


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
