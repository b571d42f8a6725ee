"""Hostile requests to the wire server: they cost little, and get a sentence as the answer.

Rule: whatever comes, the status is final and the next client is served as if nothing had happened.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker.proto import tinker_public_pb2 as pb

from tests.support.backends import VOCABULARY
from tests.support.tinker import KEY, NAME, RAW_TOKENS, Raw, TinkerServer, wire_server

WAIT_S = 180
MANY = 30_000_000
PROMPT = {"chunks": [{"tokens": [1, 2, 3]}]}
TALL = "7" * 5000
"""A number with more digits than Python will parse or print."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with wire_server(tmp_path_factory.mktemp("wire"), most_logprobs=20_000) as running:
        yield running


@pytest.fixture(scope="module")
def held(server: TinkerServer) -> dict[str, str]:
    """A session with a sampler and a model."""
    raw = Raw(server.url)
    session = raw.session()
    where = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = raw.post("create_sampling_session", **where)["sampling_session_id"]
    found = {"session": session, "sampler": sampler, "model": raw.model(session)}
    raw.http.close()
    return found


def sparse(rows: int, width: int) -> dict[str, Any]:
    return {
        "data": [],
        "dtype": "int64",
        "shape": [rows, width],
        "sparse_crow_indices": [0] * 3,
        "sparse_col_indices": [],
    }


SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "K beyond the vocabulary": (
        {"target_prompt_logprobs": sparse(2, MANY)},
        rf"K = {MANY}.*vocabulary is {VOCABULARY}",
    ),
    "a shape beyond 64 bits": ({"target_prompt_logprobs": sparse(2, 1 << 62)}, "K = "),
    "a shape without end": (
        {"target_prompt_logprobs": sparse(2, 1) | {"shape": [2] * 1000}},
        r"\[2, K\]",
    ),
    "a table whose rows overflow": (
        {
            "target_prompt_logprobs": sparse(2, 2)
            | {"sparse_crow_indices": [0, (1 << 63) - 1, -(1 << 63)]}
        },
        "does not fill",
    ),
    "a table with a column outside": (
        {
            "target_prompt_logprobs": sparse(2, 2)
            | {"data": [1], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]}
        },
        "does not fill",
    ),
    "samples x tokens x candidates": (
        {
            "num_samples": 64,
            "topk_sample_logprobs": 4096,
            "sampling_params": {"max_tokens": 1000},
        },
        rf"64 samples of 1000 tokens with {VOCABULARY} candidates.*draws 20000 at once",
    ),
    "candidates beyond the vocabulary": ({"topk_prompt_logprobs": MANY}, "above the vocabulary"),
    "a field that is not known": (
        {"sampling_params": {"max_tokens": 1, "min_p": 0.1}},
        "'min_p', which is not served",
    ),
    "a temperature without end": (
        {"sampling_params": {"max_tokens": 1, "temperature": float("inf")}},
        "temperature is inf",
    ),
    "stops without end": (
        {"sampling_params": {"max_tokens": 1, "stop": list(range(2000))}},
        "at most 1024",
    ),
    "a chunk of half a character": (
        {"prompt": {"chunks": [{"type": "\ud800", "tokens": []}]}},
        "does not read",
    ),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_a_sample_that_asks_too_much_is_refused_by_name(
    raw: Raw, held: dict[str, str], what: str
) -> None:
    asked, sentence = SAMPLES[what]
    body = {"sampling_session_id": held["sampler"], "prompt": PROMPT, **asked}
    body = {"sampling_params": {"max_tokens": 1}, **body}
    answer = raw.http.post(
        "asample", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    told = raw.result(answer.json()["request_id"]).json()
    assert told["category"] == "user"
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(told["error"])


def table(dtype: Any, *shape: int) -> pb.Tensor:
    """A sparse table with nothing listed, and no rows either where there would be millions."""
    kind = pb.DTYPE_INT64 if dtype is np.int64 else pb.DTYPE_FLOAT32
    tensor = pb.Tensor(dtype=kind, shape=shape)
    tensor.sparse_csr.crow_indices = np.zeros(min(abs(shape[0]), 1000) + 1, np.int64).tobytes()
    return tensor


def forward(model: str, seq_id: int, count: int, **arrays: pb.Tensor) -> bytes:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy", model_id=model, seq_id=seq_id)
    for _ in range(count):
        datum = message.data.add()
        tokens = np.array([1, 2, 3], np.int32).tobytes()
        datum.model_input.add().encoded_text.tokens = tokens
        for key, tensor in arrays.items():
            datum.loss_fn_inputs[key].CopyFrom(tensor)
    return message.SerializeToString()


def both(*shape: int) -> dict[str, pb.Tensor]:
    return {"target_tokens": table(np.int64, *shape), "weights": table(np.float32, *shape)}


TABLES: dict[str, tuple[int, dict[str, pb.Tensor], str]] = {
    "K beyond the vocabulary": (1, both(3, MANY), f"has K = {MANY}"),
    "rows that are not there": (1, both(MANY, 2), "this server takes 20000 in one request"),
    "a negative length": (1, both(-MANY, 2), "this server takes 20000 in one request"),
    "many tables": (120, both(3, 60), "this server takes 20000 in one request"),
    "weights of another shape": (
        1,
        {"target_tokens": table(np.int64, 3, 2), "weights": table(np.float32, MANY, 2)},
        f"weights has shape [{MANY}, 2] and target_tokens [3, 2]",
    ),
    "an array that nobody asked for": (
        1,
        both(3, 2) | {"mask": table(np.float32, MANY, 2)},
        "and no mask",
    ),
    "nothing": (0, {}, "no datums"),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_training_table_is_measured_before_it_is_unfolded(raw: Raw, what: str) -> None:
    count, arrays, sentence = TABLES[what]
    body = forward(raw.model(), 1, count, **arrays)
    answer = raw.http.post("forward_backward", content=body)
    told = raw.result(answer.json()["request_id"]).json()
    assert sentence in told["error"]
    assert told["category"] == "user"


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b"\x0a\xff\xff\xff\xff\x0f",  # two bytes that say they are 4 GB
        b"\x0a\x02" * 1000,
        b"\x1b" * 10_000,  # groups within groups
        b"\x12\x02\xff\xfe",  # no UTF-8
    ],
)
def test_a_message_that_lies_about_itself_is_a_sentence(raw: Raw, body: bytes) -> None:
    answer = raw.http.post("forward_backward", content=body)
    assert answer.status_code in (400, 410), answer.text
    assert answer.json()["error"]


def test_an_id_of_five_thousand_digits_is_of_nobody(raw: Raw, held: dict[str, str]) -> None:
    session = held["session"]
    for path, body in (
        ("get_info", {"model_id": f"{session}:train:{TALL}"}),
        ("optim_step", {"model_id": f"{session}:train:{TALL}", "seq_id": 1}),
        ("asample", {"sampling_session_id": f"{session}:sample:{TALL}", "prompt": PROMPT}),
    ):
        answer = raw.http.post(path, json=body)
        assert answer.status_code == 404, answer.text
    assert raw.http.get(f"samplers/{session}:sample:{TALL}").status_code == 404
    assert raw.http.get(f"downloads/{TALL}/c").status_code == 404
    headers = {"content-type": "application/json"}
    for path in ("create_model", "optim_step", "save_weights", "asample", "load_weights"):
        for field in ("seq_id", "model_seq_id", "sampling_session_seq_id"):
            for number in (TALL, "9" * 4000, "-1", "1e400", "NaN"):
                body = held_body(held).removesuffix("}") + f', "{field}": {number}' + "}"
                answer = raw.http.post(path, content=body, headers=headers)
                assert answer.status_code in (200, 400, 422), (path, field, answer.text)


def held_body(held: dict[str, str]) -> str:
    """A body that is valid for any route."""
    return json.dumps(
        {
            "session_id": "nobody",
            "base_model": NAME,
            "model_id": held["model"],
            "sampling_session_id": held["sampler"],
            "prompt": PROMPT,
            "optimizer": False,
            "path": "../x",
        }
    )


LORA = {"rank": 4, "train_unembed": False}


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (LORA | {"alpha": 64}, "field 'alpha', which is not served here.*alpha is 32"),
        (LORA | {"target_modules": ["q_proj"]}, "'target_modules'"),
        (LORA | {"train_mlp": False, "train_attn": False}, "all False"),
        (LORA | {"rank": 1 << 40}, r"1\.\.256"),
        (LORA | {"rank": 1 << 70}, "rank"),
        (LORA | {"seed": 1 << 70}, "seed"),
    ],
)
def test_a_lora_field_that_is_not_carried_out_is_refused(
    raw: Raw, lora: dict[str, Any], sentence: str
) -> None:
    where = {"session_id": raw.session(), "model_seq_id": 0, "base_model": NAME}
    answer = raw.http.post("create_model", json={**where, "lora_config": lora})
    assert answer.status_code == 422
    assert re.search(sentence, answer.json()["error"]), answer.text


def test_a_setting_of_a_step_that_is_not_known_is_refused_in_its_turn(raw: Raw) -> None:
    model = raw.model()
    wrong = (
        ("optim_step", {"adam_params": {"learning_rate": 0.1, "amsgrad": True}}, "'amsgrad'"),
        ("save_weights", {"path": "x\0y"}, "cannot name"),
        ("save_weights", {"path": "x", "user_metadata": {"a": "b" * 70_000}}, "user_metadata"),
        ("load_weights", {"path": "tinker://\ud800/weights/x", "optimizer": True}, "\ud800"),
    )
    for number, (path, body, sentence) in enumerate(wrong, 1):
        answer = raw.http.post(
            path,
            content=json.dumps({"model_id": model, "seq_id": number, **body}),
            headers={"content-type": "application/json"},
        )
        assert sentence in raw.result(answer.json()["request_id"]).json()["error"]
    assert raw.loss(raw.forward_backward(model, len(wrong) + 1))


@pytest.mark.parametrize(
    "body", ["[" * 100_000, '{"a":' * 100_000, "7" * 5000, '"\\ud800"', "\x00", "{}" * 2, "nul"]
)
def test_a_body_that_is_no_request_is_a_sentence(raw: Raw, body: str) -> None:
    headers = {"content-type": "application/json"}
    for path in ("create_session", "create_model", "asample", "weights_info", "retrieve_future"):
        answer = raw.http.post(path, content=body, headers=headers)
        assert answer.status_code in (400, 422), (path, answer.text)
    named = json.dumps({"model_id": "\ud800", "request_id": "\ud800", "tinker_path": "\ud800"})
    for path in ("get_info", "retrieve_future", "weights_info"):
        answer = raw.http.post(path, content=named, headers=headers)
        assert answer.status_code in (400, 404, 410), (path, answer.text)


PAGES = {
    "another page": ({"Origin": "https://evil.example"}, 403),
    "a page of no origin": ({"Origin": "null"}, 403),
    "its own page": ({"Origin": "http://127.0.0.1"}, 403),
    "a name that was made to lead here": ({"Host": "evil.example"}, 403),
    "a form": ({"Content-Type": "text/plain"}, 415),
}


@pytest.mark.parametrize("who", PAGES)
def test_no_web_page_may_use_the_server(raw: Raw, who: str) -> None:
    headers, status = PAGES[who]
    for method, path in (
        ("POST", "create_session"),
        ("POST", "forward_backward"),
        ("GET", "get_server_capabilities"),
        ("GET", "downloads/a/b"),
    ):
        answer = raw.http.request(method, path, headers=headers, content=b"{}")
        assert answer.status_code == status
        assert answer.json()["error"]


def test_with_a_key_the_server_may_be_called_by_any_name(tmp_path: Path) -> None:
    with wire_server(tmp_path, api_key=KEY) as server:
        url = f"{server.url}/api/v1/get_server_capabilities"
        for headers, status in (
            ({"X-API-Key": KEY, "Host": "box.example:8000"}, 200),
            ({"X-API-Key": KEY, "Origin": "https://evil.example"}, 403),
            ({"Host": "box.example:8000"}, 401),
        ):
            assert httpx.get(url, headers=headers).status_code == status


def test_models_in_training_have_so_much_memory_and_no_more(tmp_path: Path) -> None:
    with wire_server(tmp_path) as probe:
        (one,) = {raw_bytes(probe)}
    with wire_server(tmp_path) as server:
        learning: Any = server.service.shared.backend.learning
        learning._memory.limit = int(2.5 * one)
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        first, second = (lora(service) for _ in range(2))
        with pytest.raises(tinker.RequestFailedError, match=r"rank 4 takes .* are taken by 2"):
            lora(service)
        state = second.save_state("s").result(WAIT_S).path
        with pytest.raises(tinker.RequestFailedError, match="taken by 2"):
            service.create_training_client_from_state(state).result(WAIT_S)
        assert first.get_info().lora_rank == 4
        service.close("success").result(WAIT_S)
        again = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        assert again.create_training_client_from_state(state).result(WAIT_S).get_info().lora_rank
        again.close("success").result(WAIT_S)


def raw_bytes(server: TinkerServer) -> int:
    """Bytes of a model of rank 4."""
    raw = Raw(server.url)
    raw.model()
    raw.http.close()
    learning: Any = server.service.shared.backend.learning
    return sum(learning._memory.taken.values())


def lora(service: Any) -> Any:
    made = service.create_lora_training_client(NAME, rank=4, train_unembed=False)
    return made.result(WAIT_S)


def test_sessions_and_what_waits_have_an_end(tmp_path: Path) -> None:
    with wire_server(tmp_path, open_sessions=2, requests=25) as server:
        raw = Raw(server.url)
        session, _ = raw.session(), raw.session()
        assert raw.status("create_session") == 422
        model = raw.model(session)
        answers = [
            raw.status("optim_step", model_id=model, seq_id=number) for number in range(2, 40)
        ]
        assert answers[:20] == [200] * 20
        assert answers[-1] == 429
        raw.http.close()


@pytest.mark.slow
def test_adapters_that_are_sampled_at_once_wait_for_a_place(tmp_path: Path) -> None:
    with wire_server(tmp_path, open_samplers=1) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = lora(service)
        paths = [training.save_weights_for_sampler(name).result(WAIT_S).path for name in "abc"]
        clients = [service.create_sampling_client(model_path=p).result(WAIT_S) for p in paths]
        params = tinker.SamplingParams(max_tokens=60, seed=5)
        prompt = tinker.ModelInput.from_ints(RAW_TOKENS)
        futures = [client.sample(prompt, 1, params) for client in clients * 2]
        most = 0
        while not all(future.future().done() for future in futures):
            most = max(most, server.service.samplers.open_count)
            time.sleep(0.01)
        assert all(future.result(WAIT_S).sequences for future in futures)
        assert most <= 1
        service.close("success").result(WAIT_S)
