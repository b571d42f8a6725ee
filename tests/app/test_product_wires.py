"""The running product, with the demo's model, and the official clients of three wires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.support.ledger import read
from tests.support.lives import product

pytestmark = pytest.mark.slow

HELLO = "Hello"
MORE = "No, shorter, please."


def test_clients_of_three_wires_talk_to_one_product(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data) as running:
        url = running.url
        with (
            OpenAI(base_url=url, api_key="none", max_retries=0) as openai,
            Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as anthropic,
        ):
            said: Any = [{"role": "user", "content": HELLO}]
            chat = openai.chat.completions.create(model="demo", messages=said)
            reply: Any = chat.choices[0].message
            further: Any = {"role": "user", "content": MORE}
            openai.chat.completions.create(model="demo", messages=[*said, reply, further])

            common: Any = {"model": "demo", "max_tokens": 60, "system": "By Messages."}
            with anthropic.messages.stream(**common, messages=said) as stream:
                message = stream.get_final_message()
            back: Any = {"role": "assistant", "content": message.content}
            again = anthropic.messages.create(**common, messages=[*said, back, further])
            assert again.usage.output_tokens > 0

            asked: Any = {"role": "user", "content": HELLO}
            told = "By Responses."
            first = openai.responses.create(model="demo", input=[asked], instructions=told)
            with openai.responses.stream(
                model="demo",
                input=[asked, *first.output, further],
                instructions=told,
            ) as events:
                last = events.get_final_response()
            assert last.status in ("completed", "incomplete")
        assert running.stop() == 0

    states = "SELECT role, text FROM next_states ORDER BY turn_id"
    assert read(data, states) == [("user", MORE)] * 3
    assert read(data, "SELECT COUNT(*), COUNT(DISTINCT session_id) FROM turns") == [(6, 3)]
    ids = [id for (id,) in read(data, "SELECT response_id FROM turns ORDER BY id")]
    assert [id.partition("_")[0].partition("-")[0] for id in ids] == [
        "chatcmpl",
        "chatcmpl",
        "msg",
        "msg",
        "resp",
        "resp",
    ]
