"""Real servers and models whose text half learns: vLLM applies its adapters.

Not in the default suite: `make vllm` installs it, `make test-vllm` runs this.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from local_gpu.config import LocalConfig
from local_gpu.model.files import write_adapter
from local_gpu.model.load import open_base
from local_gpu.model.lora import LoraShape, fresh_adapter
from local_gpu.plan.memory import model_size
from local_gpu.trainer import LocalTrainer
from tests.local_gpu.sample.test_seeing import ONE, TWO, asked, in_transformers
from tests.render.test_eyes import said
from tests.support.local_reference import sequence
from tests.support.models import EYES_ON_VLLM, FAMILIES, tiny_of, tiny_qwen3_vl
from tests.support.real_vllm import HEAD_DIM, Numbers, serving
from tinker_claw.errors import SamplerError
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
SHAPE = LoraShape(4, 8)
IMAGES = ("--enable-scale-out", "--limit-mm-per-prompt", '{"video": 0}')
NUMBERS = Numbers.of("bfloat16")
"""Number format: linear attention on CPU supports no other."""


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest) -> Path:
    return request.config.getoption("vllm").absolute()


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_of(EYES_ON_VLLM, tmp_path_factory.mktemp("eyes") / "model")


@pytest.fixture(scope="module")
def url(environment: Path, eyes: Path) -> Iterator[str]:
    blind = ("--limit-mm-per-prompt", '{"image": 0, "video": 0}')
    room = ("--lora-target-modules", *model_size(str(eyes)).targets)
    log = eyes.with_name("vllm.log")
    with serving(environment, eyes, log, *blind, *room, dtype=NUMBERS.dtype) as url:
        yield url


async def trainer_of(eyes: Path, url: str, root: Path) -> LocalTrainer:
    config = LocalConfig(
        model=str(eyes),
        root=root,
        rank=SHAPE.rank,
        alpha=SHAPE.alpha,
        threads=1,
        sampler_urls=(url,),
        dtype=NUMBERS.dtype,
    )
    return await LocalTrainer.start(config)


async def test_vllm_applies_a_version_and_answers_with_it(
    eyes: Path, url: str, tmp_path: Path
) -> None:
    trainer = await trainer_of(eyes, url, tmp_path / "run")
    datum = Datum(tuple(sequence(40, 1)), 10, weights=((1.0,),) * 30)
    await trainer.train_step([LossPass("cross_entropy", (datum,))], Adam(0.1))
    version, base = await trainer.publish(), await trainer.base()
    prompt = sequence(30, 3)
    (drawn,) = await version.sample(prompt, SamplingParams(max_tokens=40, seed=5))
    tokens = (*prompt, *drawn.tokens)
    told = (await version.logprobs(tokens, start=30)).logprobs
    plain = (await base.logprobs(tokens, start=30)).logprobs
    assert max(abs(a - b) for a, b in zip(told, drawn.logprobs, strict=True)) < NUMBERS.tolerance
    assert max(abs(a - b) for a, b in zip(plain, drawn.logprobs, strict=True)) > 1
    await trainer.aclose()


@pytest.fixture(scope="module")
def seeing(
    environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    model = tiny_qwen3_vl(tmp_path_factory.mktemp("seeing") / "model", head_dim=HEAD_DIM)
    room = ("--lora-target-modules", *model_size(str(model)).targets, *IMAGES)
    log = model.with_name("vllm.log")
    with serving(environment, model, log, *room, tokenizer=True) as url:
        yield url, model


async def test_a_reply_to_images_has_the_whole_models_logprobs(
    seeing: tuple[str, Path], tmp_path: Path
) -> None:
    url, model = seeing
    config = LocalConfig(
        model=str(model), root=tmp_path, rank=4, alpha=8, threads=1, sampler_urls=(url,)
    )
    trainer = await LocalTrainer.start(config)
    try:
        assert (await trainer.capabilities()).sees
        renderer, found = Renderer.load(str(model), "qwen3-vl"), []
        weights = ((1.0,),) * 4
        text = renderer.prompt(said({"role": "user", "content": "What is this? "})).tokens
        datum = Datum((*text, 5, 6, 7, 8), start=len(text), weights=weights)
        base = await trainer.base()
        await trainer.train_step([LossPass("cross_entropy", (datum,))], Adam(0.05))
        version = await trainer.publish()
        for sampler in (base, version):
            for files in ((ONE,), (TWO,), (ONE, TWO)):
                prompt, params = asked(renderer, *files)
                (done,) = await sampler.sample(prompt, params)
                found.append(done.tokens)
                if sampler is base:
                    wanted = in_transformers(model, prompt, done, params.images)
                    assert done.logprobs == pytest.approx(wanted, abs=1e-3)
                assert all(len(row) == 3 for row in done.topk_ids)
                scores = await sampler.logprobs(
                    prompt + done.tokens, start=len(prompt), images=params.images
                )
                assert done.logprobs == pytest.approx(scores.logprobs, abs=1e-3)
        assert len(set(found)) == 6  # what it sees matters, and so does the adapter
        prompt, params = asked(renderer, ONE)
        fewer = replace(params.images[0], tokens=params.images[0].tokens - 1)
        short = (*prompt[: fewer.at], *prompt[fewer.at + 1 :])
        with pytest.raises(SamplerError, match="an image takes other tokens"):
            await base.sample(short, replace(params, images=(fewer,)))
    finally:
        await trainer.aclose()


MAPPED = """
import json, sys
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.models import qwen3_5
kind, *names = json.load(sys.stdin)
mapper = getattr(qwen3_5, kind).hf_to_vllm_mapper.get_rename_mapper()
print(json.dumps([parse_fine_tuned_lora_name(name, mapper)[0] for name in names]))
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Qwen3.5, eyes", "language_model.model.layers."),
        ("Qwen3.5-MoE, eyes", "language_model.model.layers."),
        ("Qwen3.5, text", "model.layers."),
    ],
)
def test_vllms_own_mapper_finds_every_layer(
    name: str, module: str, environment: Path, tmp_path: Path
) -> None:
    model = tiny_of(FAMILIES[name], tmp_path / "model")
    kind = json.loads((model / "config.json").read_text())["architectures"][0]
    base = open_base(str(model), device="cpu", dtype="float32", threads=1)
    write_adapter(tmp_path, base, SHAPE, fresh_adapter(base, SHAPE, 0))
    names = list(load_file(tmp_path / "adapter_model.safetensors"))
    done = subprocess.run(
        [environment / "bin" / "python", "-c", MAPPED],
        input=json.dumps([kind, *names]),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(layer.startswith(module) for layer in found), found
