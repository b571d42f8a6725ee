"""GPU layouts: settings, the plan, and the processes started for it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from local_gpu.config import LocalConfig
from local_gpu.model.load import load_base
from local_gpu.plan.layout import Gpu, Layout, Wanted, names, plan, visible
from local_gpu.plan.memory import cpu_parts, model_size, sequence_bytes, total_of
from local_gpu.sample.member import PoolOptions
from local_gpu.sample.supervisor import KEY
from tests.local_gpu.sample.test_supervisor import VLLM, starts
from tests.support.backends import tiny_model
from tests.support.inference_servers import inference_servers
from tests.support.models import FAMILIES, tiny_of
from tests.support.waits import comes, gone
from tinker_claw.backends import local
from tinker_claw.backends.local import (
    arrange,
    check_fit,
    local_config,
    open_local,
    why_not,
)
from tinker_claw.backends.vllm import no_compiler
from tinker_claw.cli import main
from tinker_claw.config.load import load
from tinker_claw.config.settings import VARIABLES, Settings
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.types import SamplingParams

LOCAL = ("--backend", "local")
BOX = (
    "0, NVIDIA H100 80GB HBM3, 81559, {}, GPU-aaaa\n1, NVIDIA H100 80GB HBM3, 81559, 4, GPU-bbbb\n"
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name in VARIABLES.values() or name.startswith(("TINKER_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENCLAW_CONFIG_PATH", str(tmp_path / "openclaw.json"))
    empty = tmp_path / "path"
    empty.mkdir()
    monkeypatch.setenv("PATH", f"{empty}:/usr/bin:/bin")  # neither nvidia-smi nor vllm
    found = shutil.which

    def which(name: str | Path, *, path: str | None = None) -> str | None:
        return None if Path(name).parts[0] == ".venv-vllm" else found(name, path=path)

    monkeypatch.setattr(shutil, "which", which)  # this checkout may have a vllm of its own


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny_model(tmp_path / "tiny"))


@pytest.fixture
def box(tmp_path: Path) -> Callable[..., None]:
    """Make a machine with two GPUs of 80 GB, by a fake nvidia-smi."""

    def make(told: str = BOX.format(7), status: int = 0) -> None:
        script = tmp_path / "path" / "nvidia-smi"
        script.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat <<E\n{told}E\nexit {status}\n'
        )
        script.chmod(0o755)

    return make


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """Put the stand-in for vLLM on PATH."""
    script = tmp_path / "path" / "vllm"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {VLLM} "$@"\n')
    script.chmod(0o755)
    return script


def settings(*flags: str) -> Settings:
    return load([*LOCAL, "--model-name", "/m", *flags])


# Settings


def test_openclaw_rls_variables_count_where_nothing_else_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("NUM_GPUS", "8"), ("ROLLOUT_GPUS", "5")):
        monkeypatch.setenv(name, count)
    local = settings().local
    assert (local.gpus, local.rollout_gpus) == (8, 5)
    file = tmp_path / "s.toml"
    file.write_text("[local]\nrollout_gpus = 3\n")
    assert settings("--config", str(file)).local.rollout_gpus == 3, "a file beats the variable"
    assert settings("--gpus", "7", "--rollout-gpus", "1").local.gpus == 7
    monkeypatch.setenv("TINKER_CLAW_LOCAL__GPUS", "9")
    assert settings().local.gpus == 9
    monkeypatch.setenv("NUM_GPUS", "many")
    monkeypatch.delenv("TINKER_CLAW_LOCAL__GPUS")
    with pytest.raises(ConfigError, match=r"local\.gpus \(--gpus, NUM_GPUS\): Input should be"):
        settings()
    assert load([]).local.gpus is None, "the service has GPUs of its own"
    assert load([*LOCAL, "--model-name", "demo"]).local.gpus is None


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--rollout-gpus 3 --rollout-tp 2", "multiple"),
        ("--judge-model m", "--judge-url"),
        ("--sampler-urls http://a:1 --rollout-gpus 2", "ROLLOUT_GPUS"),
        ("--sampler-urls http://a:1 --rollout-tp 2", "--rollout-tp is for"),
        ("--sampler-urls box:8000", "'box:8000' is no address"),
        ("--sampler-urls http://box:99999", "'http://box:99999' is no address"),
        ("--backend tinker --gpus 8", "--gpus .NUM_GPUS.: with --backend tinker"),
        ("--backend tinker --sampler-urls http://a:1", "a service trains and samples"),
        ("--model-name demo --rollout-gpus 1", "demo needs no GPU"),
        ("--model-name demo --gpus 2", "--gpus .NUM_GPUS.: the model demo"),
        ("--device cpu --gpus 2 --base-quantization 4bit", "--device is cpu"),
        ("--device cuda:1 --gpus 2", "one GPU"),
    ],
)
def test_settings_that_exclude_one_another_are_refused(flags: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        settings(*flags.split())


def test_settings_that_go_together() -> None:
    assert settings("--gpus", "1", "--rollout-gpus", "1").local.gpus == 1
    urls = settings("--sampler-urls", "http://a:1/, https://b").local.urls
    assert urls == ("http://a:1", "https://b")


# The plan


def singles(first: int, after: int) -> tuple[tuple[int, ...], ...]:
    return tuple((gpu,) for gpu in range(first, after))


@pytest.mark.parametrize(
    ("wanted", "layout"),
    [
        (Wanted(gpus=1), Layout((0,), ((0,),))),
        (Wanted(gpus=2), Layout((0,), ((1,),))),
        (Wanted(gpus=8), Layout((0,), singles(1, 8))),
        (Wanted(gpus=8, rollout=6), Layout((0, 1), singles(2, 8))),
        (Wanted(gpus=8, tensor_parallel=2), Layout((0, 1), ((2, 3), (4, 5), (6, 7)))),
        (Wanted(gpus=8, tensor_parallel=4), Layout((0, 1, 2, 3), ((4, 5, 6, 7),))),
        (
            Wanted(gpus=8, rollout=4, tensor_parallel=2),
            Layout((0, 1, 2, 3), ((4, 5), (6, 7))),
        ),
        (Wanted(gpus=1, rollout=1), Layout((0,), ((0,),))),
        (Wanted(gpus=4, samples=False), Layout((0, 1, 2, 3), ())),
    ],
)
def test_gpus_are_shared_out(wanted: Wanted, layout: Layout) -> None:
    assert plan(wanted) == layout
    assert len({*layout.train, *layout.sampling}) == wanted.gpus
    assert layout.shared == (wanted.gpus == 1 and wanted.samples)


@pytest.mark.parametrize(
    "wanted",
    [Wanted(gpus=2, rollout=2), Wanted(gpus=1, rollout=2), Wanted(gpus=2, tensor_parallel=2)],
)
def test_a_plan_that_does_not_work_out_is_refused(wanted: Wanted) -> None:
    with pytest.raises(ConfigError, match=f"There are {wanted.gpus} GPU"):
        plan(wanted)


# The machine


def test_gpus_are_asked_of_nvidia_smi(
    tmp_path: Path, box: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(value: str) -> tuple[Gpu, ...]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        return visible()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible() == (), "no nvidia-smi, no GPU"
    box()
    both = visible()
    assert [gpu.device for gpu in both] == ["0", "1"]
    assert {gpu.name for gpu in both} == {"NVIDIA H100 80GB HBM3"}
    assert (both[0].total, both[0].used) == (81_559 << 20, 7 << 20)
    assert "memory.total" in (tmp_path / "asked").read_text()
    assert [gpu.device for gpu in named("1,0")] == ["1", "0"]
    assert named("") == ()
    assert [gpu.device for gpu in named("0,-1,1")] == ["0"]
    chosen = named("GPU-bb, GPU-aaaa")
    assert names(chosen, (0,))["CUDA_VISIBLE_DEVICES"] == "1", "vLLM knows no part of a UUID"
    assert names(both, (0, 1))["CUDA_VISIBLE_DEVICES"] == "0,1"
    for unknown in ("2", "MIG-1", "GPU-cc"):
        with pytest.raises(ConfigError, match=f"names {unknown!r}, which nvidia-smi does not list"):
            named(unknown)


def test_an_nvidia_smi_that_fails_is_a_sentence(box: Callable[..., None]) -> None:
    box("NVIDIA-SMI has failed because it couldn't communicate with the driver\n", 9)
    with pytest.raises(ConfigError, match=r"communicate with the driver.: fix the driver"):
        visible()
    box("0, NVIDIA GB10, [N/A], [N/A], GPU-a\n")
    with pytest.raises(ConfigError, match=r"cannot be read.*: fix the driver"):
        visible()


def arranged(model: str, *flags: str, only_reckon: bool = False):  # type: ignore[no-untyped-def]
    given = load([*LOCAL, "--model-name", model, *flags])
    return arrange(given, only_reckon=only_reckon)


def test_a_machine_without_gpus_learns_on_its_cpu(model: str) -> None:
    assert arranged(model).ranks == 1
    with pytest.raises(
        ConfigError, match=r"--gpus .NUM_GPUS.: nvidia-smi and .* show 0 GPUs here; .*CPU"
    ):
        arranged(model, "--gpus", "2")
    with pytest.raises(ConfigError, match="--device: nvidia-smi"):
        arranged(model, "--device", "cuda")


def test_gpus_without_vllm_are_refused_with_how_to_get_it(
    model: str, box: Callable[..., None]
) -> None:
    box()
    for flags in ((), ("--rollout-gpus", "1")):
        with pytest.raises(ConfigError, match=r"needs vLLM, and there is none in \.venv-vllm.*pip"):
            arranged(model, *flags)


def test_layout_goes_by_the_gpus_that_are_visible(
    model: str, box: Callable[..., None], vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box()
    assert arranged(model).layout == Layout((0,), ((1,),))
    assert arranged(model, "--gpus", "1").layout == Layout((0,), ((0,),))
    second = arranged(model, "--device", "cuda:1")
    assert (second.layout, second.first, second.gpus[0].device) == (Layout((0,), ((0,),)), 1, "1")
    with pytest.raises(ConfigError, match="show 2 GPUs here; ask for no more"):
        arranged(model, "--gpus", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert arranged(model).layout == Layout((0,), ((0,),))
    assert arranged(model).vllm == vllm, "found on PATH"


def test_what_the_trainer_is_told(model: str, box: Callable[..., None], vllm: Path) -> None:
    def configured(*flags: str, name: str = model, urls: tuple[str, ...] = ()) -> LocalConfig:
        given = load([*LOCAL, "--model-name", name, *flags])
        return local_config(given, name, arrange(given), urls)

    box()
    url = ("http://127.0.0.1:1",)
    config = configured(urls=url)
    assert (config.device, config.train_gpus) == ("cuda", (0,))
    assert (config.ranks, config.shard) == (1, "off")
    assert config.sampler_urls == url
    assert config.sampler_api_key == KEY, "of the servers that were started here"
    assert config.micro_batch_tokens is not None
    assert config.gpu_memory is None
    shared = configured("--gpus", "1", urls=url)
    assert shared.gpu_memory is not None, "a server is on the same GPU"
    at_one = configured("--device", "cuda:1")
    assert (at_one.device, at_one.train_gpus) == ("cuda:1", (1,))
    on_cpu = configured("--device", "cpu", "--base-dtype", "bfloat16")
    assert (on_cpu.device, on_cpu.ranks, on_cpu.train_gpus) == ("cpu", 1, ())
    assert (on_cpu.dtype, on_cpu.shard) == ("bfloat16", "off")
    assert on_cpu.micro_batch_tokens is None
    with pytest.raises(ConfigError, match="float32 is for a CPU"):
        configured("--base-dtype", "float32")
    demo = configured(name="demo")
    assert (demo.device, demo.ranks) == ("cpu", 1), "whatever GPUs there are"


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    model: str, box: Callable[..., None], vllm: Path
) -> None:
    box(BOX.format(81_000))  # others have nearly all of the first
    flags = [*LOCAL, "--model-name", model]
    with pytest.raises(ConfigError, match=r"does not fit, by arithmetic. GPU 0: no room is left"):
        check_fit(load(flags))
    assert why_not(arrange(load([*flags, "--device", "cuda:1"]))) is None
    mixture = str(tiny_of(FAMILIES["Qwen3-MoE"], Path(model) / "mixture"))
    with pytest.raises(ConfigError, match=r"4bit: the experts of .*mixture are no linear layers"):
        check_fit(load([*LOCAL, "--model-name", mixture, "--base-quantization", "4bit"]))


# What is started


async def test_servers_are_ready_before_the_trainer_and_end_when_it_cannot_start(
    model: str,
    box: Callable[..., None],
    vllm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer fails because it finds no CUDA; any failure would do."""
    monkeypatch.setattr(local, "ask_torch", lambda arranged: None)  # it would say so before
    box()
    given = load([*LOCAL, "--model-name", model, "--data-dir", str(tmp_path / "data")])
    with pytest.raises(ClawError, match=r"cuda"):
        async with open_local(given, arrange(given), model):
            raise AssertionError("there is no GPU here")
    (server,) = starts(Path(model))
    assert server["env"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert (Path(model) / "asked.json").exists(), "it was ready before the trainer was tried"
    assert "loading" in (tmp_path / "data" / "logs" / "sampler-1.log").read_text()
    assert gone(server["pids"])


async def test_a_server_of_ours_that_hangs_is_started_again(
    model: str,
    box: Callable[..., None],
    vllm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Trainer:
        """Stands in for the trainer, which needs CUDA, as its pool finds that a server hangs."""

        @classmethod
        async def start(cls, config: LocalConfig, options: PoolOptions) -> Trainer:
            options.hung(config.sampler_urls[0])
            return cls()

        async def aclose(self) -> None:
            pass

    monkeypatch.setattr(local, "ask_torch", lambda arranged: None)
    monkeypatch.setattr("local_gpu.trainer.LocalTrainer", Trainer)
    box()
    given = load([*LOCAL, "--model-name", model, "--data-dir", str(tmp_path / "data")])
    async with open_local(given, arrange(given), model):
        assert await asyncio.to_thread(comes, lambda: len(starts(Path(model))) == 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_no_server_is_started_where_torch_cannot_use_the_gpu(
    model: str, box: Callable[..., None], vllm: Path, tmp_path: Path
) -> None:
    box()
    given = load([*LOCAL, "--model-name", model, "--data-dir", str(tmp_path / "data")])
    with pytest.raises(ConfigError, match=r"torch cannot use cuda:0: .*or give --device cpu"):
        async with open_local(given, arrange(given), model):
            raise AssertionError("there is no GPU here")
    assert not (Path(model) / "started.jsonl").exists()


async def test_servers_that_run_elsewhere_serve_what_is_learned_here(
    model: str, tmp_path: Path, check: Check
) -> None:
    base = load_base(model, device=torch.device("cpu"), dtype=torch.float32)
    with inference_servers(base, 1) as (server,):
        flags = ["--device", "cpu", "--sampler-urls", server.url]
        flags += ["--data-dir", str(tmp_path / "data"), "--lora-rank", "4", "--model-name", model]
        given = load([*LOCAL, *flags])
        async with open_local(given, arrange(given), model) as trainer:
            published = await trainer.publish()
            (drawn,) = await published.sample((1, 2, 3), SamplingParams(max_tokens=4, seed=1))
            assert len(drawn.tokens) <= 4
            assert published.ref in server.adapters, "it was drawn there"
        serves = await asyncio.to_thread(check, "samplers", *flags)
        assert serves.startswith(f"ok   samplers   {server.url} serves tiny-base, context ")
        server.stop()
        server.faults.static = True
        server.start()
        static = await asyncio.to_thread(check, "samplers", *flags)
        assert static.startswith("FAIL samplers   --sampler-urls: ")
        assert "--enable-lora" in static
    away = await asyncio.to_thread(check, "samplers", *flags)
    assert away.startswith("FAIL samplers")
    assert server.url.removeprefix("http://") in away


async def test_a_server_that_is_not_there_is_named_with_its_setting(
    model: str, tmp_path: Path
) -> None:
    flags = ["--device", "cpu", "--sampler-urls", "http://127.0.0.1:9"]
    flags += ["--data-dir", str(tmp_path / "data"), "--model-name", model]
    given = load([*LOCAL, *flags])
    with pytest.raises(ConfigError, match=r"--sampler-urls: .*:9 cannot be reached.*fix"):
        # Not that the base is missing: loading one takes minutes, and asking does not.
        async with open_local(given, arrange(given), str(tmp_path / "no-base")):
            pass


# The doctor


Check = Callable[..., str]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run the doctor with some flags, and return what it says of one check."""

    def run(name: str, *flags: str) -> str:
        main.main(["doctor", *LOCAL, "--port", "0", "--data-dir", str(tmp_path / "d"), *flags])
        return section(capsys.readouterr().out, name)

    return run


def section(told: str, name: str) -> str:
    """A check's line with its continuation lines."""
    lines = told.splitlines()
    first = next(i for i, line in enumerate(lines) if line[5:].split(" ")[0] == name)
    last = first + 1
    while last < len(lines) and lines[last].startswith(" " * 16):
        last += 1
    return "\n".join(lines[first:last])


def test_the_doctor_reckons_before_vllm_is_there(
    model: str, box: Callable[..., None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--gpus", "2", "--model-name", model)
    assert "show 0 GPUs here" in check("memory", *flags)
    box()
    table = check("memory", *flags)
    assert table.startswith("ok   memory     GPU 0 learns; 1 samples.")
    assert "KV cache:" in table
    assert "needs vLLM, and there is none" in check("samplers", *flags)
    monkeypatch.setattr(
        "tinker_claw.backends.open.find_spec", {"torch": 1, "peft": 1, "safetensors": 1}.get
    )
    small = (*flags, "--base-quantization", "4bit")
    assert "FAIL backend    --base-quantization 4bit needs" in check("backend", *small)
    assert "base, 4 bits" in check("memory", *small), "it may be installed later"
    box(BOX.format(81_000))
    table = check("memory", *flags)
    assert table.startswith("FAIL memory")
    assert "does not fit" in table


def test_the_doctor_reckons_the_memory_of_a_cpu_and_a_start_refuses_what_does_not_fit(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local_gpu.learn.memory._CGROUP", tmp_path)
    model = str(tiny_model(tmp_path / "long", max_position_embeddings=1024))
    flags = ("--device", "cpu", "--model-name", model)

    def limited(limit: int | str, *more: str) -> str:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        return check("memory", *flags, *more)

    assert limited("max").startswith("ok   memory")
    sized = model_size(model)
    wide, narrow = (int(total_of(cpu_parts(sized, 32, of))) for of in ("float32", "bfloat16"))
    each = int(sequence_bytes(sized, "float32"))
    tight = wide + 300 * each
    short = limited(tight)
    assert short.startswith("warn memory")
    assert short.endswith("--context-tokens 256")
    assert limited(tight, "--context-tokens", "256").startswith("ok   memory")
    none = limited(1_000_000_000, "--base-dtype", "bfloat16")
    assert none.startswith("FAIL memory")
    assert none.endswith("take a smaller model")
    with pytest.raises(ConfigError, match=r"container, has 0.9: take a smaller model"):
        check_fit(load([*LOCAL, *flags]))
    assert limited(narrow + 257 * each).endswith("take --base-dtype bfloat16")


@pytest.mark.parametrize("wrong", [{"hidden_size": "big"}, {"num_attention_heads": 0}])
def test_a_config_that_no_model_can_be_built_from_is_one_sentence(
    model: str, check: Check, wrong: dict[str, Any]
) -> None:
    config = Path(model) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    flags = ("--device", "cpu", "--model-name", model)
    assert check("memory", *flags).startswith("FAIL memory")
    check_fit(load([*LOCAL, *flags]))  # loading says what is wrong


def test_what_only_reckons_imports_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
    script += "import local_gpu.plan.fits, local_gpu.plan.commands, local_gpu.plan.layout"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_what_kernels_are_compiled_with_is_missed(tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(mode=0o755)
    assert no_compiler(str(tmp_path), tmp_path) is None
    nothing = tmp_path / "nothing"
    missing = no_compiler(str(nothing), nothing)
    assert missing is not None
    assert "gcc" in missing
    assert "Python.h" in missing
