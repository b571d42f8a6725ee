"""The stand-in's process: its command line, where it listens, and its end."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
import tinker

from local_gpu.tinker import __main__ as command
from local_gpu.tinker.checkpoints import locked
from tests.support.tinker import KEY, wire_process

WAIT_S = 180


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


def test_the_listening_address_is_loopback_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    addresses: list[str] = []

    async def serve(flags: object, listening: socket.socket) -> None:
        address, port = listening.getsockname()
        addresses.append(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)  # 0.0.0.0 would accept it

    monkeypatch.setattr(command, "_serve", serve)
    assert command.main(["--root", str(tmp_path), "--port", "0"]) == 0
    assert addresses == ["127.0.0.1"]


def test_what_is_in_use_or_missing_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    free = ("--root", str(tmp_path), "--port", "0")
    with locked(tmp_path), socket.create_server(("127.0.0.1", 0)) as listening:
        for flags, why in (
            (free, f"{tmp_path} is in use by another server"),
            (("--port", str(listening.getsockname()[1])), "choose another --port"),
        ):
            assert command.main(flags) == 2
            assert why in capsys.readouterr().err
    assert command.main((*free, "--model", "/no/such/model")) == 2
    assert "/no/such/model" in capsys.readouterr().err.splitlines()[-1]
