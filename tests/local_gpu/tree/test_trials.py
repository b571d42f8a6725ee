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


def test_kernels_that_break_their_process_are_left_out_and_nobody_tries_them_again(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, said = tries()
    assert kernel.name == "merged"
    assert said[0].startswith("Attention by kills is left out: it broke the device, or its process")
    assert said[1].startswith("Attention by breaks is left out: it broke the device")
    assert said[2] == "Attention by raises is left out: ValueError: not for this machine."
    assert said[3].startswith("Attention is by merged;")
    processes = tmp_path / "processes"
    assert len(processes.read_text().split()) == 3
    assert tries() == (kernel, said)
    assert len(processes.read_text().split()) == 3, "known from the file"
    monkeypatch.setattr(trials, "version", "another {}".format)
    monkeypatch.setenv("NONE_WORKS", "1")
    with pytest.raises(ConfigError, match=r"No attention kernel works on cpu.* by raises "):
        tries()
    assert len(processes.read_text().split()) == 4, "with another PyTorch they are tried again"
