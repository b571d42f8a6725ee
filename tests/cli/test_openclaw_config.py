"""`tinker-claw openclaw-config`: its output, and how OpenClaw reads it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.day.npm import npm
from examples.day.openclaw import readme_block
from tests.support import stories
from tests.support.gateways import gateway
from tests.support.lives import ROOT, life
from tests.support.real_openclaw import LocalOpenClaw
from tinker_claw.backends.model_files import may_see
from tinker_claw.cli import main
from tinker_claw.config.check import API_KEY
from tinker_claw.config.load import load
from tinker_claw.render.renderer import Renderer

KEY = "a-key-that-is-long-enough"
DEMO = ("--model-name", "demo", "--backend", "local")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TINKER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(API_KEY, "none")


def run(*flags: str, **env: str) -> stories.Done:
    return stories.run("openclaw-config", *flags, **{API_KEY: "none"} | env)


def typed(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own."""
    return subprocess.run(
        [sys.executable, "run.py", "openclaw-config", *flags],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def said(out: str) -> tuple[dict[str, Any], list[list[str]]]:
    """The block, and the commands as a shell reads them."""
    block, end = json.JSONDecoder().raw_decode(out)
    return block, [shlex.split(line) for line in out[end:].split("\n") if line]


def model_of(out: str) -> dict[str, Any]:
    """The model in the block."""
    (model,) = said(out)[0]["models"]["providers"]["tinker-claw"]["models"]
    return model


def test_the_block_is_that_of_the_readme_and_the_commands_set_it() -> None:
    done = run("--model-name", "Qwen/Qwen3-8B")
    block, (first, second, last) = said(done.stdout)
    assert block == readme_block()
    assert done.stdout.partition("\n\n")[0] in (ROOT / "README.md").read_text(), "to the letter"
    provider, models = block["models"]["providers"]["tinker-claw"], block["agents"]["defaults"]
    for command, place, value in (
        (first, "models.providers.tinker-claw", provider),
        (second, "agents.defaults.models", models["models"]),
    ):
        assert command[:4] == ["openclaw", "config", "set", place]
        assert json.loads(command[4]) == value
        assert command[5:] == ["--strict-json", "--merge"]
    assert last[3:] == ["agents.defaults.model.primary", "tinker-claw/Qwen/Qwen3-8B"]


@pytest.mark.parametrize(
    ("flags", "reasons", "levels"),
    [
        (("--model-name", "Qwen/Qwen3-8B", "--thinking", "on"), True, None),
        (("--model-name", "openai/gpt-oss-20b"), True, ["low", "medium", "high"]),
        (("--model-name", "meta-llama/Llama-3.2-1B-Instruct"), None, None),
        (DEMO, None, None),
    ],
)
def test_the_block_says_whether_the_model_thinks_and_with_which_levels(
    flags: tuple[str, ...], reasons: bool | None, levels: list[str] | None
) -> None:
    out = run(*flags).stdout
    model = model_of(out)
    assert model.get("reasoning") == reasons
    assert model["compat"].get("supportsReasoningEffort") == reasons
    assert model["compat"].get("supportedReasoningEfforts") == levels
    assert "models" not in said(out)[0]["agents"]["defaults"], "it is not told to ask for none"


def test_a_model_that_sees_is_sent_images() -> None:
    for flags, sees in (
        (("--model-name", "Qwen/Qwen3-VL-8B-Instruct"), True),
        (("--model-name", "Qwen/Qwen3.5-4B:peft:65536"), True),
        (("--model-name", "Qwen/Qwen3-VL-8B-Instruct", "--images", "off"), False),
    ):
        assert model_of(run(*flags).stdout).get("input") == (["text", "image"] if sees else None)


@pytest.mark.parametrize(
    ("flags", "sees"),
    [
        ("demo-screen", True),
        ("demo-screen --images off", False),
        ("demo-screen --sampler-urls http://a:1", False),
        ("demo", False),
        ("Qwen/Qwen3-VL-of-nobody", False),
    ],
)
def test_with_the_local_backend_the_models_own_file_says_whether_it_sees(
    flags: str, sees: bool
) -> None:
    assert may_see(load(["--backend", "local", "--model-name", *flags.split()])) is sees


def test_more_models_see_with_vllm_than_in_the_gateways_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "Qwen3.5-4B"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_5", "image_token_id": 7}')
    settings = load(["--backend", "local", "--model-name", str(model)])
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert not may_see(settings)
    vllm = tmp_path / ".venv-vllm" / "bin" / "vllm"
    vllm.parent.mkdir(parents=True)
    vllm.touch(0o755)
    assert may_see(settings)


def test_the_block_follows_the_settings() -> None:
    flags = (*DEMO, "--port", "31234", "--served-model-name", "mine/claw", "--host", "localhost")
    block, _ = said(run(*flags, "--max-reply-tokens", "500").stdout)
    provider = block["models"]["providers"]["tinker-claw"]
    assert provider["baseUrl"] == "http://localhost:31234/v1"
    assert provider["models"] == [
        {"id": "mine/claw", "name": "claw", "contextWindow": 65536, "maxTokens": 500}
        | {"compat": {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}}
    ]
    assert block["agents"]["defaults"]["model"]["primary"] == "tinker-claw/mine/claw"


@pytest.mark.parametrize(
    ("flags", "window", "source"),
    [
        ((), 65536, "the config.json of demo says so"),
        (("--context-tokens", "33000"), 33000, "--context-tokens"),
        (("--context-tokens", "99999"), 65536, "which is below --context-tokens"),
        (("--model-name", "nobody/nothing"), 40960, "a guess"),
        (("--backend", "tinker"), 65536, "TINKER_API_KEY is not set"),
    ],
)
def test_context_and_where_it_comes_from(
    flags: tuple[str, ...], window: int, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["openclaw-config", *DEMO, *flags]) == 0
    out, notes = capsys.readouterr()
    assert model_of(out)["contextWindow"] == window
    assert source in notes


def test_a_gateway_that_listens_everywhere_is_called_by_a_real_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, KEY)
    for host, shown in (("0.0.0.0", "127.0.0.1"), ("::", "[::1]")):
        assert main.main(["openclaw-config", *DEMO, "--host", host]) == 0
        assert f'"http://{shown}:30000/v1"' in capsys.readouterr().out
    assert main.main(["openclaw-config", *DEMO, "--port", "0"]) == 2
    assert "give the port that it chose" in capsys.readouterr().err


def test_without_a_gateway_it_says_what_it_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert main.main(["openclaw-config", *DEMO, "--data-dir", str(data)]) == 0
    out, notes = capsys.readouterr()
    assert model_of(out)["id"] == "demo"
    assert f"No gateway runs on {data}, so this is a guess" in notes


@pytest.mark.slow
def test_a_running_gateway_is_found_by_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "it's mine"
    flags = ("--served-model-name", "mine/claw", "--context-tokens", "40000")
    more = ("--max-reply-tokens", "500", "--thinking", "off")
    monkeypatch.setenv(API_KEY, KEY)
    with life(data, *flags, *more, env={API_KEY: KEY}) as running:
        assert running.serves()
        monkeypatch.setenv(API_KEY, "none")
        assert main.main(["openclaw-config", "--data-dir", str(data)]) == 0
        out, notes = capsys.readouterr()
        assert "contextWindow 40000: the gateway that runs on" in notes
        assert "guess" not in notes
        (provider,) = said(out)[0]["models"]["providers"].values()
        assert provider["baseUrl"] == running.url
        assert provider["apiKey"] == "${CLAW_GATEWAY_KEY}"
        (model,) = provider["models"]
        facts = [model[name] for name in ("id", "contextWindow", "maxTokens")]
        assert facts == ["mine/claw", 40000, 500]
        assert running.stop() == 0


def test_a_key_stands_in_no_block_and_in_no_command() -> None:
    done = run(*DEMO, **{API_KEY: KEY})
    assert KEY not in done.stdout + done.stderr
    block, (first, _) = said(done.stdout)
    assert block["models"]["providers"]["tinker-claw"]["apiKey"] == "${CLAW_GATEWAY_KEY}"
    assert json.loads(first[4])["apiKey"] == "${CLAW_GATEWAY_KEY}", "quoted for the shell"
    assert "CLAW_GATEWAY_KEY=<the key> as a line of ~/.openclaw/.env" in done.stderr


@pytest.mark.openclaw
@pytest.mark.slow
@pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run")
async def test_openclaw_writes_what_it_is_told_and_sends_the_key_of_its_environment(
    tmp_path: Path, renderer: Renderer
) -> None:
    claw = LocalOpenClaw.create(tmp_path / "user", "http://127.0.0.1:1/v1", "other")
    config = claw.home / "openclaw.json"
    mine = json.loads(config.read_text())
    mine["models"]["providers"] = {"other": mine["models"]["providers"]["tinker-claw"]}
    mine["agents"]["defaults"]["model"]["primary"] = "other/other"
    config.write_text("// mine\n" + json.dumps(mine))
    async with gateway(tmp_path / "data", renderer, api_key=KEY, context_tokens=65536) as world:
        world.say("I am Claw.")
        flags = ("--data-dir", str(tmp_path / "data"), "--write")

        async def told(*more: str) -> subprocess.CompletedProcess[str]:
            own = claw.environment | {API_KEY: "none"}
            return await asyncio.to_thread(lambda: typed(*flags, *more, **own))

        def written() -> dict[str, Any]:
            return json.loads(config.read_text())

        done = await told()
        assert done.returncode == 0, done.stderr
        providers = written()["models"]["providers"]
        assert providers["other"] == mine["models"]["providers"]["other"]
        assert providers["tinker-claw"]["baseUrl"] == world.url
        assert providers["tinker-claw"]["models"][0]["contextWindow"] == 65536
        assert written()["agents"]["defaults"]["model"]["primary"] == "other/other"
        assert KEY not in done.stdout + done.stderr + config.read_text()
        assert "// mine" in (claw.home / "openclaw.json.bak").read_text()

        assert (await told("--primary")).returncode == 0
        assert written()["agents"]["defaults"]["model"]["primary"] == "tinker-claw/demo"
        (claw.home / "state" / ".env").write_text(f"CLAW_GATEWAY_KEY={KEY}\n")
        assert claw.check_config() == {"valid": True, "warnings": []}
        assert await asyncio.to_thread(claw.say, "first", "Who are you?") == "I am Claw."

        config.write_text("{")
        done = await told()
    assert done.returncode == 2
    assert "`openclaw config set models.providers.tinker-claw …` ended with status" in done.stderr
    assert config.read_text() == "{"
