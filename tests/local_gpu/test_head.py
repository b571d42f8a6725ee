"""Rows that the head computes at once: on a GPU by its free memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from local_gpu.learn import head as module
from local_gpu.learn.head import head_logprobs
from tests.support.fake_cuda import CPU, GPU, FakeCuda, on_gpu

GIB = 1 << 30


class Head(nn.Module):
    """A head that counts the rows of every call."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.out_features = len(weight)
        self.seen: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.append(len(rows))
        return rows @ self.weight.T


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(1000, 8, generator=draw), torch.randn(64, 8, generator=draw)
    return weight, rows, torch.randint(0, 1000, (64, 2), generator=draw)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1 << 12)  # four rows
    monkeypatch.setattr(module, "_LARGEST_CHUNK", 1 << 14)  # sixteen


@pytest.mark.parametrize(
    ("free", "kept", "at_once"),
    [
        (None, 0, 4),  # nobody says
        (1000, 0, 4),
        (4 * 16 * (1 << 13), 4 * 16 * (1 << 13), 8),  # what torch has and does not use is free
        (8 * 16 * (1 << 13) + 10**6, 0, 8),  # a power of two
        (40 * GIB, 0, 16),
    ],
)
def test_a_gpu_takes_as_many_as_there_is_room_for(
    free: int | None, kept: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    weight, rows, ids = tensors()
    on_cpu = Head(weight)
    right = head_logprobs(on_cpu, rows, ids)
    assert set(on_cpu.seen) == {4}, "a CPU keeps to few rows"
    with FakeCuda(free):
        head = Head(on_gpu(weight))
        assert rows.to(GPU).device == GPU
        found = head_logprobs(head, on_gpu(rows), on_gpu(ids)).to(CPU)
    assert set(head.seen) == {at_once}
    torch.testing.assert_close(found, right)
