"""`tinker-claw doctor`: checks of the gateway's surroundings."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateways import gateway
from tests.support.lives import LOCAL
from tinker_claw.cli import main
from tinker_claw.config.check import API_KEY
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR

DEMO = ("--model-name", "demo", *LOCAL)
SECRET = "my landlady's cat"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TINKER_", "OPENCLAW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv(API_KEY, "none")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "data")
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    yield ledger
    ledger.close()


def doctor(data: Path, *flags: str) -> int:
    """Run the doctor in this process, which is faster."""
    return main.main(["doctor", *DEMO, "--data-dir", str(data), *flags])


def line_of(report: str, name: str) -> str:
    (line,) = (line for line in report.splitlines() if line[5:].split(" ")[0] == name)
    return line


async def test_beside_a_running_gateway(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    async with gateway(data, renderer) as world:
        await world.ask(SECRET)
        flags = ("--port", world.url.removesuffix("/v1").rpartition(":")[2])
        assert await asyncio.to_thread(doctor, data, *flags) == 0
        report = capsys.readouterr().out
        port = line_of(report, "port")
        assert port.startswith(f"ok   port       the gateway of {data} answers. It is ok. ")
        assert "Replies come from policy v0; 0 of 16 samples" in port
        assert "FAIL" not in report
        assert SECRET not in report
        assert (await world.ask("and on")).status_code == 200, "it goes on undisturbed"

        assert await asyncio.to_thread(doctor, tmp_path / "other", *flags) == 1
        assert line_of(capsys.readouterr().out, "port").startswith("FAIL port       cannot listen")
        assert not (tmp_path / "other").exists()


def test_a_chat_template_without_a_place_for_hints_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tmp_path / "data", "--port", "0") == 0
    usual = line_of(capsys.readouterr().out, "tokenizer")
    assert usual.startswith("ok   tokenizer  chat format qwen3, ")
    model = tmp_path / "mute"
    shutil.copytree(MODEL_DIR, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert doctor(tmp_path / "data", "--model-name", str(model), "--port", "0") == 0
    mute = line_of(capsys.readouterr().out, "tokenizer")
    assert mute.startswith("warn tokenizer  chat format default, ")
    assert "hints have no place" in mute


def test_a_window_that_is_too_small_for_openclaw_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tmp_path / "data", "--port", "0", "--context-tokens", "20480") == 0
    assert line_of(capsys.readouterr().out, "model").startswith("warn")


@pytest.mark.parametrize(
    ("flags", "check", "why"),
    [
        (("--budget-usd", "5"), "price", "--budget-usd is for a service that bills"),
        (("--prices", "none.toml"), "price", "--prices none.toml cannot be read"),
        (("--canaries", "none.toml"), "method", "--canaries none.toml cannot be read"),
        (("--images", "train"), "method", "demo cannot be trained on images here"),
        (("--lora-rank", "8"), "data", "holds a run with lora_rank '32', not '8'"),
        (("--batch-size", "0"), "settings", "(--batch-size): Input should be "),
        (("--port", str(2**63)), "settings", "Input should be less than or equal to 65535"),
    ],
)
def test_what_a_start_refuses_the_doctor_refuses(
    tmp_path: Path,
    ledger: Ledger,
    flags: tuple[str, ...],
    check: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger.bind({"model": "demo", "method": "combine", "backend": "local", "lora_rank": "32"})
    assert doctor(tmp_path / "data", "--port", "0") == 0
    capsys.readouterr()
    assert doctor(tmp_path / "data", "--port", "0", *flags) == 1
    line = line_of(capsys.readouterr().out, check)
    assert line.startswith("FAIL")
    assert why in line
