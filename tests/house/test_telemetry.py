"""Events are names with fields: JSON where nobody watches, readable on a terminal."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging

from tests.support.ledger import outcome
from tinker_claw.telemetry import Telemetry, configure
from tinker_claw.types import Completion, SamplingParams, StopReason

TURN = outcome(
    session_id=1,
    prompt=tuple(range(100)),
    completion=Completion(
        tokens=(1,) * 7,
        logprobs=(-1.0,) * 7,
        topk_ids=(),
        topk_logprobs=(),
        stop_reason=StopReason.STOP,
        params=SamplingParams(max_tokens=9),
        cached_tokens=64,
    ),
    kind_reason="no sign of a side call",
    policy_version=3,
    user="anna",
    lost=True,
    seconds=0.25,
    first_token_s=0.1,
)


def everything(telemetry: Telemetry) -> None:
    telemetry.serves(lambda: 1)
    telemetry.served(TURN, 2, None)
    telemetry.verdict(turn=2, value=-1, votes=(-1, None, -1), hints=1)
    telemetry.sample("queued", turn=2)
    telemetry.sample("refused", turn=9, reason="neutral verdict")
    telemetry.waiting(5)
    telemetry.step(seconds=1.5, step_id=1, step=1, version=1, samples=16, grad_norm=0.5)
    telemetry.publish(version=1, step=1, seconds=0.1)


def test_events_are_json_lines_where_nobody_watches() -> None:
    stream = io.StringIO()
    configure(stream)
    everything(Telemetry(None))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "turn.captured",
        "verdict",
        "sample.queued",
        "step",
        "publish",
    ]
    assert (events[0]["user"], events[0]["cached_tokens"]) == ("anna", 64)
    assert events[0]["first_token_s"] == 0.1
    assert events[1]["votes"] == [-1, None, -1]
    assert all({"timestamp", "level"} <= event.keys() for event in events)


def test_figures_for_prometheus() -> None:
    configure(io.StringIO())
    telemetry = Telemetry(None)
    everything(telemetry)
    text = telemetry.exposition().decode()
    for line in (
        'tinker_claw_turns_total{kind="main"} 1.0',
        'tinker_claw_tokens_total{what="sampled"} 7.0',
        'tinker_claw_verdicts_total{value="-1"} 1.0',
        "tinker_claw_hints_total 1.0",
        'tinker_claw_samples_total{fate="trained"} 16.0',
        'tinker_claw_samples_total{fate="refused"} 1.0',
        'tinker_claw_steps_total{status="committed"} 1.0',
        "tinker_claw_samples_waiting 5.0",
        "tinker_claw_policy_version 1.0",
    ):
        assert line in text


def test_what_libraries_log_of_an_error_has_its_place_and_not_its_words() -> None:
    stream = io.StringIO()
    configure(stream)

    words = "my secret plan"

    def fail() -> None:
        try:
            raise KeyError(words)
        except KeyError as error:
            raise ExceptionGroup(words, [ValueError(words)]) from error

    for name in ("uvicorn.error", "asyncio", "some.library"):
        try:
            fail()
        except ExceptionGroup:
            logging.getLogger(name).exception("it broke")
    told = stream.getvalue()
    assert told.count("it broke") == 3
    assert words not in told
    assert all(kind in told for kind in ("KeyError", "ValueError", "ExceptionGroup", "in fail"))


async def test_error_of_a_task_that_nobody_awaits_has_its_place_and_not_its_words() -> None:
    stream = io.StringIO()
    configure(stream)

    async def fail(words: str) -> None:
        raise KeyError(words)

    task = asyncio.create_task(fail("my secret plan"))
    await asyncio.wait([task])
    del task
    gc.collect()
    told = stream.getvalue()
    assert all(part in told for part in ("never retrieved", "KeyError", "in fail")), told
    assert "my secret plan" not in told, "asyncio's own text has the error, too"


def test_errors_that_come_from_one_another_are_told_once() -> None:
    """The first error of a group, raised from the group, is its own cause's part."""
    stream = io.StringIO()
    configure(stream)
    first = ValueError("my secret plan")
    try:
        raise first from ExceptionGroup("several", [first, KeyError("another")])
    except ValueError:
        logging.getLogger("some.library").exception("it broke")
    told = stream.getvalue()
    assert told.count("it broke") == 1
    assert "my secret plan" not in told
    assert all(kind in told for kind in ("KeyError", "ValueError", "ExceptionGroup"))
