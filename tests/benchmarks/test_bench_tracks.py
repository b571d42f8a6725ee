"""The tracks' benchmark, tiny: both sides play whole episodes, and every figure is there."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks import tracks
from benchmarks.tracks import ALONE, Size, through
from benchmarks.tracks_stub import Stub, stub_app
from tinker_claw.ledger.ledger import Ledger

TINY = Size(
    concurrency=4,
    rounds=4,
    latency_s=0.3,
    tokens=44,
    persons=1,
    slots=(8,),
    batch=4,
    step_s=0.1,
    repeat=1,
)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores")
async def test_one_run_plays_every_episode_with_and_without_a_gateway(tmp_path: Path) -> None:
    figures = await tracks.measure(tmp_path, TINY, str)
    alone, side = figures.sides
    assert (alone.what, side.what) == (ALONE, through(8))
    for one in figures.sides:
        assert one.episodes == 16
        assert one.again == 0
        assert one.per_minute > 0
    assert set(alone.cpu_ms) == {"environments", "stub"}
    assert set(side.cpu_ms) == {"environments", "stub", "gateway"}
    assert side.asked == len(side.waits_ms) >= 1
    assert side.health_ms is not None
    assert side.learner_waits is not None
    ledger = Ledger(tmp_path / "0-8" / "run")
    told = "SELECT COUNT(*) FROM sessions WHERE episode"
    assert ledger._db.rows(told)[0][0] == 16
    ledger.close()
    text = io.StringIO()
    tracks.show(Console(file=text, width=140), figures)
    for shown in ("no gateway", "turns of persons waited", "Goal: 0.95", "learner waits"):
        assert shown in text.getvalue()
    assert json.loads(json.dumps(asdict(figures)))["sides"][1]["episodes"] == 16


async def test_the_stub_says_the_same_in_text_and_in_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(tracks.MODEL / "tokenizer.json"))
    transport = httpx.ASGITransport(stub_app(Stub(tokenizer, 0.0, 48)))
    async with httpx.AsyncClient(transport=transport, base_url="http://stub") as http:
        body = {"model": "stub", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"expression": "3 + 4"}
        prompt = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        events = (await http.post("/v1/completions", json={"prompt": ids})).text
    said = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in said if event["choices"]]
    assert 48 <= len(choices) <= 50, "one event a token"
    text = tokenizer.decode([choice["token_ids"][0] for choice in choices])
    assert '{"name": "calculator", "arguments": {"expression": "3 + 4"}}' in text
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "stop"]
