"""Our compact datums in Tinker's layout: shifted by one, zeros where there is no loss."""

from __future__ import annotations

import numpy as np
import pytest
from tinker import types as sdk

from tinker_claw.backends.tinker.convert import named, rows_of, to_sdk
from tinker_claw.errors import AlignmentError, SamplerError, StepError
from tinker_claw.types import Datum, LossPass

TOKENS = (5, 6, 7, 8, 9)


def arrays(datum: sdk.Datum) -> dict[str, np.ndarray]:
    return {name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()}


def test_reinforcement_datum_is_shifted_and_padded_with_zeros_before_the_reply() -> None:
    datum = Datum(TOKENS, start=3, logprobs=(-1.0, -2.0), advantages=(0.5, -0.5))
    (sent,) = to_sdk(LossPass("ppo", (datum,)), sparse=True)
    assert sent.model_input.to_ints() == [5, 6, 7, 8]
    assert {name: list(values) for name, values in arrays(sent).items()} == {
        "target_tokens": [6, 7, 8, 9],
        "logprobs": [0, 0, -1, -2],
        "advantages": [0, 0, 0.5, -0.5],
    }
    assert {a.dtype for n, a in arrays(sent).items() if n != "target_tokens"} == {np.dtype("f4")}


def candidates() -> LossPass:
    datum = Datum(TOKENS, start=3, targets=((1, 2), (3, 4)), weights=((0.1, -0.1), (0.2, -0.2)))
    return LossPass("cross_entropy", (datum,))


def test_candidates_stand_behind_the_sampled_token_which_weighs_nothing() -> None:
    (sent,) = to_sdk(candidates(), sparse=False)
    assert arrays(sent)["target_tokens"].tolist() == [[6] * 3, [7] * 3, [8, 1, 2], [9, 3, 4]]
    weights = arrays(sent)["weights"]
    assert weights == pytest.approx(np.array([[0] * 3, [0] * 3, [0, 0.1, -0.1], [0, 0.2, -0.2]]))


def test_sparse_rows_say_the_same_as_dense_ones() -> None:
    (dense,), (sparse,) = (to_sdk(candidates(), sparse=s) for s in (False, True))
    for name in ("target_tokens", "weights"):
        one, other = dense.loss_fn_inputs[name], sparse.loss_fn_inputs[name]
        assert one.shape == other.shape == [4, 3]
        assert other.to_torch()[2:].tolist() == one.to_torch()[2:].tolist()
        assert other.to_torch()[:2].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(3,), (4,), (12,), (4, 2), (4, 1, 2), (3, 4)])
def test_answer_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    answer = sdk.TensorData.from_numpy(np.zeros(shape, np.float32))
    with pytest.raises(AlignmentError, match="for 4 tokens with 3 targets each"):
        rows_of(candidates().datums[0], answer)


@pytest.mark.parametrize(
    ("loss_pass", "says"),
    [
        (LossPass("ppo", ()), "no datums"),
        (LossPass("ppo", (Datum(TOKENS, start=3, logprobs=(-1.0, -1.0)),)), "no advantages"),
        (LossPass("cross_entropy", (Datum(TOKENS, start=3),)), "no weights"),
        (LossPass("gspo", (Datum(TOKENS, start=3),)), "Unknown loss"),  # type: ignore[arg-type]
    ],
)
def test_datum_that_does_not_fit_its_loss_is_named(loss_pass: LossPass, says: str) -> None:
    with pytest.raises(StepError, match=says):
        to_sdk(loss_pass, sparse=True)


def test_ragged_rows_are_refused() -> None:
    ragged = Datum(TOKENS, start=3, targets=((1, 2), (3,)), weights=((1.0, 1.0), (1.0,)))
    with pytest.raises(ValueError, match="inhomogeneous"):
        to_sdk(LossPass("cross_entropy", (ragged,)), sparse=True)


@pytest.mark.parametrize("values", [None, [1.0, 2.0], [1.0, 2.0, float("nan"), 4.0]])
def test_scores_of_named_ids_that_are_not_whole_are_refused(values: list[float] | None) -> None:
    found = None if values is None else sdk.TensorData(values, "float32", [len(values)])
    with pytest.raises(SamplerError, match="the ids that were asked for"):
        named(found, rows=2, k=2)
