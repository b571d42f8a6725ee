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
from contextlib import AbstractContextManager
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

    def model(self, *without: str, **files: str | bytes) -> str:
        """Copy the demo's model into a folder of their own, without some files."""
        folder = self.home / "model"
        folder.mkdir()
        for file in MODEL_DIR.iterdir():
            if file.name not in without:
                shutil.copyfile(file, folder / file.name)
        for name, text in files.items():
            self.file(f"model/{name.replace('__', '.')}", text)
        return str(folder)

    def program(self, name: str, script: str) -> None:
        """Put a program on their PATH."""
        Path(self.file(f"bin/{name}", f"#!/bin/sh\n{script}\n")).chmod(0o755)
        self.environment["PATH"] = f"{self.home / 'bin'}:/usr/bin:/bin"

    def gpu(self, mib: int) -> None:
        self.program("vllm", "exit 1")
        self.program("nvidia-smi", f"echo '0, Some GPU, {mib}, 4, GPU-a'")

    def ledger(self, **bound: str) -> None:
        ledger = Ledger(self.home / "data")
        usual = {"model": "demo", "method": "combine", "backend": "local", "lora_rank": "32"}
        ledger.bind(usual | bound)
        ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")  # else nobody is held up
        ledger.close()


Arrange = Callable[[Newcomer], Sequence[str]]
TROUBLES: dict[str, tuple[Arrange, str]] = {}


def trouble(says: str) -> Callable[[Arrange], Arrange]:
    """Register a trouble: words of the sentence, and a function that causes it and returns the
    start's flags."""

    def enter(arrange: Arrange) -> Arrange:
        TROUBLES[arrange.__name__] = (arrange, says)
        return arrange

    return enter


# The command line and the settings


@trouble(r"Did you mean one of: '--model-name', .* \(tinker-claw --help says more\)")
def flag_that_does_not_exist(at: Newcomer) -> Sequence[str]:
    return ("--modle-name", "demo")


@trouble(r"\(tinker-claw --help says more\)")
def command_that_does_not_exist(at: Newcomer) -> Sequence[str]:
    return ("star",)


@trouble(r"no method 'ppo'; choose combine, binary, opd, sdpo, sdft")
def method_that_does_not_exist(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--method", "ppo")


@trouble(r"--backend 'cuda': it takes 'tinker' or 'local'")
def backend_that_does_not_exist(at: Newcomer) -> Sequence[str]:
    return ("--backend", "cuda")


@trouble(r"shipped files go by their names alone: .*1x80GB,")
def settings_file_that_is_not_there(at: Newcomer) -> Sequence[str]:
    return ("--config", "configs/1x40GB.toml")


@trouble(r"mine\.toml is not valid TOML: .*line 1")
def settings_file_that_is_no_toml(at: Newcomer) -> Sequence[str]:
    return ("--config", at.file("mine.toml", "model_name: demo\n"))


@trouble(r"model_name: a file says it in a table; put it below \[run\]")
def settings_file_with_a_key_outside_its_table(at: Newcomer) -> Sequence[str]:
    return ("--config", at.file("mine.toml", 'model_name = "demo"\n'))


@trouble(r"learning_speed: there is no such setting \(tinker-claw --help-all lists")
def settings_file_with_a_key_that_does_not_exist(at: Newcomer) -> Sequence[str]:
    return ("--config", at.file("mine.toml", "[training]\nlearning_speed = 1\n"))


@trouble(r"TINKER_CLAW_MODEL names no setting \(tinker-claw --help-all")
def variable_that_names_no_setting(at: Newcomer) -> Sequence[str]:
    at.environment["TINKER_CLAW_MODEL"] = "demo"
    return DEMO


@trouble(r"set TINKER_CLAW_GATEWAY__API_KEY, .* or bind to 127\.0\.0\.1")
def address_open_to_all_without_a_key(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--host", "0.0.0.0")


@trouble(r"add --backend local, or leave it out")
def gpus_without_the_local_backend(at: Newcomer) -> Sequence[str]:
    return ("--gpus", "1")


@trouble(r"\(No such file or directory\): fix the path, or leave it out")
def price_table_that_is_not_there(at: Newcomer) -> Sequence[str]:
    return ("--prices", "prices.toml")


@trouble(r"--judge-prompts .* fix the path, or leave it out")
def judge_prompts_that_are_not_there(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--judge-prompts", "prompts.toml")


@trouble(r"--canaries .* fix the path, or leave it out")
def canaries_that_are_not_there(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--canaries", "canaries.toml")


# Tinker


@trouble(r"make one at https://.* and export TINKER_API_KEY=tml-\.\.\. ; or .* --backend local")
def no_key(at: Newcomer) -> Sequence[str]:
    return ()


@trouble(r"TINKER_API_KEY holds no Tinker key: those begin with 'tml-'")
def key_of_somebody_else(at: Newcomer) -> Sequence[str]:
    at.environment["TINKER_API_KEY"] = "sk-proj-123"
    return ()


@trouble(r"refuses the key \(HTTP 401\): check TINKER_API_KEY")
def key_that_is_refused(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    at.service = 401
    return ()


@trouble(r"look at the account's balance and payment method in the Tinker console")
def account_without_credit(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    at.service = 402
    return ()


@trouble(r"Qwen/Qwen3-9B is not among the models that .* trains: Qwen/Qwen3-8B")
def model_that_the_service_does_not_have(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    at.service = 200
    return ("--model-name", "Qwen/Qwen3-9B")


@trouble(r"cannot be reached.*: check the network and --base-url, and that the server runs")
def service_that_cannot_be_reached(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    return ("--base-url", NOWHERE)


@trouble(r"is no Tinker server \(HTTP 404\): check --base-url")
def address_that_is_no_tinker(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    at.service = 404
    return ()


@trouble(r"--base-url \(TINKER_BASE_URL\) is no address; write http://HOST:PORT")
def address_without_http(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    return ("--base-url", "box:8000")


@trouble(r"--base-url \(TINKER_BASE_URL\) is no address; write http://HOST:PORT")
def address_with_an_open_bracket(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY | {"TINKER_BASE_URL": "http://[::1:8000"}
    return ()


@trouble(
    r"\.tinker/credentials\.json cannot be read .* `tinker auth login` makes it anew; or export"
)
def credentials_that_cannot_be_read(at: Newcomer) -> Sequence[str]:
    at.file(".tinker/credentials.json", "{")
    at.service = 401
    return ()


@trouble(r"check the name and the network, give a local folder, or")
def tokenizer_of_a_tinker_model_without_a_network(at: Newcomer) -> Sequence[str]:
    at.environment |= KEY
    at.service = 200
    return ("--model-name", "Qwen/Qwen3-8B")


# The model


@trouble(r"check the name and the network, give a local folder, or use --model-name demo")
def model_that_is_on_no_hub(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", "nobody/no-such-model")


@trouble(r"check the name and the network, give a local folder")
def model_with_a_name_that_no_hub_takes(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", "C:\\models\\qwen")


@trouble(r"--model-name \./qwen: there is no such folder; name a model in the form of the")
def model_folder_that_is_not_there(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", "./qwen")


@trouble(r"put its files there, or name a model that has the same one with --tokenizer")
def model_folder_without_a_tokenizer(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", at.model("tokenizer.json", "tokenizer_config.json"))


@trouble(r"no chat template.*name the tokenizer of a similar one with --tokenizer")
def model_folder_without_a_chat_template(at: Newcomer) -> Sequence[str]:
    told = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    del told["chat_template"]
    text = json.dumps(told)
    return (*LOCAL, "--renderer", "default", "--model-name", at.model(tokenizer_config__json=text))


def with_template(at: Newcomer, template: str) -> Sequence[str]:
    told = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    text = json.dumps(told | {"chat_template": template})
    return (*LOCAL, "--renderer", "default", "--model-name", at.model(tokenizer_config__json=text))


@trouble(r"access to attribute '__class__' .* is unsafe.*name the tokenizer of a similar one")
def template_that_leaves_the_sandbox(at: Newcomer) -> Sequence[str]:
    return with_template(at, "{{ messages.__class__.__mro__[1].__subclasses__() }}")


@trouble(r"Range too big.*name the tokenizer of a similar one")
def template_with_a_long_loop(at: Newcomer) -> Sequence[str]:
    return with_template(at, "{% for i in range(10 ** 9) %}x{% endfor %}")


@trouble(r"chat template does not end; name a similar model's with --tokenizer")
def template_that_loops_for_ever(at: Newcomer) -> Sequence[str]:
    loop = "{% for i in range(99999) %}"
    return with_template(at, loop * 4 + "{% endfor %}" * 4)


@trouble(r"recursion depth exceeded.*name the tokenizer of a similar one")
def template_that_calls_itself(at: Newcomer) -> Sequence[str]:
    return with_template(at, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


@trouble(r"chat template writes 200,000,000 characters; name a similar model's")
def template_that_writes_without_end(at: Newcomer) -> Sequence[str]:
    return with_template(at, "{{ 'x' * 200000000 }}")


@trouble(
    r"No model could be loaded from .*: give a folder with config\.json and model\.safetensors"
)
def model_folder_with_a_pickle(at: Newcomer) -> Sequence[str]:
    weights = b"cos\nsystem\n(S'touch " + str(at.home / "ran").encode() + b"'\ntR."
    return (
        *LOCAL,
        "--model-name",
        at.model("model.safetensors", pytorch_model__bin=weights),
    )


@trouble(r"check --model-name, name the tokenizer of a similar one with --tokenizer, or")
def model_folder_with_a_broken_tokenizer(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", at.model(tokenizer__json="{"))


@trouble(r"give a folder with config\.json and .*config\.json' is not a valid JSON")
def model_folder_with_a_broken_config(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", at.model(config__json="{"))


@trouble(r"give a folder with config\.json and model\.safetensors, or a Hugging Face id")
def model_folder_without_weights(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", at.model("model.safetensors"))


@trouble(r"corrupt or incomplete; download or build them again")
def model_folder_with_weights_cut_short(at: Newcomer) -> Sequence[str]:
    half = (MODEL_DIR / "model.safetensors").read_bytes()[:100_000]
    return (*LOCAL, "--model-name", at.model(model__safetensors=half))


@trouble(r"corrupt or incomplete; download or build them again")
def model_folder_where_git_lfs_left_pointers(at: Newcomer) -> Sequence[str]:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    return (*LOCAL, "--model-name", at.model(model__safetensors=pointer))


@trouble(r"this release of transformers does not know\. Name another one")
def model_of_an_unknown_kind(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", at.model(config__json='{"model_type": "qwen99"}'))


@trouble(r"is a file, no folder; name a model in the form of the Hugging Face hub .* GGUF")
def gguf_file(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", at.file("qwen.gguf"))


@trouble(r"name its base \(Qwen/Qwen3-8B\), or a model that it is merged into")
def adapter_for_a_model(at: Newcomer) -> Sequence[str]:
    base = '{"base_model_name_or_path": "Qwen/Qwen3-8B"}'
    return (*LOCAL, "--model-name", at.model(adapter_config__json=base))


# This machine


@trouble(r"show 0 GPUs here; fix the driver, or leave it out to learn on the CPU")
def gpu_flag_without_a_gpu(at: Newcomer) -> Sequence[str]:
    return ("--config", "1x80GB", "--model-name", at.model())


@trouble(r"has 30 billion parameters by its name, and there is no GPU here .* --backend tinker")
def large_model_without_a_gpu(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--model-name", "nobody/Large3.5-30B-A3B-Instruct")


@trouble(r"--device: .* fix the driver, or leave it out to learn on the CPU")
def cuda_without_a_gpu(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--device", "cuda", "--model-name", at.model())


@trouble(r"Install a torch for this GPU and its driver .*, or give --device cpu")
def torch_that_sees_no_gpu_where_there_is_one(at: Newcomer) -> Sequence[str]:
    at.gpu(81_920)
    return (*LOCAL, "--gpus", "1", "--model-name", at.model())


@trouble(r"Driver/library version mismatch\): fix the driver, or use --device cpu")
def driver_that_is_broken(at: Newcomer) -> Sequence[str]:
    at.program("nvidia-smi", "echo Driver/library version mismatch; exit 18")
    return (*LOCAL, "--model-name", at.model())


@trouble(r"What would fit: .*`tinker-claw doctor` with these flags shows the sum")
def gpu_that_is_too_small(at: Newcomer) -> Sequence[str]:
    at.gpu(24_576)
    return (*LOCAL, "--model-name", at.model(config__json=json.dumps(BIG)))


@trouble(r"needs bitsandbytes: pip install .*\[local,4bit\]")
def four_bits_without_their_package(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--base-quantization", "4bit", "--model-name", at.model())


@trouble(r"--sampler-urls: .* See that a server runs there, or fix the address")
def samplers_that_do_not_run(at: Newcomer) -> Sequence[str]:
    return (*LOCAL, "--sampler-urls", NOWHERE, "--model-name", at.model())


@trouble(r"\(Address already in use\); stop what uses it, or choose another --port")
def port_that_is_taken(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--port", str(at.taken))


@trouble(r"\(Cannot assign requested address\); give an address of this machine")
def address_of_another_machine(at: Newcomer) -> Sequence[str]:
    at.environment["TINKER_CLAW_GATEWAY__API_KEY"] = "k" * 32
    return (*DEMO, "--host", "192.0.2.1")


@trouble(r"cannot listen on no\.such\.host\.invalid:.* give an address of this machine")
def address_that_is_no_address(at: Newcomer) -> Sequence[str]:
    at.environment["TINKER_CLAW_GATEWAY__API_KEY"] = "k" * 32
    return (*DEMO, "--host", "no.such.host.invalid")


@trouble(r"choose another with --data-dir")
def data_directory_that_is_a_file(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--data-dir", at.file("taken"))


@trouble(r"choose another with --data-dir")
def data_directory_that_cannot_be_made(at: Newcomer) -> Sequence[str]:
    return (*DEMO, "--data-dir", "/proc/tinker-claw")


@trouble(r"is in use by another process; stop that one or choose another with")
def second_gateway_on_the_same_folder(at: Newcomer) -> Sequence[str]:
    at.holds = Ledger(at.home / "data")
    return DEMO


@trouble(r"give --model-name Qwen/Qwen3-8B, or another --data-dir")
def ledger_of_another_model(at: Newcomer) -> Sequence[str]:
    at.ledger(model="Qwen/Qwen3-8B")
    return DEMO


@trouble(r"give --method opd, or another --data-dir")
def ledger_of_another_method(at: Newcomer) -> Sequence[str]:
    at.ledger(method="opd")
    return DEMO


@trouble(r"give --lora-rank 8, or another --data-dir")
def ledger_of_another_rank(at: Newcomer) -> Sequence[str]:
    at.ledger(lora_rank="8")
    return DEMO


@trouble(r"release.* another --data-dir")
def ledger_of_another_release(at: Newcomer) -> Sequence[str]:
    at.ledger()
    with sqlite3.connect(at.home / "data" / "ledger.sqlite3") as ledger:
        ledger.execute("PRAGMA user_version = 99")
    ledger.close()
    return DEMO


@trouble(r"move it away or choose another --data-dir")
def ledger_that_is_none(at: Newcomer) -> Sequence[str]:
    at.file("data/ledger.sqlite3", "not a database, but long enough to look like one" * 50)
    return DEMO


# OpenClaw, and commands before there is anything


@trouble(r"there is no openclaw on the PATH: run this where OpenClaw is, or without --write")
def openclaw_that_is_not_there(at: Newcomer) -> Sequence[str]:
    return ("openclaw-config", *DEMO, "--port", "1", "--write")


@trouble(r"ended with status 3; what it said stands above")
def openclaw_with_a_broken_file(at: Newcomer) -> Sequence[str]:
    at.program("openclaw", "exit 3")
    return ("openclaw-config", *DEMO, "--port", "1", "--write")


@trouble(r"OpenClaw needs a window of 32,768 tokens: .* Give --context-tokens 32768 or more")
def openclaw_in_a_small_window(at: Newcomer) -> Sequence[str]:
    return ("openclaw-config", *DEMO, "--port", "1", "--context-tokens", "20480")


@trouble(r"Start one with `tinker-claw`, or give the --data-dir of the one that runs")
def status_before_a_start(at: Newcomer) -> Sequence[str]:
    return ("status", *DEMO, "--port", "1")


@trouble(r"holds no ledger; name the directory with --data-dir, or give the flags")
def look_before_a_start(at: Newcomer) -> Sequence[str]:
    return ("log", "turns", *DEMO)


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


@pytest.mark.parametrize("name", TROUBLES)
def test_failure_is_a_sentence_with_the_next_command(
    name: str,
    newcomer: Newcomer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrange, says = TROUBLES[name]
    flags = list(arrange(newcomer))
    if "--data-dir" not in flags and not name.startswith("command"):
        flags += ["--data-dir", str(newcomer.home / "data")]
    if "--port" not in flags and not name.startswith("command"):
        flags += ["--port", "0"]
    with service(newcomer.service or 200) as url:
        if newcomer.service is not None:
            newcomer.environment["TINKER_BASE_URL"] = url
        for variable, value in newcomer.environment.items():
            monkeypatch.setenv(variable, value)
        status = main(flags)
    told = capsys.readouterr().err.strip()
    *_, last = told.splitlines()
    assert last.startswith("tinker-claw: "), told
    assert not (newcomer.home / "ran").exists(), "nothing of a pickle has run"
    assert re.search(says, told), told
    assert status == 2


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
