"""The stand-in's protocol by raw HTTP: once, in order, and final when it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tinker.proto import tinker_public_pb2 as pb

from local_gpu.tinker import app
from tests.support.tinker import NAME, Raw, TinkerServer, wire_server
from tests.support.tinker import RAW_TOKENS as TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "POLL_S", 0.2)
        with wire_server(tmp_path_factory.mktemp("wire")) as running:
            yield running


def asks(raw: Raw, session: str) -> dict[str, Any]:
    """A request to sample, without number and settings."""
    where = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = raw.post("create_sampling_session", **where)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    return {"sampling_session_id": sampler, "prompt": prompt}


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
    raw.post(f"sessions/{session}/finish")
    assert "its session, its model or the server ended" in raw.result(orphan).json()["error"]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("save_weights", {"path": "../out"}, "cannot name a checkpoint"),
    ("save_weights", {"path": 7}, "path: "),
    ("save_weights", {"path": "x\ud800"}, "cannot name a checkpoint"),
    ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1"]}, "encrypt"),
    ("save_weights_for_sampler", {"path": "x", "kind": "inflight"}, "inflight"),
    ("load_weights", {"path": "/etc/passwd", "optimizer": False}, "from_state"),
    ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate is -1"),
    ("optim_step", {"adam_params": {"learning_rate": None}}, "learning_rate"),
    ("optim_step", {"adam_params": {"beta2": 1.0}}, "beta2"),
    ("optim_step", {"adam_params": {"learning_rate": 0.1, "amsgrad": True}}, "amsgrad"),
    ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "dimuon"),
    ("optim_step", {}, "optim_params"),
]


def test_a_numbered_request_that_is_refused_uses_up_its_number(raw: Raw) -> None:
    model = raw.model()
    for number, (path, body, sentence) in enumerate(WRONG, 1):
        sent = json.dumps({"model_id": model, "seq_id": number, **body})
        answer = raw.http.post(path, content=sent, headers={"Content-Type": "application/json"})
        told = raw.result(answer.json()["request_id"]).json()
        assert sentence in told["error"]
        assert told["category"] == "user"
    raw.loss(raw.forward_backward(model, len(WRONG) + 1))


def test_another_model_ends_the_one_in_training_and_answers_what_waits_for_it(raw: Raw) -> None:
    first = raw.model()
    raw.loss(raw.forward_backward(first, 1))
    late = raw.forward_backward(first, 3)
    second = raw.model()
    assert raw.status("optim_step", model_id=first, seq_id=2) == 410
    assert raw.status("get_info", model_id=first) == 410
    assert raw.poll(late).json()["type"] == "try_again", "its turn does not come"
    before = raw.loss(raw.forward_backward(second, 1))
    raw.result(raw.optim_step(second, 2))
    assert raw.loss(raw.forward_backward(second, 3)) < before


def test_a_request_without_a_number_is_refused(raw: Raw) -> None:
    numberless = pb.ForwardBackwardRequest(model_id=raw.model()).SerializeToString()
    for content in (b"no protobuf", numberless):
        assert raw.http.post("forward_backward", content=content).status_code == 400
    ask = asks(raw, raw.session()) | {"seq_id": 1, "sampling_params": {}}
    for wrong in ({"seq_id": None}, {"num_samples": 0}, {"num_samples": 1_000_000_000}):
        assert raw.status("asample", **ask | wrong) == 400


def test_what_is_unknown_is_answered_with_a_final_status(raw: Raw) -> None:
    new = {"model_seq_id": 0, "base_model": NAME}
    for path, body, status in (
        ("retrieve_future", {"request_id": "nothing"}, 410),
        ("session_heartbeat", {"session_id": "nobody"}, 410),
        ("get_info", {"model_id": f"{raw.session()}:train:0"}, 410),
        ("optim_step", {"model_id": "nobody", "seq_id": 1}, 410),
        ("optim_step", {"model_id": "nobody", "seq_id": 0}, 422),
        ("create_model", {"session_id": "nobody", **new}, 410),
        ("create_model", {"session_id": raw.session(), **new, "lora_config": {"alpha": 1}}, 422),
        ("create_custom_loss", {}, 404),
    ):
        assert raw.status(path, **body) == status
    assert raw.http.get("samplers/nobody:sample:0").status_code == 410
    assert raw.post("cancel_future", request_id="nothing") is None
    assert raw.post("telemetry", events=[]) == {}


def test_old_answers_are_forgotten(raw: Raw) -> None:
    model = raw.model()
    first, *others = (raw.forward_backward(model, number) for number in range(1, 70))
    assert raw.loss(first) == raw.loss(first)
    assert all(raw.loss(other) for other in others)
    assert raw.result(first).status_code == 410
    assert raw.loss(others[-1])


PAGES = {
    "another page": {"Origin": "https://evil.example"},
    "a page of no origin": {"Origin": "null"},
    "its own page": {"Origin": "http://127.0.0.1"},
    "a name that was made to lead here": {"Host": "evil.example"},
}


@pytest.mark.parametrize("who", PAGES)
def test_no_web_page_may_use_the_server(raw: Raw, who: str) -> None:
    for method, path in (
        ("POST", "create_session"),
        ("POST", "forward_backward"),
        ("GET", "get_server_capabilities"),
        ("GET", "training_runs/a/checkpoints"),
    ):
        answer = raw.http.request(method, path, headers=PAGES[who], content=b"{}")
        assert answer.status_code == 403
        assert answer.json()["error"]
