"""Supervised servers: ready, restarted, and gone with us whatever kills us."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from local_gpu.plan import commands
from local_gpu.plan.commands import Servings
from local_gpu.plan.layout import Gpu
from local_gpu.sample.supervisor import Launch, Servers
from tests.support.lives import ROOT
from tests.support.waits import alive, comes, gone
from tinker_claw.errors import ConfigError

VLLM = ROOT / "tests" / "support" / "stand_in_vllm.py"
GPUS = [Gpu(str(n), "stand-in", 80 << 30) for n in range(4)]


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """The stand-in for vLLM as an executable that runs under this Python."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {VLLM} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def launches(vllm: Path, model: Path, *groups: tuple[int, ...]) -> list[Launch]:
    what = Servings(
        vllm=vllm,
        model=str(model),
        context_tokens=4096,
        rank=20,
        memory=0.45,
        cache=1 << 30,
        targets=("o_proj", "q_proj"),
        streams=48,
        logprobs=24,
        logs=model.parent / "logs",
        sees=True,
    )
    return commands.samplers(groups, GPUS, what)


@contextmanager
def running(launched: list[Launch], sentences: list[str] | None = None) -> Iterator[Servers]:
    say = [].append if sentences is None else sentences.append
    servers = Servers(launched, say, first_delay_s=0.05)
    try:
        yield servers
    finally:
        servers.stop()


def starts(model: Path) -> list[dict[str, Any]]:
    lines = (model / "started.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # one may be half written


FLAGS = {
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--stream-interval": "1",
    "--max-lora-rank": "32",  # the next that it makes room for
    "--max-logprobs": "25",
    "--max-model-len": "4096",
    "--max-num-seqs": "48",
    "--limit-mm-per-prompt": '{"video": 0}',
    "--gpu-memory-utilization": "0.45",
    "--kv-cache-memory-bytes": str(1 << 30),
}


async def test_servers_start_together_see_their_gpus_only_and_end_with_their_processes(
    vllm: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in ("TINKER_CLAW_GATEWAY__API_KEY", "VLLM_API_KEY", *allocator):
        monkeypatch.setenv(name, "a-key-that-is-none-of-its-business")
    launched = launches(vllm, model, (1,), (2, 3))
    with running(launched) as servers:
        await servers.ready(within_s=120)
        assert servers.urls == tuple(launch.url for launch in launched)
        told = starts(model)
        seen = {each["env"]["CUDA_VISIBLE_DEVICES"]: each for each in told}
        assert set(seen) == {"1", "2,3"}
        for each in told:
            environment, command = each["env"], each["command"]
            assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
            assert environment["VLLM_NO_USAGE_STATS"] == "1"
            assert environment["PATH"].startswith(str(vllm.parent))
            assert "a-key-that-is-none-of-its-business" not in str(environment)
            assert not environment.keys() & {*allocator}, "it is for the trainer"
            assert command[:2] == ["serve", str(model)]
            targets = command.index("--lora-target-modules")
            assert command[targets + 1 : targets + 3] == ["o_proj", "q_proj"]
            assert command[targets + 3].startswith("--"), "no others, of experts say"
            assert dict(pairwise(command)).items() >= FLAGS.items()
        parallel = seen["2,3"]["command"]
        assert parallel[parallel.index("--tensor-parallel-size") + 1] == "2"
        assert json.loads((model / "asked.json").read_text())["max_tokens"] == 1, "warmed up"
        pids = [pid for each in told for pid in each["pids"]]
        assert all(map(alive, pids))
        log = model.parent / "logs" / "sampler-1.log"
        assert "loading the weights" in log.read_text()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert not any(map(alive, pids)), "the helpers, too, which have a session of their own"


@pytest.mark.parametrize(
    ("behaves", "why"),
    [
        ("dies", r"status 1 before it was ready(.|\n)*sampler-1\.log(.|\n)*No available memory"),
        ("falls", r"status 3 before it was ready(.|\n)*illegal memory"),
        ("refuses", "answers its first request with HTTP 500"),
    ],
)
async def test_one_that_cannot_answer_is_an_error_with_its_last_words(
    vllm: Path, model: Path, behaves: str, why: str
) -> None:
    (model / "behave").write_text(behaves)
    with (
        running(launches(vllm, model, (0,))) as servers,
        pytest.raises(ConfigError, match=why),
    ):
        await servers.ready(within_s=120)
    assert len(starts(model)) == 1, "it is not tried again"


async def test_one_that_cannot_be_started_is_an_error(model: Path) -> None:
    with (
        running(launches(model / "no" / "vllm", model, (0,))) as servers,
        pytest.raises(ConfigError, match="cannot be started: No such file"),
    ):
        await servers.ready(within_s=120)


@pytest.mark.slow
async def test_one_that_hangs_is_ended_and_started_again(
    vllm: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local_gpu.sample.supervisor.GRACE_S", 0.3)
    sentences: list[str] = []
    with running(launches(vllm, model, (0,), (1,)), sentences) as servers:
        await servers.ready(within_s=120)
        first, _ = sorted(starts(model), key=lambda each: each["env"]["CUDA_VISIBLE_DEVICES"])
        os.kill(first["pids"][0], signal.SIGSTOP)
        servers.restart(servers.urls[0])
        assert await asyncio.to_thread(comes, lambda: len(starts(model)) == 3)
        assert "sampler 1 hangs" in sentences[0]
        assert gone(first["pids"])
        again = starts(model)[2]
        assert again["env"]["CUDA_VISIBLE_DEVICES"] == "0", "the other one goes on"
        assert alive(again["pids"][0])


async def test_waiting_is_bounded_and_can_be_cancelled(model: Path, tmp_path: Path) -> None:
    silent = tmp_path / "vllm"
    silent.write_text("#!/bin/sh\necho compiling\nexec sleep 300\n")
    silent.chmod(0o755)
    log = model.parent / "logs" / "sampler-1.log"
    with running(launches(silent, model, (0,))) as servers:
        assert await asyncio.to_thread(
            comes, lambda: log.exists() and "compiling" in log.read_text()
        )
        with pytest.raises(ConfigError, match=r"not ready after 1 s(.|\n)*compiling"):
            await servers.ready(within_s=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await servers.ready()


async def test_one_that_dies_later_is_started_again_on_its_port(vllm: Path, model: Path) -> None:
    sentences: list[str] = []
    (launch,) = launches(vllm, model, (0,))
    with running([launch], sentences) as servers:
        await servers.ready(within_s=120)
        first = starts(model)[0]["pids"]
        os.kill(first[0], signal.SIGKILL)
        assert await asyncio.to_thread(comes, lambda: len(starts(model)) == 2)
        assert "sampler 1 ended with status 137" in sentences[0]
        second = starts(model)[1]
        assert str(launch.port) in second["command"]
        assert gone(first), "nothing of the first is left, its helper included"
    assert gone(second["pids"])


async def test_one_that_ignores_sigterm_is_killed(
    vllm: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local_gpu.sample.supervisor.GRACE_S", 0.3)
    (model / "behave").write_text("stubborn")
    with running(launches(vllm, model, (0,))) as servers:
        await servers.ready(within_s=120)
        pids = starts(model)[0]["pids"]
    assert not any(map(alive, pids))


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.local_gpu.sample.test_supervisor import launches
from local_gpu.sample.supervisor import Servers

async def main():
    servers = Servers(launches(Path(sys.argv[1]), Path(sys.argv[2]), (0,), (1,)), print)
    await servers.ready(within_s=120)
    print("ready", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def test_servers_die_with_a_process_that_is_killed(vllm: Path, model: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(vllm), str(model)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        pids = [pid for each in starts(model) for pid in each["pids"]]
        assert len(pids) == 4
        assert all(map(alive, pids))
    finally:
        os.killpg(owner.pid, signal.SIGKILL)  # the whole group, as a terminal or a cluster does
        owner.communicate()
    assert gone(pids)


def test_servers_die_with_the_process_around_them(vllm: Path, model: Path) -> None:
    """Somebody kills the process between us and the server."""
    sentences: list[str] = []
    with running(launches(vllm, model, (0,)), sentences) as servers:
        asyncio.run(servers.ready(within_s=120))
        server = starts(model)[0]["pids"][0]
        between = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(between, signal.SIGKILL)
        assert gone([server])
        assert comes(lambda: bool(sentences))
    for each in starts(model):  # helpers of that server are orphans; a real engine watches
        if alive(each["pids"][1]):
            os.kill(each["pids"][1], signal.SIGKILL)
