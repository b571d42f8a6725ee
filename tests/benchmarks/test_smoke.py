"""The smoke test of a GPU, at the size that a CPU does: its checks pass, and each can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import smoke
from local_gpu.tree import kernels
from tests.support.lives import ROOT

CPU = torch.device("cpu")


def rows() -> tuple[bool, dict[str, dict[str, Any]]]:
    lines: list[str] = []
    well = smoke.run(smoke.TINY, CPU, torch.float32, lines.append)
    return well, {row["check"]: row for row in map(json.loads, lines)}


def test_all_is_well_here() -> None:
    well, found = rows()
    assert well
    assert list(found) == [
        "machine",
        "attention",
        "gradients",
        "memory",
        "out of memory",
        "speed",
    ]
    assert 0 < found["gradients"]["error"] < 1e-5
    assert 0 < found["out of memory"]["budget_tokens"] <= 2 * smoke.TINY.tokens
    assert found["speed"]["tokens_per_s"] > 0
    assert found["memory"]["planned_bytes_a_token"] > 0


def test_attention_that_is_wrong_is_found_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.SdpaKernel.prepare

    def wrong(self: Any, tree: Any, device: torch.device) -> Any:
        attend = right(kernels.SdpaKernel(), tree, device)
        return lambda query, key, value, scale: attend(query, key, value, scale) * 1.01

    monkeypatch.setattr(kernels.MergedKernel, "prepare", wrong)
    well, found = rows()
    assert not well
    assert [name for name, row in found.items() if not row["well"]] == ["attention", "gradients"]
    assert "its output is off by" in found["attention"]["problem"]


def test_a_pass_that_is_not_halved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local_gpu.learn.passes.out_of_memory", lambda error: False)
    well, found = rows()
    assert not well
    assert not found["out of memory"]["well"]
    assert found["speed"]["well"], "the next check runs all the same"


def test_a_failing_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(smoke, "gradients", broken)
    well, found = rows()
    assert not well
    assert list(found) == ["machine", "attention", "gradients"]
    assert "illegal memory access" in found["gradients"]["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.smoke", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 1
    assert "finds no GPU here" in done.stdout
