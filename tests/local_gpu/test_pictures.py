"""Training behind images: gradients and scores are those of the whole model in transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from local_gpu.halves import Facts, ScoreAsk
from local_gpu.learn.scores import score
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.export import export_merged
from local_gpu.model.files import write_adapter
from local_gpu.model.load import open_base
from local_gpu.model.lora import BaseModel, with_lora
from local_gpu.model.vision import Vision, paint
from local_gpu.tree.kernels import MergedKernel
from local_gpu.tree.prefix_tree import grow
from tests.local_gpu.learners import SHAPE, apart, gradient, learner, peft_gradient, warm
from tests.support.local_reference import reference
from tests.support.models import tiny_qwen3_vl
from tests.support.pictures import picture
from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.images import Image
from tinker_claw.types import Datum, LossPass, PlacedImage

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
ONE, TWO = (Image(picture(*size), "").clean() for size in ((96, 64), (64, 128)))
TURNED = Image(picture(64, 96), "").clean()
"""As many tokens as `ONE`, in another shape."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def base(model: Path) -> BaseModel:
    return open_base(str(model), device="cpu", dtype="float32", threads=1)


@pytest.fixture(scope="module")
def vision(base: BaseModel) -> Vision:
    found = Vision.of(base)
    assert found is not None
    return found


def text(length: int, salt: int) -> tuple[int, ...]:
    return tuple((salt * 17 + i * i * 5 + i * salt) % 500 for i in range(length))


def test_the_vision_half_is_loaded_while_adapters_are_put_on_the_other(base: BaseModel) -> None:
    """As when a version is published during the first request with an image."""
    adapter, loaded = warm(base), Event()

    def build() -> None:
        while not loaded.is_set():
            with_lora(base, SHAPE, adapter)

    building = Thread(target=build)
    building.start()
    try:
        for _ in range(3):
            vision = Vision.of(base)
            assert vision is not None
            assert not any(p.is_meta for p in vision.over(base.module).parameters())
    finally:
        loaded.set()
        building.join()


def behind(vision: Vision, *parts: tuple[int, ...] | bytes, rows: int, salt: int = 1) -> Datum:
    """A datum whose prompt is made of texts and images, with `rows` tokens to learn."""
    tokens, images = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, bytes):
            count = vision.tokens(part)
            images.append(PlacedImage(len(tokens), count, part, "png"))
            tokens += [vision.placeholder] * count
        else:
            tokens += part
    start = len(tokens)
    return Datum(
        tokens=(*tokens, *text(rows, 40 + salt)),
        start=start,
        logprobs=tuple(-6.0 - 0.3 * ((i + salt) % 5) for i in range(rows)),
        advantages=tuple(0.1 * ((i * salt) % 7 - 3) + 0.05 for i in range(rows)),
        images=tuple(images),
    )


def batch(vision: Vision) -> list[Datum]:
    """Long shared beginnings: with the same image, with others of its place, and with none."""
    stem, more = text(50, 3), text(40, 4)
    image = behind(vision, stem, ONE, more, rows=9)
    spelt = (*text(3, 8), vision.placeholder, *text(3, 9))  # sampled, and no image
    return [
        image,
        behind(vision, stem, ONE, more, image.tokens[image.start :], TWO, text(4, 2), rows=5),
        behind(vision, stem, ONE, more, rows=7, salt=2),
        behind(vision, stem, TURNED, more, rows=8, salt=3),
        behind(vision, stem, TWO, more, TURNED, text(35, 5), rows=6, salt=4),
        behind(vision, stem, more, rows=6, salt=5),
        replace(image, tokens=image.tokens[: image.start] + spelt, logprobs=(-6.0,) * 7,
                advantages=(0.2,) * 7),
    ]  # fmt: skip


def whole_logprobs(vision: Vision, model: Any, datum: Datum) -> torch.Tensor:
    """transformers' own forward pass over pixels, ids and kinds."""
    ids = torch.tensor([datum.tokens])
    kinds = torch.zeros_like(ids)
    for image in datum.images:
        kinds[0, image.at : image.at + image.tokens] = 1
    # The whole model takes every placeholder for an image.
    spelt = (ids == vision.placeholder) & (kinds == 0)
    assert not spelt[0, : datum.start].any()
    ids = ids.masked_fill(spelt, 0)
    seen = vision.pixels(datum.images) if datum.images else {}
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits
    return logits[0, datum.start - 1 : -1].float().log_softmax(-1)


def learning(base: BaseModel, vision: Vision | None, **settings: Any) -> LoraOptimizer:
    return learner(base, kernel=MergedKernel(), vision=vision, **settings)


def ppo(*datums: Datum) -> list[LossPass]:
    return [LossPass("ppo", datums)]


def test_gradients_are_those_of_the_whole_model(
    model: Path, base: BaseModel, vision: Vision, tmp_path: Path
) -> None:
    passes, one = ppo(*batch(vision)[:-1]), learning(base, vision)
    rows = partial(whole_logprobs, vision)
    wanted = peft_gradient(base, one, model, tmp_path, passes, rows=rows)
    for name, mine in gradient(one, passes).items():
        assert apart({name: mine}, {name: wanted[name]}) < 1e-5, name


@pytest.mark.parametrize(("tokens", "checkpoint"), [(1, False), (200, False), (None, True)])
def test_however_it_is_cut_the_gradient_is_the_same(
    base: BaseModel, vision: Vision, tokens: int | None, checkpoint: bool
) -> None:
    passes = ppo(*batch(vision))
    one = gradient(learning(base, vision), passes)
    other = gradient(learning(base, vision, tokens=tokens, checkpointing=checkpoint), passes)
    assert apart(one, other) < 1e-5


def test_prefixes_are_shared_behind_the_same_images_only(base: BaseModel, vision: Vision) -> None:
    first, _, same, turned, *_ = batch(vision)
    module = base.module

    def rows(*datums: Datum) -> int:
        shown = [(torch.tensor(datum.tokens), datum.images) for datum in datums]
        return len(grow(paint(vision, module, shown)[0]).tokens)

    alone = len(first.tokens)
    assert rows(first, same) == alone + 7
    # One shape more or less: the text before the image is shared, and nothing behind it.
    assert rows(first, turned) == alone + len(turned.tokens) - 50


def test_scores_are_those_of_the_whole_model(
    model: Path, base: BaseModel, vision: Vision, tmp_path: Path
) -> None:
    one = learning(base, vision)
    write_adapter(tmp_path, base, SHAPE, one.masters.adapter())
    whole = reference(model, tmp_path)
    facts = Facts(base.vocabulary, base.context_tokens)
    datums = batch(vision)[:-1]
    asks = [ScoreAsk.of(facts, d.tokens, d.start, None, 2, d.images) for d in datums]
    scored = score(one.passes, one.module, asks)
    for datum, read in zip(datums, scored, strict=True):
        with torch.no_grad():
            rows = whole_logprobs(vision, whole, datum)
        wanted = rows.gather(1, torch.tensor(datum.tokens[datum.start :])[:, None])[:, 0]
        assert read.logprobs == pytest.approx(wanted.tolist(), abs=2e-5)
        assert list(read.topk_ids) == [tuple(row) for row in rows.topk(2).indices.tolist()]


def test_the_merged_model_sees_as_the_adapter_over_the_whole_model_does(
    model: Path, base: BaseModel, vision: Vision, tmp_path: Path
) -> None:
    write_adapter(tmp_path, base, SHAPE, warm(base))
    export_merged(str(model), tmp_path, tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    (datum, *_), whole = batch(vision), reference(model, tmp_path)
    with torch.no_grad():
        wanted = whole_logprobs(vision, whole, datum)
        torch.testing.assert_close(whole_logprobs(vision, merged, datum), wanted, rtol=0, atol=2e-4)


def test_images_that_do_not_fit_are_named(base: BaseModel, vision: Vision) -> None:
    datum = behind(vision, text(5, 1), ONE, rows=4)
    (image,) = datum.images
    with pytest.raises(AlignmentError, match="does not stand before the first loss token"):
        replace(datum, images=(replace(image, at=6),))
    one = learning(base, vision)
    with pytest.raises(StepError, match=r"an image stands at 5\.\.11, where it cannot"):
        gradient(one, ppo(replace(datum, images=(image, image))))
    short = replace(image, tokens=image.tokens - 1)
    with pytest.raises(StepError, match="takes 6 tokens, and not 5"):
        gradient(one, ppo(replace(datum, images=(short,))))
    with pytest.raises(StepError, match="reads text only"):
        gradient(learning(base, None), ppo(datum))
