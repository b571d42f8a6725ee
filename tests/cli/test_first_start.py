"""Every failure of a first start that was ever seen: one sentence, with the next step.

Rule: each is brought about really, and the whole program is started. A sentence is on one line, and
says what is wrong and what to type or to change; an error that is none of ours would come through.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from tests.support.lives import ROOT
from tests.support.tinker_dialects import answering
from tinker_claw.cli.main import main
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.shipped import MODEL_DIR

DEMO = ("--model-name", "demo", "--backend", "local")
LOCAL = ("--backend", "local")
KEY = {"TINKER_API_KEY": "tml-first"}
CONFIGURE = ("openclaw-config", *DEMO, "--port", "1", "--write")
NOWHERE = "http://127.0.0.1:1"
BIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8192}
BIG |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
BIG |= {"intermediate_size": 28672, "vocab_size": 151936, "max_position_embeddings": 40960}
BIG |= {"head_dim": 128, "tie_word_embeddings": False}


@dataclass
class Newcomer:
    """A newcomer with an empty folder, and their surroundings."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    service: int | None = None
    """Status with which their service answers; None: it is not asked."""
    taken: int = 0
    """Port that another program has."""
    holds: Ledger | None = None
    """Ledger that another gateway of theirs has open."""

    def file(self, name: str, text: str | bytes = "") -> str:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def program(self, name: str, script: str) -> Newcomer:
        """Put a program on their PATH."""
        Path(self.file(f"bin/{name}", f"#!/bin/sh\n{script}\n")).chmod(0o755)
        self.environment["PATH"] = f"{self.home / 'bin'}:/usr/bin:/bin"
        return self

    def gpu(self, mib: int) -> Newcomer:
        self.program("vllm", "exit 1")
        return self.program("nvidia-smi", f"echo '0, Some GPU, {mib}, 4, GPU-a'")

    def knows(self, *flags: str, **variables: str) -> tuple[str, ...]:
        self.environment |= variables
        return flags

    def answered(self, status: int) -> tuple[str, ...]:
        """Have a key, and a service that answers with this status."""
        self.service = status
        return self.knows(**KEY)

    def another_method(self) -> tuple[str, ...]:
        """Have a data directory of another method."""
        ledger = Ledger(self.home / "data")
        ledger.bind({"model": "demo", "method": "opd", "backend": "local", "lora_rank": "32"})
        ledger.versions.add_first(state_ref="s0", sampler_ref="p0")  # else nobody is held up
        ledger.close()
        return DEMO

    def another_release(self) -> tuple[str, ...]:
        self.another_method()
        with closing(sqlite3.connect(self.home / "data" / "ledger.sqlite3")) as ledger:
            ledger.execute("PRAGMA user_version = 99")
        return DEMO

    def another_gateway(self) -> tuple[str, ...]:
        self.holds = Ledger(self.home / "data")
        return DEMO


PLAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "method that does not exist": (
        (*DEMO, "--method", "ppo"),
        r"no method 'ppo'; choose combine, binary, opd, sdpo, sdft",
    ),
    "backend that does not exist": (
        ("--backend", "cuda"),
        "--backend.: Input should be 'tinker' or 'local'",
    ),
    "settings file that is not there": (
        ("--config", "configs/1x40GB.toml"),
        r"shipped files go by their names alone: .*1x80GB,",
    ),
    "address open to all without a key": (
        (*DEMO, "--host", "0.0.0.0"),
        r"set TINKER_CLAW_GATEWAY__API_KEY, .* or bind to 127\.0\.0\.1",
    ),
    "GPUs without the local backend": (("--gpus", "1"), "add --backend local, or leave it out"),
    "price table that is not there": (("--prices", "prices.toml"), "fix the path, or leave it out"),
    "judge prompts that are not there": (
        (*DEMO, "--judge-prompts", "prompts.toml"),
        "--judge-prompts .* fix the path, or leave it out",
    ),
    "budget that cannot be kept": (
        ("--budget-usd", "1", "--base-url", NOWHERE),
        r"the price per million tokens is not known .*--prices FILE",
    ),
    "tracker that is not installed": (
        (*DEMO, "--report-to", "wandb"),
        "a package that is not installed: pip install",
    ),
    "thinking of a model that cannot": (
        (*DEMO, "--thinking", "on"),
        "demo cannot think; leave it out",
    ),
    "no key": ((), r"make one at https://.* and export TINKER_API_KEY=tml-\.\.\. ; or .* local"),
    "model that is on no hub": (
        (*LOCAL, "--model-name", "nobody/no-such-model"),
        "check the name and the network, give a local folder, or use --model-name demo",
    ),
    "model folder that is not there": (
        (*LOCAL, "--model-name", "./qwen"),
        "there is no such folder; name a model in the form of the",
    ),
    "large model without a GPU": (
        (*LOCAL, "--model-name", "nobody/Large3.5-30B-A3B-Instruct"),
        "has 30 billion parameters by its name, and there is no GPU here .* --backend tinker",
    ),
    "data directory that cannot be made": (
        (*DEMO, "--data-dir", "/proc/tinker-claw"),
        "choose another with --data-dir",
    ),
    "OpenClaw that is not there": (
        CONFIGURE,
        "there is no openclaw on the PATH: run this where OpenClaw is, or without --write",
    ),
    "OpenClaw in a small window": (
        ("openclaw-config", *DEMO, "--port", "1", "--context-tokens", "20480"),
        r"OpenClaw needs a window of 32,768 tokens: .* Give --context-tokens 32768 or more",
    ),
}
"""Flags of the start and words of the sentence, of troubles that need nothing around them."""


def template(at: Newcomer, text: str) -> tuple[str, ...]:
    """Flags of a model whose chat template is this text."""
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text()) | {"chat_template": text}
    return model(at, tokenizer_config__json=json.dumps(config))


def model(at: Newcomer, *without: str, **files: str | bytes) -> tuple[str, ...]:
    """Flags of the demo's model in a folder of their own, without some files, or with others."""
    folder = at.home / "model"
    folder.mkdir()
    for file in MODEL_DIR.iterdir():
        if file.name not in without:
            shutil.copyfile(file, folder / file.name)
    for name, text in files.items():
        at.file(f"model/{name.replace('__', '.')}", text)
    return (*LOCAL, "--renderer", "default", "--model-name", str(folder))


def pickled(at: Newcomer) -> tuple[str, ...]:
    weights = b"cos\nsystem\n(S'touch " + str(at.home / "ran").encode() + b"'\ntR."
    return model(at, "model.safetensors", pytorch_model__bin=weights)


ADAPTER = '{"base_model_name_or_path": "Qwen/Qwen3-8B"}'
Arrange = Callable[[Newcomer], Sequence[str]]
TROUBLES: dict[str, tuple[Arrange, str]] = {
    "without a tokenizer": (
        lambda at: model(at, "tokenizer.json", "tokenizer_config.json"),
        "put its files there, or name a model that has the same one with --tokenizer",
    ),
    "template that leaves the sandbox": (
        lambda at: template(at, "{{ messages.__class__.__mro__[1].__subclasses__() }}"),
        "access to attribute '__class__' .* is unsafe.*name the tokenizer of a similar one",
    ),
    "template with a long loop": (
        lambda at: template(at, "{% for i in range(10 ** 9) %}x{% endfor %}"),
        "Range too big.*name the tokenizer of a similar one",
    ),
    "template that calls itself": (
        lambda at: template(at, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "recursion depth exceeded.*name the tokenizer of a similar one",
    ),
    "pickle": (
        pickled,
        r"No model could be loaded from .*: give a folder with config\.json and model\.safetensors",
    ),
    "broken tokenizer": (
        lambda at: model(at, tokenizer__json="{"),
        "check --model-name, name the tokenizer of a similar one with --tokenizer, or",
    ),
    "broken config": (
        lambda at: model(at, config__json="{"),
        r"give a folder with config\.json and .*config\.json' is not a valid JSON",
    ),
    "no config": (lambda at: model(at, "config.json"), r"has no config\.json; name a model in the"),
    "weights cut short": (
        lambda at: model(
            at, model__safetensors=(MODEL_DIR / "model.safetensors").read_bytes()[:99_999]
        ),
        "corrupt or incomplete; download or build them again",
    ),
    "unknown kind": (
        lambda at: model(at, config__json='{"model_type": "qwen99"}'),
        r"this release of transformers does not know\. Name another one",
    ),
    "GGUF file": (
        lambda at: (*LOCAL, "--model-name", at.file("qwen.gguf")),
        "is a file, no folder; name a model in the form of the Hugging Face hub .* GGUF",
    ),
    "adapter": (
        lambda at: model(at, adapter_config__json=ADAPTER),
        r"name its base \(Qwen/Qwen3-8B\), or a model that it is merged into",
    ),
    "four bits without their package": (
        lambda at: (*model(at), "--base-quantization", "4bit"),
        r"needs bitsandbytes: pip install .*\[local,4bit\]",
    ),
    "samplers that do not run": (
        lambda at: (*model(at), "--sampler-urls", NOWHERE),
        "--sampler-urls: .* See that a server runs there, or fix the address",
    ),
    "GPUs of a settings file without any": (
        lambda at: ("--config", "1x80GB", *model(at)),
        "show 0 GPUs here; fix the driver, or leave it out to learn on the CPU",
    ),
    "cuda without a GPU": (
        lambda at: (*model(at), "--device", "cuda"),
        "--device: .* fix the driver, or leave it out to learn on the CPU",
    ),
    "GPU that torch does not see": (
        lambda at: (*model(at.gpu(81_920)), "--gpus", "1"),
        "Install a torch for this GPU and its driver .*, or give --device cpu",
    ),
    "GPU that is too small": (
        lambda at: model(at.gpu(24_576), config__json=json.dumps(BIG)),
        "What would fit: .*`tinker-claw doctor` with these flags shows the sum",
    ),
    "driver that is broken": (
        lambda at: model(at.program("nvidia-smi", "echo Driver/library version mismatch; exit 18")),
        r"Driver/library version mismatch\): fix the driver, or use --device cpu",
    ),
    "account without credit": (
        lambda at: at.answered(402),
        "look at the account's balance and payment method in the Tinker console",
    ),
    "address that is no Tinker": (
        lambda at: at.answered(404),
        r"is no Tinker server \(HTTP 404\): check --base-url",
    ),
    "service that is down": (lambda at: at.answered(503), "it answers HTTP 503"),
    "model that the service does not have": (
        lambda at: (*at.answered(200), "--model-name", "Qwen/Qwen3-9B"),
        r"Qwen/Qwen3-9B is not among the models that .* trains: Qwen/Qwen3-8B",
    ),
    "tokenizer of a model of the service, without a network": (
        lambda at: (*at.answered(200), "--model-name", "Qwen/Qwen3-8B"),
        "check the name and the network, give a local folder, or",
    ),
    "service that cannot be reached": (
        lambda at: (*at.knows(**KEY), "--base-url", NOWHERE),
        "cannot be reached.*: check the network and --base-url, and that the server runs",
    ),
    "address with an open bracket": (
        lambda at: at.knows(**KEY, TINKER_BASE_URL="http://[::1:8000"),
        r"--base-url \(TINKER_BASE_URL\) is no address; write http://HOST:PORT",
    ),
    "credentials that cannot be read": (
        lambda at: at.file(".tinker/credentials.json", "{") and (),
        r"\.tinker/credentials\.json cannot be read .* `tinker auth login` makes it anew; or",
    ),
    "port that is taken": (
        lambda at: (*DEMO, "--port", str(at.taken)),
        r"\(Address already in use\); stop what uses it, or choose another --port",
    ),
    "address of another machine": (
        lambda at: at.knows(*DEMO, "--host", "192.0.2.1", TINKER_CLAW_GATEWAY__API_KEY="k" * 32),
        r"\(Cannot assign requested address\); give an address of this machine",
    ),
    "data directory of another gateway": (
        Newcomer.another_gateway,
        "is in use by another process; stop that one or choose another with",
    ),
    "ledger of another method": (
        Newcomer.another_method,
        "give --method opd, or another --data-dir",
    ),
    "ledger of another release": (
        Newcomer.another_release,
        "release.* another --data-dir",
    ),
    "ledger that is none": (
        lambda at: at.file("data/ledger.sqlite3", "not a database, but long enough" * 90) and DEMO,
        "move it away or choose another --data-dir",
    ),
    "OpenClaw with a broken file": (
        lambda at: at.program("openclaw", "exit 3") and CONFIGURE,
        "ended with status 3; what it said stands above",
    ),
}
"""What causes a trouble, and returns the start's flags; and words of the sentence."""


def service(status: int) -> AbstractContextManager[str]:
    """Run a service that answers with this status, and has one model."""
    known = {"model_name": "Qwen/Qwen3-8B", "max_context_length": 40960}
    return answering(lambda _: (status, {"supported_models": [known]}))


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Newcomer]:
    for name in [*os.environ]:
        if name.startswith(("TINKER_", "OPENCLAW_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = Newcomer(tmp_path, taken=taken.getsockname()[1])
        at.environment["PATH"] = "/usr/bin:/bin"  # no nvidia-smi, no vllm
        yield at
    if at.holds is not None:
        at.holds.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    structlog.reset_defaults()  # a start has let it write to a stream that is closed by now
    logging.getLogger().handlers.clear()


@pytest.mark.parametrize("name", [*PLAIN, *TROUBLES])
def test_failure_is_a_sentence_with_the_next_command(
    name: str,
    newcomer: Newcomer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name in PLAIN:
        flags, says = PLAIN[name]
    else:
        arrange, says = TROUBLES[name]
        flags = tuple(arrange(newcomer))
    if "--data-dir" not in flags:
        flags += ("--data-dir", str(newcomer.home / "data"))
    if "--port" not in flags:
        flags += ("--port", "0")
    with service(newcomer.service or 200) as url:
        if newcomer.service is not None:
            newcomer.environment["TINKER_BASE_URL"] = url
        for variable, value in newcomer.environment.items():
            monkeypatch.setenv(variable, value)
        status = main(flags)
    printed = capsys.readouterr().err.strip()
    *_, last = printed.splitlines()
    assert last.startswith("tinker-claw: "), printed
    assert not (newcomer.home / "ran").exists(), "nothing of a pickle has run"
    assert re.search(says, printed), printed
    assert status == 2
    if name in ("no key", "budget that cannot be kept", "tracker that is not installed"):
        assert not (newcomer.home / "data").exists(), "nothing was made"


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("sys.version_info = (3, 9, 2)", r"this is Python 3\.9, and 3\.11 .*: make PYTHON=/path"),
        ("sys.modules['click'] = None", "click is not installed for .*: `make` .* `source .venv/b"),
        ("sys.modules['uvicorn'] = None; sys.argv[1:] = ['doctor']", "uvicorn is not installed"),
    ],
    ids=["a Python that is too old", "an environment that was not entered", "half of one"],
)
def test_what_run_py_itself_says(before: str, says: str) -> None:
    run = f"runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')"
    code = f"import runpy, sys; {before}; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1
    assert re.fullmatch(f"tinker-claw: .*{says}.*\n", done.stderr), done.stderr
