"""Events, metrics and figures: structlog, a JSONL file, Prometheus.

Rule: an event is a name with fields, and never carries a user's words.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic_core import to_json

from tinker_claw.files import private
from tinker_claw.served import ServedTurn

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


def configure(
    stream: TextIO | None = None,
    redact: Callable[[str], str] = str,
    terminal: Callable[[Any, str, dict[str, Any]], str] | None = None,
) -> None:
    """Send events to `stream` (standard error): readable on a terminal, JSON lines otherwise.

    Args:
        terminal: makes the text of an event where `stream` is a terminal; None: JSON there, too.
        redact: applied to every text that is printed; foreign errors may quote a key.
    """
    target = stream or sys.stderr
    readable = terminal is not None and target.isatty()
    renderer: Any = terminal if readable else structlog.processors.JSONRenderer()
    redacted = lru_cache(256)(redact)  # names and reasons are nearly always the same
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            lambda _, __, event: {
                name: redacted(value) if isinstance(value, str) else value
                for name, value in event.items()
            },
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(
                fmt="%H:%M:%S" if readable else "iso", utc=not readable
            ),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: _Printer(target),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=target, level=logging.WARNING, force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_without_words)


class _Printer(structlog.PrintLogger):
    """Logger that drops what cannot be printed: a disk full of logs must not cost a user their
    reply."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    debug = info = warning = error = critical = msg


def _without_words(record: logging.LogRecord) -> bool:
    """Remove the message of an error that a library logs: it may quote a user's words."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        what = record.getMessage().strip().partition("\n")[0]  # asyncio goes on with the error
        record.msg, record.args = f"{what}\n{place(error)}", ()
        record.exc_info = record.exc_text = None
    return True


def place(error: BaseException, described: frozenset[int] = frozenset()) -> str:
    """Return types and tracebacks of an error and of its causes, each once.

    Causes can form a cycle: the first error of a group, raised from the group.
    """
    described |= {id(error)}
    inside: tuple[BaseException, ...] = ()
    if isinstance(error, BaseExceptionGroup):
        inside = cast("BaseExceptionGroup[BaseException]", error).exceptions
    before = error.__cause__ or error.__context__
    causes = ((before,) if before else ()) + inside
    traces = [place(cause, described) for cause in causes if id(cause) not in described]
    return "".join([*traces, *traceback.format_tb(error.__traceback__), type(error).__name__, "\n"])


_COUNTERS = (
    ("turns", "Turns captured", "kind"),
    ("tokens", "Tokens", "what"),
    ("verdicts", "Verdicts", "value"),
    ("hints", "Turns with a hint"),
    ("samples", "Samples", "fate"),
    ("spent_usd", "Dollars billed", "purpose"),
    ("steps", "Optimizer steps", "status"),
)
_GAUGES = (
    ("samples_waiting", "Queued samples that steps could take"),
    ("policy_version", "Serving policy version"),
)
_HISTOGRAMS = (
    ("turn_seconds", "Seconds per turn"),
    ("first_token_seconds", "Seconds to the first token"),
    ("slot_wait_seconds", "Seconds that a turn waited for one of --max-concurrent", "of"),
    ("step_seconds", "Seconds per optimizer step"),
)
"""Name, description and labels of the timing figures for Prometheus."""


class Telemetry:
    """Figures of one process."""

    def __init__(self, metrics_file: Path | None) -> None:
        """Collect figures. `metrics_file`: gets a JSON line per step; None writes none."""
        self._file = metrics_file
        self._registry = CollectorRegistry()
        timed = partial(Histogram, buckets=_SECONDS)
        self._figures: dict[str, Any] = {
            name: make(f"tinker_claw_{name}", description, labels, registry=self._registry)
            for make, figures in ((Counter, _COUNTERS), (Gauge, _GAUGES), (timed, _HISTOGRAMS))
            for name, description, *labels in figures
        }

    def serves(self, version: Callable[[], int]) -> None:
        """Set the function that returns the version answering now; pins and rollbacks change it."""
        self._figures["policy_version"].set_function(version)

    def exposition(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        counter = self._figures[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def served(self, turn: ServedTurn, turn_id: int, usd: float | None) -> None:
        """Count a turn, under its id. `usd`: its cost; None: nothing was billed, or the price is
        not known."""
        figures = turn.figures
        self._count("turns", figures["kind"])
        self._count("tokens", "prompt", by=figures["prompt_tokens"])
        self._count("tokens", "cached", by=figures["cached_tokens"])
        self._count("tokens", "sampled", by=figures["completion_tokens"])
        self._figures["turn_seconds"].observe(turn.seconds)
        if turn.first_token_s is not None:
            self._figures["first_token_seconds"].observe(turn.first_token_s)
        who = "episode" if turn.episode else "person"
        self._figures["slot_wait_seconds"].labels(who).observe(turn.waited_s)
        fields = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in {"turn": turn_id, **figures, "usd": usd}.items()
            if value is not None and value is not False
        }
        log.info("turn.captured", **fields)

    def turn_not_kept(self, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a private turn, or one whose session was forgotten meanwhile; nothing else is
        recorded of it."""
        self._count("turns", "private")
        log.info("turn.forgotten", prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)

    def billed(self, purpose: str, usd: float | None) -> None:
        """Count the dollars of a bill; None: there is no price.

        A counter only rises, so a correction of an earlier bill does not lower it; the ledger has
        the exact sums.
        """
        if usd is not None:
            self._count("spent_usd", purpose, by=max(0.0, usd))

    def verdict(
        self,
        *,
        turn: int,
        value: int | None,
        votes: tuple[int | None, ...],
        hints: int,
    ) -> None:
        """Count a verdict."""
        self._count("verdicts", "none" if value is None else str(value))
        if hints:
            self._count("hints")
        log.info("verdict", turn=turn, value=value, votes=list(votes), hints=hints)

    def feedback(self, *, source: str, final: bool, **fields: Any) -> None:
        """Log an explicit rating of a reply, or of how its session ended."""
        log.info("feedback", source=source, final=final, **fields)

    def sample(self, fate: str, *, count: int = 1, **fields: Any) -> None:
        """Count samples, by what became of them: queued, held, refused, expired (unfit for any
        step to come), set_aside (their judging failed) or quarantined (their steps did)."""
        self._count("samples", fate, by=count)
        if fate != "refused":
            log.info(f"sample.{fate}", count=count, **fields)

    def waiting(self, samples: int) -> None:
        """Set the number of queued samples that steps could take."""
        self._figures["samples_waiting"].set(samples)

    def step(self, *, seconds: float, **fields: Any) -> None:
        """Record a committed step: one event, one line in the metrics file."""
        self._count("steps", "committed")
        self._count("samples", "trained", by=fields.get("samples", 0))
        self._figures["step_seconds"].observe(seconds)
        log.info("step", seconds=round(seconds, 3), **fields)
        self._write({"event": "step", "seconds": seconds, **fields})

    def step_void(self, *, step_id: int, error: str, logged: bool = True) -> None:
        """Count a void step. `logged`: False where another event says why, as an outage's does."""
        self._count("steps", "void")
        if logged:
            log.error("step.void", step_id=step_id, error=error)

    def publish(self, *, version: int, step: int, seconds: float) -> None:
        log.info("publish", version=version, step=step, seconds=round(seconds, 3))

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            with open(self._file, "a", opener=private) as file:
                line = to_json({"time": time.time(), **record}, inf_nan_mode="null")
                file.write(line.decode() + "\n")
        except OSError as error:  # the ledger has it, too
            log.warning("metrics.write_failed", file=str(self._file), error=str(error))
