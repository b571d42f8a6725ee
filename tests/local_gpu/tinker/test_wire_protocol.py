"""The wire server's protocol by raw HTTP: once, in order, and final when it refuses."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.tinker import NAME, Raw, TinkerServer, wire_server
from tests.support.tinker import RAW_TOKENS as TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with wire_server(tmp_path_factory.mktemp("wire"), poll_s=0.2) as running:
        yield running


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


def test_a_request_waits_for_those_before_it_until_its_session_ends(raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    raw.loss(raw.forward_backward(model, 1))
    late = raw.forward_backward(model, 3)
    assert raw.poll(late).json()["type"] == "try_again"
    raw.loss(raw.forward_backward(model, 2))
    raw.loss(late)
    orphan = raw.forward_backward(model, 9)
    assert raw.http.post(f"sessions/{session}/finish").status_code == 204
    assert "its session or the server ended" in raw.result(orphan).json()["error"]


def test_the_first_part_of_a_batch_may_come_last_over_a_slow_line(raw: Raw) -> None:
    """The SDK sends it so."""
    model = raw.model()
    parts = []
    for number in (2, 3, 4, 1):
        parts.append(raw.forward_backward(model, number))
        time.sleep(0.3)
    assert all(raw.loss(part) for part in parts)
    assert "metrics" in raw.result(raw.optim_step(model, 5)).json()


def test_a_numbered_request_that_is_refused_uses_up_its_number(raw: Raw) -> None:
    model = raw.model()
    wrong = (
        ("save_weights", {"path": "../out"}, "cannot name a checkpoint"),
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
    session = raw.session()
    for path, body, status in (
        ("get_info", {"model_id": "nobody:train:0"}, 410),
        ("get_info", {"model_id": f"{session}:train:0"}, 404),
        ("optim_step", {"model_id": "nobody", "seq_id": 1}, 410),
        ("create_model", {"session_id": "nobody", "model_seq_id": 0, "base_model": NAME}, 410),
        ("create_custom_loss", {}, 404),
    ):
        assert raw.status(path, **body) == status
    assert raw.http.get("samplers/nobody:sample:0").status_code == 410
    assert raw.http.get(f"samplers/{session}:sample:0").status_code == 404
    assert raw.status("create_session", tags="none") == 422
    assert raw.http.post("forward_backward", content=b"\xff").status_code == 400
    assert raw.status("cancel_future", request_id="nothing") == 204
    assert raw.post("telemetry", events=[]) == {"status": "accepted"}


def test_the_capabilities_name_the_model(server: TinkerServer, raw: Raw) -> None:
    told = raw.http.get("get_server_capabilities").json()["supported_models"]
    size = server.service.shared.backend.serving.context_tokens
    assert told == [
        {"model_name": NAME, "max_context_length": size, "trainable": True, "sampleable": True}
    ]
    model = raw.model()
    info = raw.post("get_info", model_id=model)
    assert info["lora_rank"] == 4
    assert info["model_data"]["tokenizer_id"].startswith("/")


def test_bodies_that_are_too_long_or_of_unknown_length_are_turned_away_unread(
    tmp_path: Path,
) -> None:
    with wire_server(tmp_path, body_bytes=1000) as server:
        raw = Raw(server.url)
        for body in (b" " * 1001, iter([b"{}"])):
            answer = raw.http.post("create_session", content=body)
            assert answer.status_code == 413
            assert "may have 1000 bytes" in answer.json()["error"]
        assert raw.session(), "the next client is served"
        raw.http.close()


def test_the_413_reaches_a_client_that_writes_first(tmp_path: Path) -> None:
    """It writes all of its body before it reads a byte."""
    size = 8_000_000
    with wire_server(tmp_path, body_bytes=1000) as server:
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port or 80), timeout=60) as client:
            head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: {place.netloc}\r\n"
            client.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
            client.sendall(b" " * size)
            with client.makefile("rb") as answer:
                assert b" 413 " in answer.readline()
