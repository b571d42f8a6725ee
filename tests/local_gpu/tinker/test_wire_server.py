"""The wire server's life: sessions, keys, memory, and its process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from local_gpu.tinker.__main__ import _config, main, parser
from local_gpu.tinker.sessions import Sessions
from tests.support.tinker import KEY, NAME, ROOT, Raw, TinkerServer, wire_process, wire_server
from tests.support.tinker import RAW_TOKENS as TOKENS
from tinker_claw.errors import RequestError

WAIT_S = 180


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with wire_server(tmp_path_factory.mktemp("wire")) as running:
        yield running


def test_a_session_that_has_ended_frees_its_memory(server: TinkerServer, raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    raw.loss(raw.forward_backward(model, 1))
    where = {"model_id": model, "sampling_session_seq_id": 0}
    saved = raw.post("save_weights_for_sampler", **where, seq_id=2)
    sampler = raw.result(saved["request_id"]).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    params = {"max_tokens": 2000}
    ask = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params}
    going = raw.post("asample", **ask, seq_id=0)["request_id"]
    while not server.held_requests:
        time.sleep(0.02)
    learning: Any = server.service.shared.backend.learning
    held = weakref.ref(learning._models[model])
    folder = server.store.root
    assert list(folder.glob("*/sampler_weights/_ephemeral*"))
    waiting = raw.forward_backward(model, 9)
    assert raw.status(f"sessions/{session}/finish", reason={"type": "success"}) == 204
    assert "session" in raw.result(going).json()["error"]
    assert "session" in raw.result(waiting).json()["error"]
    assert server.held_requests == 0
    assert server.service.samplers.open_count == 0
    assert not list(folder.glob("*/sampler_weights/_ephemeral*"))
    deadline = time.monotonic() + WAIT_S
    while held() is not None:  # whoever was told last still holds it for an instant
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert raw.status("session_heartbeat", session_id=session) == 410
    assert raw.status("optim_step", model_id=model, seq_id=3) == 410
    assert raw.status("asample", **ask, seq_id=1) == 410
    assert raw.status(f"sessions/{session}/finish") == 204


def test_a_silent_session_ends_and_old_answers_are_forgotten(tmp_path: Path) -> None:
    settings = {"silence_s": 3.0, "sweep_s": 0.1, "keep_retrieved_s": 1.0, "keep_result_s": 9.0}
    with wire_server(tmp_path, **settings) as server:
        raw = Raw(server.url)
        kept, silent = raw.session(), raw.session()
        model = raw.model(kept)
        request_id = raw.forward_backward(model, 1)
        assert raw.loss(request_id) == raw.loss(request_id)
        deadline = time.monotonic() + WAIT_S
        while silent in server.service.sessions or len(server.service.promises):
            raw.post("session_heartbeat", session_id=kept)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert raw.status("session_heartbeat", session_id=silent) == 410
        assert raw.result(request_id).status_code == 410
        raw.loss(raw.forward_backward(model, 2))
        raw.http.close()


def test_a_run_may_make_any_number_of_samplers_and_the_newest_are_known() -> None:
    sessions = Sessions(60, 1)
    session = sessions.create()
    made = [session.add_sampler(number, None) for number in range(10_001)]
    assert sessions.sampler(made[-1].id) is made[-1]
    with pytest.raises(RequestError, match="no sampler"):
        sessions.sampler(made[0].id)


def test_a_wrong_key_is_turned_away(tmp_path: Path) -> None:
    with wire_server(tmp_path, api_key="tml-secret-0123456789") as server:
        assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
        for key in ("", "tml-other", "tml-secret-012345678X", "tml-sécret-0123456789"):
            headers = {"X-API-Key": key.encode("latin-1")}
            answer = httpx.post(f"{server.url}/api/v1/create_session", headers=headers, json={})
            assert answer.status_code == 401
            assert "--api-key" in answer.json()["error"]
        with pytest.raises(tinker.AuthenticationError, match="API key is wrong"):
            tinker.ServiceClient(base_url=server.url, api_key="tml-other").create_sampling_client(
                base_model=NAME
            ).result(WAIT_S)
        raw = Raw(server.url, "tml-secret-0123456789")
        raw.session()
        raw.http.close()


@pytest.mark.slow
def test_the_process_says_where_it_serves_and_stops_in_order(tmp_path: Path) -> None:
    with wire_process(tmp_path / "wire") as running:
        assert "TINKER_BASE_URL=" in running.line
        assert "TINKER_API_KEY=" in running.line
        service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
        sampler = service.create_sampling_client(base_model="demo").result(WAIT_S)
        training = service.create_lora_training_client("demo", train_unembed=False).result(WAIT_S)
        words = training.get_tokenizer().encode("hello")
        params = tinker.SamplingParams(max_tokens=3)
        drawn = sampler.sample(tinker.ModelInput.from_ints(words), 1, params).result(WAIT_S)
        assert 1 <= len(drawn.sequences[0].tokens) <= 3
        long = tinker.SamplingParams(max_tokens=1500, stop=[])
        going = sampler.sample(tinker.ModelInput.from_ints(words), 1, long)
        sampler.sample(tinker.ModelInput.from_ints(words), 1, params).result(WAIT_S)  # and after it
        time.sleep(0.5)
        assert running.stop(signal.SIGTERM) == 0
        with pytest.raises(tinker.RequestFailedError, match="server ended"):
            going.result(WAIT_S)
        service.close("success").future().cancel()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with wire_process(tmp_path / "wire") as running:
        raw = Raw(running.url)
        model = raw.model(base="demo")
        # One sequence is not cut, so the server waits for it: 30 s on two quiet cores.
        raw.forward_backward(model, 1, [*range(100)] * 300)
        time.sleep(0.2)
        raw.http.close()
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert running.process.poll() is None
        assert running.stop(signal.SIGINT) == 130


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "secret"], "tml-"),
        (["--api-key", "tml-secret"], "16 characters or more"),
        (["--model", "/no/such/model"], "no such folder"),
        (["--context-tokens", "0"], "context_tokens is 0"),
        (["--device", "toaster"], "toaster"),
        (["--shard", "on"], "--train-gpus 0 1"),
        (["--sampler-urls", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_a_wrong_flag_is_one_sentence(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert main([*flags, "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("local_gpu.tinker: ")
    assert sentence in line


def test_flags_of_the_halves_are_settings_of_the_local_backend(tmp_path: Path) -> None:
    words = "--train-gpus 1 2 --shard on --sampler-urls http://a http://b"
    flags = vars(parser().parse_args([*words.split(), "--root", str(tmp_path)]))
    del flags["host"], flags["port"]
    local = _config(flags).local
    assert (local.name, local.policy, local.root) == ("demo", False, tmp_path)
    assert (local.ranks, local.train_gpus, local.shard, local.rank) == (2, (1, 2), "on", 32)
    assert local.sampler_urls == ("http://a", "http://b")


def test_keys_come_from_a_file_or_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def keys(*words: str) -> tuple[str | None, str | None]:
        flags = vars(parser().parse_args([*words, "--root", str(tmp_path)]))
        del flags["host"], flags["port"]
        config = _config(flags)
        return config.api_key, config.local.sampler_api_key

    (tmp_path / "key").write_text("tml-from-a-file-1\n")
    file = f"@{tmp_path / 'key'}"
    urls = ("--sampler-urls", "http://a")
    assert keys() == (None, None)
    assert keys("--api-key", file, *urls) == ("tml-from-a-file-1", None)
    monkeypatch.setenv("TINKER_SERVER_API_KEY", "tml-of-the-environment")
    monkeypatch.setenv("TINKER_SERVER_SAMPLER_API_KEY", "another")
    assert keys(*urls) == ("tml-of-the-environment", "another")
    assert keys("--api-key", file, *urls) == ("tml-from-a-file-1", "another")
    assert "tml-of-the-environment" not in parser().format_help()
    assert main(["--api-key", "@/nowhere/key", "--port", "0"]) == 2
    assert "--api-key @/nowhere/key: the file cannot be read" in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_help_answers_without_loading_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['--help'];"
        "from local_gpu.tinker.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert "--api-key" in done.stdout, done.stderr
