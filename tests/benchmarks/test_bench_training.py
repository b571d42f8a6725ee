"""The benchmark of training steps, tiny: every side learns the same, and what it counts is so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import training, training_report
from benchmarks.smoke import Shape, distance, grown_adapter, random_base
from benchmarks.training_peers import LossRows, Padded
from benchmarks.training_reference import true_gradients
from benchmarks.training_shapes import Batches, Preset, batches
from benchmarks.training_sides import Ours, Settings, Side, everywhere
from benchmarks.training_work import Work, causal_pairs, flops
from local_gpu.model.lora import LoraShape
from local_gpu.tree.kernels import MergedKernel

RANK = 4
PRESET = Preset(Shape(2, 64, 160, 4, 2, 16, 257), Batches(3, 96, 40, (24, 60), long=70))
CPU = torch.device("cpu")


def settings(*, checkpointing: bool = False) -> Settings:
    base = random_base(PRESET.shape, context=256, device=CPU, dtype=torch.float32)
    lora = LoraShape(RANK, RANK)
    return Settings(base, lora, grown_adapter(base, lora), checkpointing, 1 << 16, MergedKernel())


@pytest.fixture(scope="module")
def figures() -> training_report.Figures:
    asked = training.parser().parse_args(["--device", "cpu", "--repeat", "1"])
    options = replace(training.options_of(asked), preset=PRESET, rank=RANK)
    return training.measure(options, lambda line: None)


def test_every_side_has_the_reference_s_gradients(figures: training_report.Figures) -> None:
    assert list(figures.cases) == ["shared", "unshared", "long"]
    for rows in figures.cases.values():
        assert [row.side for row in rows] == list(training.SIDES.values())
        for row in rows:
            assert row.failed is None
            assert row.gradient_error is not None
            assert 0 < row.gradient_error < 1e-5, row


def test_work_is_what_each_side_computes(figures: training_report.Figures) -> None:
    rows = {row.side: row for row in figures.cases["shared"]}
    work = {name: rows[shown].work for name, shown in training.SIDES.items()}
    apart, rest = 3 * 135, 3 * 14
    assert work["ours"] == Work(
        tokens=96 + 3 * 39,
        pairs=causal_pairs(96) + 3 * (39 * 96 + causal_pairs(39)),
        head_rows=rest,
        head_products=3,
        checkpointing=False,
    )
    assert work["tree-off"] == Work(apart, 3 * causal_pairs(135), rest, 3, False)
    assert work["packing-off"] == work["tree-off"]
    assert work["ours"] is not None
    assert work["head-off"] == replace(work["ours"], head_rows=apart)
    assert work["peft-1"] == work["peft"] == Work(408, 3 * causal_pairs(136), 408, 2, False)
    assert {row.useful_tokens for row in rows.values()} == {apart}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["ours", "head everywhere", "padded", "loss rows"])
def test_flops_are_those_that_pytorch_counts(name: str, checkpointing: bool) -> None:
    common = settings(checkpointing=checkpointing)
    datums = batches(PRESET)["shared"]
    sides: dict[str, Side] = {
        "ours": Ours("", common),
        "head everywhere": Ours("", common, all_rows=True),
        "padded": Padded("", common, rows=None),
        "loss rows": LossRows("", common),
    }
    aten: Any = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: _forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=attention)
    with counter:
        work = sides[name].step(datums)
    assert flops(work, PRESET.shape, RANK) == pytest.approx(counter.get_total_flops(), rel=0.005)


def _forward(
    query: Sequence[int], key: Sequence[int], *rest: Any, out_shape: Any = None, **names: Any
) -> int:
    causal = True in rest[1:]
    pairs = causal_pairs(query[2]) if causal else query[2] * key[2]
    return 4 * query[0] * query[1] * query[3] * pairs


def _backward(
    grad: Any, query: Sequence[int], key: Sequence[int], *rest: Any, out_shape: Any, **names: Any
) -> int:
    return _forward(query, key, *rest, **names) * 10 // 4


def test_a_side_that_learns_something_else_shows() -> None:
    common, datums = settings(), batches(PRESET)["shared"]
    true = true_gradients(common, datums, torch.float64)
    louder = [replace(d, advantages=tuple(1.1 * a for a in d.advantages)) for d in datums]
    assert distance(Ours("", common).gradients(louder), true) == pytest.approx(0.1, rel=1e-4)
    assert distance(Ours("", common).gradients(datums[:2]), true) > 0.3


def test_positions_of_advantage_zero_add_nothing() -> None:
    datum = batches(PRESET)["long"][0]
    grown = everywhere(datum)
    assert (grown.start, len(grown.advantages)) == (1, len(datum.tokens) - 1)
    common = settings()
    plain = Ours("", common).gradients([datum])
    assert distance(Ours("", common).gradients([grown]), plain) < 1e-6
