"""Trials of kernels in a process of their own, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from local_gpu.tree import trials
from local_gpu.tree.choice import Heads
from local_gpu.tree.kernels import Kernel
from tinker_claw.errors import ConfigError

Tries = Callable[[], tuple[Kernel, list[str]]]


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tries:
    here = Path(__file__).parents[1]
    monkeypatch.setenv("TRIALS", str(tmp_path / "processes"))
    path = (str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def run() -> tuple[Kernel, list[str]]:
        said: list[str] = []
        kernel = trials.tried(
            torch.device("cpu"),
            torch.float32,
            Heads(2, 1, 8),
            said.append,
            kept=tmp_path / "run" / "kernels.json",
            module="trials_sick",
        )
        return kernel, said

    return run


def test_kernels_are_tried_in_a_process_of_their_own_and_once(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELS", "raises merged")
    kernel, said = tries()
    assert kernel.name == "merged"
    assert said[0] == "Attention by raises is left out: ValueError: not for this machine."
    assert said[1].startswith("Attention is by merged;")
    assert tries() == (kernel, said)
    (process,) = (tmp_path / "processes").read_text().split()
    assert int(process) != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kills", "breaks"])
def test_kernels_that_break_their_process_are_left_out_and_nobody_tries_them_again(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("KERNELS", f"{how} raises merged")
    kernel, said = tries()
    assert kernel.name == "merged"
    assert said[0].startswith(f"Attention by {how} is left out: it broke the device, or its")
    processes = tmp_path / "processes"
    assert len(processes.read_text().split()) == 2
    monkeypatch.setattr(trials, "version", "another {}".format)
    monkeypatch.setenv("KERNELS", "raises")
    with pytest.raises(ConfigError, match=r"No attention kernel works on cpu.* by raises "):
        tries()
    assert len(processes.read_text().split()) == 3, "with another PyTorch they are tried again"
