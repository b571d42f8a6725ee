"""`benchmarks.agreement`: rounding is small, and a missing adapter is found."""

from __future__ import annotations

import sys

import pytest

from benchmarks import agreement


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_rounding_is_small_and_faults_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agreement"])
    monkeypatch.setattr(agreement, "MOVED", (0.5,))
    agreement.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    found = {row[0].strip(): (float(row[3]), row[4].strip()) for row in rows}
    assert found["right, float32"][0] < 1e-9
    assert found["right, bfloat16; trainer float32"][0] < 2e-3
    assert all(found[name][1] == "" for name in found if name.startswith("right"))
    assert found["no adapter"][1] == found["alpha doubled"][1] == "stops"
