"""Replies to images: the same numbers in this process, over Tinker's wire, and in transformers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from local_gpu.config import LocalConfig
from local_gpu.trainer import LocalTrainer
from tests.render.test_eyes import said
from tests.support.models import tiny_qwen3_vl
from tests.support.pictures import bombs, picture, shown
from tests.support.tinker import KEY, NAME, served
from tinker_claw.backends.tinker.trainer import TinkerTrainer
from tinker_claw.billing.budget import Account
from tinker_claw.config.settings import Run, Settings, Training
from tinker_claw.errors import RequestError
from tinker_claw.images import images_in
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import (
    Adam,
    Completion,
    Datum,
    Images,
    LossPass,
    PlacedImage,
    SamplingParams,
    uncharged,
)

ONE, TWO = picture(96, 64), picture(64, 128, "JPEG")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return Renderer.load(str(model), "qwen3-vl")


def asked(renderer: Renderer, *files: bytes) -> tuple[tuple[int, ...], SamplingParams]:
    """A prompt with these images, and how to sample a reply to it."""
    messages = said(*(shown(file, "What is this? ") for file in files))
    prompt = renderer.prompt(messages)
    places = zip(prompt.images, images_in(messages), strict=True)
    images = tuple(PlacedImage(*at, image.clean(), image.format) for at, image in places)
    return prompt.tokens, SamplingParams(max_tokens=12, seed=5, student_topk=3, images=images)


async def local(model: Path, root: Path) -> LocalTrainer:
    config = LocalConfig(
        model=str(model), root=root, rank=4, alpha=8, threads=1, context_tokens=2048
    )
    return await LocalTrainer.start(config)


def in_transformers(
    model: Path, prompt: tuple[int, ...], done: Completion, images: tuple[PlacedImage, ...]
) -> list[float]:
    """The whole model's logprobs of a reply, in one pass."""
    whole: Any = Qwen3VLForConditionalGeneration.from_pretrained(model).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    files = [Pillow.open(BytesIO(image.data)) for image in images]
    seen = processor(images=files, return_tensors="pt") if files else {}
    ids = torch.tensor([[*prompt, *done.tokens]])
    kinds = torch.zeros_like(ids)
    for image in images:
        kinds[0, image.at : image.at + image.tokens] = 1
    with torch.inference_mode():
        logits = whole(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[0]
    rows = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(done.tokens)[:, None])[:, 0].tolist()


async def drawn(
    sampler: Sampler, renderer: Renderer, *files: bytes
) -> tuple[tuple[int, ...], Completion]:
    prompt, params = asked(renderer, *files)
    (done,) = await sampler.sample(prompt, params)
    return prompt, done


async def test_a_reply_has_the_whole_models_logprobs(
    model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    trainer = await local(model, tmp_path)
    try:
        assert (await trainer.capabilities()).sees
        text = renderer.prompt(said({"role": "user", "content": "What is this? "})).tokens
        prompts = [asked(renderer, *files) for files in ((ONE,), (TWO,), (ONE, TWO))]
        prompts.append((text, SamplingParams(max_tokens=12, seed=5)))
        base, replies = await trainer.base(), list[Completion]()
        for prompt, params in prompts:
            (done,) = await base.sample(prompt, params)
            wanted = in_transformers(model, prompt, done, params.images)
            assert done.logprobs == pytest.approx(wanted, abs=1e-4)
            replies.append(done)
        assert len({done.tokens for done in replies}) == 4  # what it sees matters
        datum = Datum((*text, 5, 6, 7, 8), start=len(text), weights=((1.0,),) * 4)
        await trainer.train_step([LossPass("cross_entropy", (datum,))], Adam(0.05))
        trained = await trainer.publish()
        _, after = await drawn(trained, renderer, ONE)
        assert after.logprobs[0] != pytest.approx(replies[0].logprobs[0], abs=1e-3)
        _, again = await drawn(base, renderer, ONE)
        assert again == replies[0]
    finally:
        await trainer.aclose()


async def over_tinker(model: Path, folder: Path, **options: Any) -> TinkerTrainer:
    settings = {"model": str(model), "root": folder / "served", "alpha": 8, **options}
    there = await asyncio.to_thread(lambda: served(folder, **settings))
    run = Run(model_name=NAME, base_url=there.url, renderer="qwen3-vl", tokenizer=str(model))
    asked = Settings(run=run, training=Training(lora_rank=4))
    return await TinkerTrainer.start(asked, key=KEY)


async def test_over_tinkers_wire_images_that_do_not_fit_are_refused(
    model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    far = await over_tinker(model, tmp_path)
    try:
        base = await far.base()
        prompt, params = asked(renderer, ONE)
        (image,) = params.images
        thrown = [*bombs().values(), (picture(96, 64, "GIF"), "cannot be read")]
        wrong = [(replace(image, data=data), why) for data, why in thrown]
        wrong.append((replace(image, tokens=5), "of 6 tokens, not of the 5 that are expected"))
        for broken, why in wrong:
            with pytest.raises(RequestError, match=why):
                await base.sample(prompt, replace(params, images=(broken,)))
    finally:
        await far.aclose()


def learned(prompt: tuple[int, ...], done: Completion, images: Images) -> list[LossPass]:
    """A reply's sampled tokens and candidates, with losses."""
    rows = len(done.tokens)
    advantages = tuple(0.1 * (i % 5 - 2) for i in range(rows))
    weights = tuple((0.1, -0.05, 0.02 * i) for i in range(rows))
    tokens, start = prompt + done.tokens, len(prompt)
    return [
        LossPass(
            "ppo",
            (Datum(tokens, start, logprobs=done.logprobs, advantages=advantages, images=images),),
        ),
        LossPass(
            "cross_entropy",
            (Datum(tokens, start, targets=done.topk_ids, weights=weights, images=images),),
        ),
    ]


async def test_over_tinkers_wire_it_learns_the_same(
    model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    near = await local(model, tmp_path / "near")
    far = await over_tinker(model, tmp_path)
    found: list[Any] = []
    try:
        for trainer in (near, far):
            can = await trainer.capabilities()
            assert can.sees
            assert can.trains_images
            base, passes = await trainer.base(), list[LossPass]()
            for files in ((ONE,), (TWO, ONE), (ONE,)):
                prompt, params = asked(renderer, *files)
                (done,) = await base.sample(prompt, params)
                passes += learned(prompt, done, params.images)
            account = Account(uncharged)
            report = await trainer.train_step(passes, Adam(0.01), account.add)
            tokens = [d.tokens for one in passes for d in one.datums]
            lengths = [len(each) - 1 for each in tokens]
            assert report.tokens == sum(lengths)
            assert account.usage.trained == (sum(lengths) if trainer is far else 0)
            sampler = await trainer.publish()
            datum = passes[-1].datums[0]
            account = Account(uncharged)
            scores = await sampler.logprobs(
                datum.tokens,
                start=datum.start,
                targets=datum.targets,
                top_k=3,
                images=datum.images,
                charge=account.add,
            )
            assert account.usage.prefill == (len(datum.tokens) if trainer is far else 0)
            found.append((report, scores, tokens))
    finally:
        await near.aclose()
        await far.aclose()
    (here, read, tokens), (there, read_there, tokens_there) = found
    assert tokens_there == tokens
    assert there.losses == pytest.approx(here.losses, abs=1e-5)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-5)
    for one, other in zip(here.logprobs, there.logprobs, strict=True):
        assert other[0] == pytest.approx(one[0], abs=1e-5)
    # Every option of scoring, by weights after the step.
    assert read_there.logprobs == pytest.approx(read.logprobs, abs=1e-5)
    assert read_there.topk_ids == read.topk_ids
    for one, other in zip(read.targets, read_there.targets, strict=True):
        assert other == pytest.approx(one, abs=1e-5)


async def test_a_server_without_eyes_says_so_at_the_start(tmp_path: Path) -> None:
    far = await over_tinker(Path("demo"), tmp_path)
    try:
        can = await far.capabilities()
        assert not can.sees
        assert not can.trains_images
    finally:
        await far.aclose()
