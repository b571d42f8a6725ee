"""OpenTelemetry over HTTP (OTLP), by its conventions for generative AI on the server side: a span
of every request and of every step. Histograms are for Prometheus, at /metrics.

Rule: no content, and nothing that a client wrote except the model's name. No request waits for an
export: spans wait in a bounded queue for a thread of the SDK, and the rest is dropped. The names
follow the conventions of version 1.42 (`gen_ai.*`), or begin with `tinker_claw`.
"""

from __future__ import annotations

import logging
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import tinker_claw
from tinker_claw.errors import ClawError
from tinker_claw.sinks.base import Report, Run
from tinker_claw.telemetry import Served

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

END_S: Final = 2.0
"""Most seconds for sending the rest when the gateway stops."""
PROVIDER: Final = "tinker_claw"
_FINISH: Final = {"calls": "tool_calls", "stop string": "stop"}
"""Finish reasons by the names that clients use, where ours differ."""


class Traces:
    """Spans of requests; see `telemetry.Traces`."""

    def __init__(self, url: str) -> None:
        """Send spans. `url`: address on which the gateway listens."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # It warns of every failed attempt; that nothing was sent is an error.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
        place = urlsplit(url)
        self._where = {"server.address": place.hostname or "", "server.port": place.port or 80}
        self._sender = TraceContextTextMapPropagator()
        self._tracing = _provider()
        self._tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._tracing.get_tracer("tinker_claw", tinker_claw.__version__)

    def served(self, served: Served) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            f"chat {served.model}",
            # Without tracestate, whose values are whatever a client writes.
            self._sender.extract({k: v for k, v in served.context.items() if k == "traceparent"}),
            SpanKind.SERVER,
            self._where | _attributes(served),
            start_time=_ns(served.began_at),
        )
        if served.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(served.began_at + served.seconds))

    def close(self) -> None:
        """Send the rest, within a time limit."""
        thread = Thread(target=self._tracing.shutdown, daemon=True)
        thread.start()
        thread.join(END_S)


def _attributes(served: Served) -> dict[str, Any]:
    params, finish = served.params, served.finish
    known: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": served.model,
        "error.type": served.error,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stream": served.stream,
        "gen_ai.response.id": served.response_id,
        "gen_ai.response.model": served.answered_by,
        "gen_ai.response.finish_reasons": finish and [_FINISH.get(finish, finish)],
        "gen_ai.response.time_to_first_chunk": served.first_token_s if served.stream else None,
        "gen_ai.usage.input_tokens": served.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": served.cached_tokens,
        "gen_ai.usage.output_tokens": served.completion_tokens,
        "gen_ai.conversation.id": str(served.session),
        "tinker_claw.turn": served.turn,
        "tinker_claw.turn.kind": served.kind,
        "tinker_claw.version": served.version,
        "tinker_claw.waited": served.waited_s,
    }
    return {name: value for name, value in known.items() if value is not None}


def _provider() -> TracerProvider:
    """Return a provider under the name in OpenTelemetry's variables, or under ours."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    ours = {"service.name": "tinker-claw", "service.version": tinker_claw.__version__}
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    return TracerProvider(resource=resource, shutdown_on_exit=False)


def _ns(at: float) -> int:
    return round(at * 1e9)


class Opened:
    """Sink that sends a span per step."""

    def __init__(self, run: Run) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._run, self._exporter = run, OTLPSpanExporter()
        self._tracer = _provider().get_tracer("tinker_claw", tinker_claw.__version__)

    def write(self, report: Report) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult

        named = {
            f"tinker_claw.{name.replace('/', '.')}": value for name, value in report.figures.items()
        }
        span = self._tracer.start_span(
            "step",
            attributes={
                "tinker_claw.run": self._run.id,
                "tinker_claw.step": report.step,
                **{f"tinker_claw.run.{name}": value for name, value in self._run.config.items()},
                **named,
            },
            start_time=_ns(report.began_at),
        )
        span.end(_ns(report.finished_at))
        if not isinstance(span, ReadableSpan):  # a sampler left it out
            return
        if self._exporter.export([span]) is not SpanExportResult.SUCCESS:
            raise ClawError("the collector did not take the step")

    def close(self) -> None:
        self._exporter.shutdown()
