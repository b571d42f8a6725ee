"""`tinker-claw doctor`: checks of the gateway's surroundings."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest

from tests.support.clients import HELLO, ask
from tests.support.gateways import World, chat, gateway
from tests.support.lives import LOCAL, ROOT, product
from tinker_claw.cli import main
from tinker_claw.cli.common import span
from tinker_claw.cli.openclaw import TRIED
from tinker_claw.config.check import API_KEY
from tinker_claw.config.settings import sections
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
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    yield ledger
    ledger.close()


def port_of(url: str) -> str:
    return url.removesuffix("/v1").rpartition(":")[2]


def doctor(data: Path, *flags: str) -> int:
    """Run the doctor in this process, which is faster."""
    return main.main(["doctor", *DEMO, "--data-dir", str(data), *flags])


def line_of(told: str, name: str) -> str:
    (line,) = (line for line in told.splitlines() if line[5:].split(" ")[0] == name)
    return line


# What is around the gateway


async def talk(world: World) -> None:
    """Send two turns of a conversation and one of another; the first of them is answered."""
    for opening in (SECRET, "Hello"):
        answer = (await world.ask(opening)).json()["choices"][0]["message"]["content"]
    await world.ask(SECRET, answer, "thanks")


async def test_beside_a_running_gateway(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    async with gateway(data, renderer) as world:
        await talk(world)
        flags = ("--port", port_of(world.url), "--host", "127.0.0.1")
        assert await asyncio.to_thread(doctor, data, *flags) == 0
        told = capsys.readouterr().out
        port = line_of(told, "port")
        assert port.startswith(f"ok   port       the gateway of {data} answers. It is ok. ")
        assert "Replies come from policy v0; 0 of 16 samples" in port
        assert "FAIL" not in told
        assert SECRET not in told
        assert (await world.ask(*chat("and on"))).status_code == 200, "it goes on undisturbed"

        assert await asyncio.to_thread(doctor, tmp_path / "other", *flags) == 1
        assert line_of(capsys.readouterr().out, "port").startswith("FAIL port       cannot listen")
        assert not (tmp_path / "other").exists()


async def test_beside_a_gateway_with_keys(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    data, key = tmp_path / "data", "a-key-that-is-long-enough"
    async with gateway(data, renderer, users={"anna": key}) as world:
        assert await asyncio.to_thread(doctor, data, "--port", port_of(world.url)) == 0
        assert "Replies come from policy v0" in line_of(capsys.readouterr().out, "port")


def test_a_data_directory_says_what_its_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    ledger = Ledger(data)
    ledger.bind({"model": "demo", "method": "opd", "backend": "local", "lora_rank": "8"})
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    ledger.close()
    main.main(["doctor", "--data-dir", str(data), "--port", "0"])
    told = capsys.readouterr().out
    assert line_of(told, "settings").endswith("opd on demo, backend local")
    assert line_of(told, "data").startswith("ok")
    main.main(["doctor", "--data-dir", str(data), "--port", "0", "--method", "binary", *DEMO])
    assert line_of(capsys.readouterr().out, "settings").endswith("binary on demo, backend local")


def test_a_port_that_somebody_else_has_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dated(0) as url:
        assert doctor(tmp_path / "data", "--port", port_of(url)) == 1
    port = line_of(capsys.readouterr().out, "port")
    assert port.startswith("FAIL port       cannot listen on 127.0.0.1:")
    assert "or choose another --port" in port


def out_of_bounds() -> Iterator[tuple[str, int]]:
    """Yield each integer setting with values that are too small and too large for it."""
    for model in sections().values():
        for name, field in model.model_fields.items():
            if int in (field.annotation, *get_args(field.annotation)):
                flag = f"--{name.replace('_', '-')}"
                yield from ((flag, value) for value in (2**63, -(2**63) - 1))
                for bound in field.metadata:
                    if (least := getattr(bound, "ge", None)) is not None:
                        yield flag, least - 1
                    if (most := getattr(bound, "le", None)) is not None:
                        yield flag, most + 1


@pytest.mark.parametrize(("flag", "value"), [*out_of_bounds()])
def test_a_number_that_the_start_refuses_is_named(
    flag: str, value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "data")
    assert main.main([*DEMO, "--data-dir", data, "--port", "0", flag, str(value)]) == 2
    start = capsys.readouterr().err
    assert start.startswith(f"tinker-claw: {flag} '{value}': it takes ")
    assert doctor(tmp_path / "data", "--port", "0", flag, str(value)) == 1
    named = line_of(capsys.readouterr().out, "settings")
    assert named.split(None, 2)[2] == start.removeprefix("tinker-claw: ").strip()


def test_flags_that_are_wrong_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--prot", "3"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "--prot" in printed.err
    assert main.main(["doctor", "--backend", "x"]) == 1
    assert line_of(capsys.readouterr().out, "settings").count("--backend 'x'") == 1
    assert main.main(["doctor", "--help"]) == 0
    told = capsys.readouterr()
    assert "--batch-size" not in told.out
    assert main.main(["doctor", "--help-all"]) == 0
    told = capsys.readouterr()
    assert "--batch-size" in told.out


def test_what_the_chat_format_can_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path / "data", "--port", "0") == 0
    told = line_of(capsys.readouterr().out, "tokenizer")
    assert told.startswith("ok   tokenizer  chat format qwen3, ")
    mine = ("--model-name", str(MODEL_DIR), "--renderer", "default")
    assert main.main(["doctor", *LOCAL, "--data-dir", str(tmp_path), *mine, "--port", "0"]) == 0
    told = line_of(capsys.readouterr().out, "tokenizer")
    assert told.startswith("ok   tokenizer  chat format default, ")
    assert told.endswith("was tried out, and text is streamed")


def test_a_chat_template_that_was_tried_out_in_vain_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "mute"
    shutil.copytree(MODEL_DIR, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    flags = ("--data-dir", str(tmp_path), "--model-name", str(model), "--port", "0")
    assert main.main(["doctor", *LOCAL, *flags]) == 0
    told = line_of(capsys.readouterr().out, "tokenizer")
    assert told.startswith("warn tokenizer  chat format default, ")
    assert "hints have no place: its chat template does not show once" in told


# The clock


class dated:
    """A server on loopback whose clock is `ahead` of ours by this many seconds."""

    def __init__(self, ahead: float) -> None:
        class Clock(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_error(405)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer = json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def do_GET(self) -> None:
                self.send_error(404)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(time.time() + ahead)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Clock)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_span() -> None:
    assert [span(s) for s in (12, -90, 240, 3 * 3600, -2 * 86400)] == [
        "12 s",
        "90 s",
        "4 min",
        "3 h",
        "2 d",
    ]


def test_a_window_that_is_too_small_for_openclaw_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--port", "30999", "--context-tokens", "20480")
    assert doctor(tmp_path / "data", *flags) == 0, "other agents may be content with it"
    told = line_of(capsys.readouterr().out, "model")
    assert told.startswith("warn")
    assert "OpenClaw needs a window of 32,768 tokens" in told


def test_an_openclaw_that_was_not_tried_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "openclaw" / "openclaw.mjs"
    there.parent.mkdir()
    there.write_text("")
    there.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "openclaw").symlink_to(there)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for release, state in ((TRIED[0], "ok"), ("2031.1.1", "warn")):
        (there.parent / "package.json").write_text(json.dumps({"version": release}))
        assert doctor(tmp_path / "data", "--port", "30998") == 0
        told = line_of(capsys.readouterr().out, "openclaw")
        assert told.startswith(state)
        assert TRIED[0] in told
        assert TRIED[1] in told
        assert f"{release} is installed" in told
    (there.parent / "package.json").unlink()
    assert doctor(tmp_path / "data", "--port", "30998") == 0
    assert "does not say its release" in line_of(capsys.readouterr().out, "openclaw")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor(tmp_path / "data", "--port", "30998") == 0
    told = line_of(capsys.readouterr().out, "openclaw")
    assert told.startswith("-")
    assert "OpenClaw is not on PATH" in told


@pytest.mark.slow
def test_beside_the_real_product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    with product(data) as running:
        ask(running, "first", [HELLO])
        flags = ("--port", port_of(running.url), "--data-dir", str(data))
        done = subprocess.run(  # as a user types it
            [sys.executable, "run.py", "doctor", *DEMO, *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the gateway of {data} answers" in line_of(done.stdout, "port")
        assert running.health()["status"] == "ok"
        assert running.stop() == 0
    assert doctor(data, *flags) == 0
    told = capsys.readouterr().out
    assert line_of(told, "port").endswith("is free")
    Ledger(data).close()  # free and whole, as if nobody had looked


def test_a_reader_who_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} run.py doctor --model-name demo --backend local --data-dir"
    done = subprocess.run(
        f"{command} {tmp_path / 'run'} | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.startswith("ok   settings")
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_plug_ins_are_named_and_one_that_keeps_it_from_starting_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "plugins" / "installed")
    assert doctor(tmp_path / "data", "--report-to", "csv", "--method", "nudge") == 0
    told = line_of(capsys.readouterr().out, "plugins")
    assert told.startswith("ok   plugins")
    assert "method nudge" in told
    assert "sink csv" in told
    package = tmp_path / "claw_broken-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: claw-broken\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[tinker_claw.formats]\nbroken = claw_broken:No\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor(tmp_path / "data") == 1
    told = line_of(capsys.readouterr().out, "plugins")
    assert told.startswith("FAIL plugins    the plug-in broken (claw_broken:No) cannot be loaded")


@pytest.mark.parametrize(
    ("flags", "check", "why"),
    [
        (("--budget-usd", "5"), "price", "--budget-usd is for a service that bills"),
        (("--prices", "none.toml"), "price", "--prices none.toml cannot be read"),
        (("--canaries", "none.toml"), "method", "--canaries none.toml cannot be read"),
        (("--images", "train"), "method", "demo cannot be trained on images here"),
        (("--lora-rank", "8"), "data", "holds a run with lora_rank '32', not '8'"),
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
    for more, status in (((), 0), (flags, 1)):
        assert doctor(tmp_path / "data", "--port", "0", *more) == status
    told = line_of(capsys.readouterr().out.split("settings")[-1], check)
    assert told.startswith("FAIL")
    assert why in told
