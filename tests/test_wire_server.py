"""The wire server's protocol by raw HTTP, its sessions, keys and its process."""

from __future__ import annotations

import gc
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
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from wire_servers import KEY, NAME, ROOT, WireServer, wire_process, wire_server

from local_gpu.serve.__main__ import main

WAIT_S = 60
TOKENS = [(i * 7 + 3) % 64 for i in range(30)]


class Raw:
    """A client that sends what it is told, and nothing else."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=WAIT_S
        )

    def post(self, path: str, /, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, path: str, /, **body: Any) -> int:
        return self.http.post(path, json=body).status_code

    def result(self, request_id: str) -> httpx.Response:
        return self.http.post("retrieve_future", json={"request_id": request_id})

    def session(self) -> str:
        return self.post("create_session", tags=[], user_metadata=None, sdk_version="x")[
            "session_id"
        ]

    def model(self, session: str | None = None, number: int = 0) -> str:
        asked = {"rank": 4, "seed": 1, "train_unembed": False}
        where = {"session_id": session or self.session(), "model_seq_id": number}
        made = self.post("create_model", **where, base_model=NAME, lora_config=asked)
        return self.result(made["request_id"]).json()["model_id"]

    def forward_backward(self, model: str, seq_id: int, weight: float = 1.0) -> str:
        datum = tinker.Datum(
            tinker.ModelInput.from_ints(TOKENS[:-1]),
            {"target_tokens": TOKENS[1:], "weights": [weight] * 29},
        )
        request = tinker.types.ForwardBackwardRequest(
            forward_backward_input=tinker.types.ForwardBackwardInput([datum], "cross_entropy"),
            model_id=model,
            seq_id=seq_id,
        )
        body = forward_backward_request_to_proto(request).SerializeToString()
        answer = self.http.post("forward_backward", content=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def optim_step(self, model: str, seq_id: int) -> str:
        adam = {"learning_rate": 0.01}
        return self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=adam)[
            "request_id"
        ]

    def loss(self, request_id: str) -> float:
        message = pb.ForwardBackwardOutput()
        message.ParseFromString(self.result(request_id).content)
        return message.metrics["loss:sum"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireServer]:
    with wire_server(tmp_path_factory.mktemp("wire"), hole_s=0.5, poll_s=0.3) as running:
        yield running


@pytest.fixture
def raw(server: WireServer) -> Iterator[Raw]:
    client = Raw(server.url)
    yield client
    client.http.close()


def test_a_request_that_is_sent_twice_is_carried_out_once(raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    assert raw.model(session) == model
    first = raw.forward_backward(model, 1)
    assert raw.forward_backward(model, 1) == first
    before = raw.loss(first)
    assert raw.optim_step(model, 2) == raw.optim_step(model, 2)
    once = raw.loss(raw.forward_backward(model, 3))
    assert once < before
    assert raw.loss(raw.forward_backward(model, 1)) == before
    where = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = raw.post("create_sampling_session", **where)
    assert raw.post("create_sampling_session", **where) == sampler
    ask = {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": 7,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 3},
    }
    assert raw.post("asample", **ask) == raw.post("asample", **ask)


def test_requests_are_carried_out_in_the_order_of_their_numbers(raw: Raw) -> None:
    losses = []
    for order in ((1, 2, 3), (3, 2, 1)):
        model = raw.model()
        sends = {
            1: lambda model=model: raw.forward_backward(model, 1),
            2: lambda model=model: raw.optim_step(model, 2),
            3: lambda model=model: raw.forward_backward(model, 3),
        }
        ids = {number: sends[number]() for number in order}
        losses.append([raw.loss(ids[1]), raw.loss(ids[3])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][1] < losses[0][0]


def test_a_number_that_never_comes_fails_those_that_wait_and_voids_the_step(raw: Raw) -> None:
    model = raw.model()
    raw.loss(raw.forward_backward(model, 1))
    late = raw.forward_backward(model, 3)
    assert raw.result(late).json()["type"] == "try_again"
    time.sleep(0.3)
    assert "seq_id 2 did not come within 0.5 s" in raw.result(late).json()["error"]
    assert "too late" in raw.result(raw.forward_backward(model, 2)).json()["error"]
    assert "seq_id 2 did not come" in raw.result(raw.optim_step(model, 4)).json()["error"]
    raw.loss(raw.forward_backward(model, 5))
    assert "metrics" in raw.result(raw.optim_step(model, 6)).json()


def test_a_numbered_request_that_is_refused_uses_up_its_number(raw: Raw) -> None:
    model = raw.model()
    wrong = (
        ("save_weights", {"path": "../out"}, "cannot name a checkpoint"),
        ("save_weights", {"path": "x", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1"]}, "encrypt"),
        ("load_weights", {"path": "/etc/passwd", "optimizer": False}, "tinker://"),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
        ("optim_step", {"adam_params": {"beta2": 1.0}}, "beta2"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "dimuon"),
    )
    for number, (path, body, sentence) in enumerate(wrong, 1):
        answer = raw.post(path, model_id=model, seq_id=number, **body)
        told = raw.result(answer["request_id"]).json()
        assert sentence in told["error"]
        assert told["category"] == "user"
    raw.loss(raw.forward_backward(model, len(wrong) + 1))


def test_models_take_turns(raw: Raw) -> None:
    session = raw.session()
    models = [raw.model(session, number) for number in range(2)]
    ids = [
        (raw.forward_backward(model, 2 * i + 1), raw.optim_step(model, 2 * i + 2))
        for i in range(3)
        for model in models
    ]
    losses = [raw.loss(forward) for forward, _ in ids]
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
    assert losses[0] > losses[2] > losses[4]


def test_what_is_unknown_is_answered_with_a_final_status(raw: Raw) -> None:
    assert raw.status("retrieve_future", request_id="nothing") == 410
    assert raw.status("session_heartbeat", session_id="nobody") == 410
    for path, body in (
        ("get_info", {"model_id": "nobody:train:0"}),
        ("optim_step", {"model_id": "nobody", "seq_id": 1}),
        ("create_model", {"session_id": "nobody", "model_seq_id": 0, "base_model": NAME}),
        ("create_custom_loss", {}),
    ):
        assert raw.status(path, **body) == 404
    assert raw.http.get("samplers/nobody:sample:0").status_code == 404
    assert raw.status("create_session", tags="none") == 422
    assert raw.http.post("forward_backward", content=b"\xff").status_code == 400
    assert raw.status("cancel_future", request_id="nothing") == 204
    assert raw.post("telemetry", events=[]) == {"status": "accepted"}


def test_the_capabilities_name_the_model(server: WireServer, raw: Raw) -> None:
    told = raw.http.get("get_server_capabilities").json()["supported_models"]
    size = server.shop.size.context_tokens
    assert told == [
        {"model_name": NAME, "max_context_length": size, "trainable": True, "sampleable": True}
    ]
    model = raw.model()
    info = raw.post("get_info", model_id=model)
    assert info["lora_rank"] == 4
    assert info["model_data"]["tokenizer_id"].startswith("/")


def test_a_session_that_has_ended_frees_its_memory(server: WireServer, raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    raw.loss(raw.forward_backward(model, 1))
    saved = raw.post("save_weights_for_sampler", model_id=model, seq_id=2)
    sampler = raw.result(saved["request_id"]).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    params = {"max_tokens": 2000}
    ask = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params}
    going = raw.post("asample", **ask, seq_id=0)["request_id"]
    while not server.service.samplers.held_requests:
        time.sleep(0.02)
    run = server.service.sessions.run(model)
    held = weakref.ref(run._optimizer)  # type: ignore[arg-type]
    folder = server.shop.store.root
    assert list(folder.glob("*/sampler_weights/_ephemeral*"))
    del run
    waiting = raw.forward_backward(model, 9)
    assert raw.status(f"sessions/{session}/finish", reason={"type": "success"}) == 204
    assert "session" in raw.result(going).json()["error"]
    assert "session" in raw.result(waiting).json()["error"]
    assert server.service.samplers.held_requests == 0
    assert server.service.samplers.open_count == 0
    assert not list(folder.glob("*/sampler_weights/_ephemeral*"))
    gc.collect()
    assert held() is None
    assert raw.status("session_heartbeat", session_id=session) == 410
    assert raw.status("optim_step", model_id=model, seq_id=3) == 410
    assert raw.status("asample", **ask, seq_id=1) == 410
    assert raw.status(f"sessions/{session}/finish") == 204


def test_a_silent_session_ends_and_old_answers_are_forgotten(tmp_path: Path) -> None:
    settings = {"silence_s": 0.6, "sweep_s": 0.1, "keep_retrieved_s": 0.1, "keep_result_s": 0.4}
    with wire_server(tmp_path, **settings) as server:
        raw = Raw(server.url)
        kept, silent = raw.session(), raw.session()
        model = raw.model(kept)
        request_id = raw.forward_backward(model, 1)
        assert raw.loss(request_id) == raw.loss(request_id)
        for _ in range(8):
            time.sleep(0.1)
            raw.post("session_heartbeat", session_id=kept)
        assert raw.status("session_heartbeat", session_id=silent) == 410
        assert raw.result(request_id).status_code == 410
        assert len(server.service.promises) == 0
        raw.loss(raw.forward_backward(model, 2))
        raw.http.close()


def test_answers_together_stay_within_their_bytes(tmp_path: Path) -> None:
    with wire_server(tmp_path, keep_result_bytes=1000) as server:
        raw = Raw(server.url)
        model = raw.model()
        ids = [raw.forward_backward(model, seq_id) for seq_id in range(1, 20)]
        raw.loss(ids[-1])
        assert raw.result(ids[0]).status_code == 410
        assert len(server.service.promises) < 10
        raw.http.close()


def test_a_wrong_key_is_turned_away(tmp_path: Path) -> None:
    with wire_server(tmp_path, api_key="tml-secret") as server:
        assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
        for key in (
            "",
            "tml-other",
            "tml-secreT",
            "tml-sécret".encode("latin-1").decode("latin-1"),
        ):
            headers = {"X-API-Key": key.encode("latin-1")}
            answer = httpx.post(f"{server.url}/api/v1/create_session", headers=headers, json={})
            assert answer.status_code == 401
            assert "--api-key" in answer.json()["error"]
        with pytest.raises(tinker.AuthenticationError, match="API key is wrong"):
            tinker.ServiceClient(base_url=server.url, api_key="tml-other").create_sampling_client(
                base_model=NAME
            ).result(WAIT_S)
        raw = Raw(server.url, "tml-secret")
        raw.session()
        raw.http.close()


def test_the_process_says_where_it_serves_and_stops_in_order(tmp_path: Path) -> None:
    with wire_process(tmp_path / "wire") as running:
        assert "TINKER_BASE_URL=" in running.line
        assert "TINKER_API_KEY=" in running.line
        service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
        sampler = service.create_sampling_client(base_model="demo").result(WAIT_S)
        words = [5, 6, 7]
        params = tinker.SamplingParams(max_tokens=3)
        drawn = sampler.sample(tinker.ModelInput.from_ints(words), 1, params).result(WAIT_S)
        assert 1 <= len(drawn.sequences[0].tokens) <= 3
        long = tinker.SamplingParams(max_tokens=1500, stop=[])
        going = sampler.sample(tinker.ModelInput.from_ints(words), 1, long)
        time.sleep(0.5)
        assert running.stop(signal.SIGTERM) == 0
        with pytest.raises(tinker.RequestFailedError, match="server ended"):
            going.result(WAIT_S)
        service.close("success").future().cancel()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "secret"], "tml-"),
        (["--model", "/no/such/model"], "no such folder"),
        (["--alpha", "0"], "alpha is 0"),
        (["--device", "toaster"], "toaster"),
    ],
)
def test_a_wrong_flag_is_one_sentence(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert main([*flags, "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("local_gpu.serve: ")
    assert sentence in line


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_help_answers_without_loading_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['--help'];"
        "from local_gpu.serve.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert "--api-key" in done.stdout, done.stderr
