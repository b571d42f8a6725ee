"""Traces, as a collector gets them: OTLP over HTTP, in protobuf."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.fakes import FakeSampler, Script
from tests.gateways import World, gateway, spell
from tests.stories import SECRET, Told
from tinker_claw.errors import ClawError
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.render.renderer import Renderer
from tinker_claw.sinks import otel
from tinker_claw.sinks.base import read_reports, read_run

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if outer.status == 200:
                    outer.take(self.path, body)
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.raw.append(body)
        if path == "/v1/traces":
            for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(values(one.resource))
                self.spans += [span for scope in one.scope_spans for span in scope.spans]
        else:
            raise AssertionError(path)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def values(held: Any) -> dict[str, Any]:
    """Attributes as Python values."""
    return {item.key: value(item.value) for item in held.attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(one) for one in any_value.array_value.values]
    return getattr(any_value, kind)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    yield collector
    collector.close()


@asynccontextmanager
async def traced(
    path: Path, renderer: Renderer, sampler: FakeSampler | None = None
) -> AsyncIterator[World]:
    """A gateway that traces; at its end everything is sent."""
    traces = otel.Traces("http://127.0.0.1:30000")
    try:
        async with gateway(path, renderer, sampler, traces=traces) as world:
            yield world
    finally:
        traces.close()


async def test_a_request_is_a_span_of_its_callers_trace(
    tmp_path: Path, renderer: Renderer, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-session-id": SECRET}
    async with traced(tmp_path, renderer) as world:
        world.say(f"{SECRET} reply")
        asked = {"max_tokens": 50, "top_p": 0.5, "stop": [f"{SECRET} stop"]}
        first = await world.ask(f"{SECRET} request", headers=headers, **asked)
        await world.events("again")
    span, streamed = (one for one in collector.spans if one.name == "chat demo")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert span.kind == Span.SPAN_KIND_SERVER
    known = values(span)
    usage = first.json()["usage"]
    assert known.pop("gen_ai.response.id") == first.json()["id"]
    assert known.pop("tinker_claw.waited") >= 0
    assert known == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tinker_claw",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "demo@v0",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.conversation.id": "1",
        "server.address": "127.0.0.1",
        "server.port": 30000,
        **{"tinker_claw.turn": 1, "tinker_claw.turn.kind": "main", "tinker_claw.version": 0},
    }
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert streamed.parent_span_id == b""
    assert values(streamed)["gen_ai.response.time_to_first_chunk"] > 0
    assert SECRET.encode() not in b"".join(collector.raw)
    assert collector.resources[0]["service.name"] == "tinker-claw"


async def test_the_services_name_is_that_of_opentelemetrys_variable(
    tmp_path: Path, renderer: Renderer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with traced(tmp_path, renderer) as world:
        await world.ask("hi")
    assert collector.resources[0]["service.name"] == "mine"


async def test_an_error_is_a_span_and_what_is_private_is_none(
    tmp_path: Path,
    renderer: Renderer,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = FakeSampler(Script(spell(renderer, "fine"), fail_after=0))
    async with traced(tmp_path, renderer, broken) as world:
        assert (await world.ask("hi")).status_code >= 500
        world.say("fine")
        private = {"X-Session-Id": "s", "X-Private": "true"}
        assert (await world.ask("hi", headers=private)).status_code == 200
        nonsense = {"traceparent": f"00-{SECRET}-{SECRET}-01", "tracestate": "=,=;" * 40}
        assert (await world.ask("hi there", headers=nonsense)).status_code == 200
        called = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": f"vendor={SECRET}"}
        assert (await world.ask("hi you", headers=called)).status_code == 200
    failed, well, _ = collector.spans
    assert SECRET not in caplog.text, "the SDK repeats what it cannot read"
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert values(failed)["error.type"] == "SamplerError"
    assert values(failed)["gen_ai.usage.output_tokens"] == 0
    assert well.status.code == Status.STATUS_CODE_UNSET
    assert len(well.trace_id) == 16
    assert SECRET.encode() not in b"".join(collector.raw)


async def test_a_collector_that_is_away_costs_no_reply(
    tmp_path: Path, renderer: Renderer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "END_S", 0.2)
    collector.status = 503
    async with traced(tmp_path, renderer) as world:
        assert (await world.ask("hi")).status_code == 200
    assert collector.spans == []


def test_a_step_is_a_span(tmp_path: Path, collector: Collector) -> None:
    told = Told(tmp_path)
    for name in "ab":
        told.step(told.sampled(name, 1)[1])
    told.ledger.close()
    with reading(tmp_path / FILE) as ledger, ledger.moment():
        run, (first, second) = read_run(ledger), read_reports(ledger, 0)
    sink = otel.Opened(run)
    sink.write(first)
    sink.write(second)
    sink.close()
    one, two = collector.spans
    assert one.trace_id != two.trace_id
    known = values(one)
    assert (known["tinker_claw.step"], known["tinker_claw.run.method"]) == (1, "combine")
    assert known["tinker_claw.step.reward_mean"] == 0.0
    assert one.start_time_unix_nano == pytest.approx(first.began_at * 1e9, abs=1000)
    assert SECRET.encode() not in b"".join(collector.raw)
    collector.status = 400
    with pytest.raises(ClawError, match="did not take"):
        otel.Opened(run).write(first)
