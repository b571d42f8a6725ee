"""Requests in flight, between the event loop and one generation thread.

Rule: a job gets exactly one terminal event, a chunk with a stop reason or an error, so that no
consumer waits for ever. Jobs are entered, ended and fed in the event loop; the thread reads them
and posts what it has drawn, once per forward pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from torch import Tensor

from local_gpu.embedded.batching import Scheduled
from local_gpu.embedded.drawing import Drawn, Recipe, draw
from tinker_claw.errors import SamplerError
from tinker_claw.types import SamplingParams, StopReason, TokenChunk, Tokens

_ABANDONED: Final = Recipe(temperature=0, top_p=1, top_k=None, uniform=0, student_topk=0)
"""For a row whose request was cancelled while it was in the batch."""


@dataclass(slots=True)
class Job:
    """One request."""

    prompt: Tokens
    params: SamplingParams
    random: Random
    """Seeded by the request; None as its seed reads the operating system."""
    events: asyncio.Queue[TokenChunk | SamplerError] = field(
        default_factory=asyncio.Queue[TokenChunk | SamplerError]
    )
    done: bool = False
    """The terminal event is in the queue."""
    generated: int = 0
    prefilled: int = 0
    """Prompt tokens that went through the model; the others came from shared blocks."""

    def put(self, event: TokenChunk | SamplerError) -> None:
        """In the event loop: hand over an event, unless the terminal one has passed."""
        if not self.done:
            self.done = isinstance(event, SamplerError) or event.stop_reason is not None
            self.events.put_nowait(event)

    def recipe(self) -> Recipe:
        p = self.params
        return Recipe(p.temperature, p.top_p, p.top_k, self.random.random(), p.student_topk)

    def chunk(self, drawn: Drawn) -> TokenChunk:
        """In the thread: count a token and wrap it. The scheduler stops by the same rules."""
        self.generated += 1
        stop: StopReason | None = None
        if drawn.token in self.params.stop_tokens:
            stop = StopReason.STOP
        elif self.generated == self.params.max_tokens:
            stop = StopReason.LENGTH
        asked = self.params.student_topk > 0
        return TokenChunk(
            tokens=(drawn.token,),
            logprobs=(drawn.logprob,),
            topk_ids=(drawn.topk_ids,) if asked else (),
            topk_logprobs=(drawn.topk_logprobs,) if asked else (),
            stop_reason=stop,
            cached_tokens=max(0, len(self.prompt) - self.prefilled) if stop else 0,
        )


class Feed:
    """The jobs of one generation thread; implements `batching.Events` for it."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._jobs: dict[str, Job] = {}

    # In the event loop.

    def enter(self, request_id: str, job: Job) -> None:
        self._jobs[request_id] = job

    def leave(self, request_id: str) -> None:
        """The consumer has gone; a request that is not finished is cancelled."""
        if not self._jobs.pop(request_id).done:
            self._cancel(request_id)

    def __len__(self) -> int:
        return len(self._jobs)

    # In the generation thread.

    def on_logits(self, batch: Sequence[Scheduled], logits: Tensor) -> list[int]:
        ids: list[str] = []
        for part in batch:
            request_id: str = part.state.request_id
            job = self._jobs.get(request_id)
            if job is None:
                # Cancelled before the scheduler had heard of it, or while it was in this batch.
                self._cancel(request_id)
            elif job.generated == 0:
                job.prefilled += part.query_length
            if part.has_new_token:
                ids.append(request_id)
        if not ids:
            return []
        jobs = [self._jobs.get(request_id) for request_id in ids]
        recipes = [job.recipe() if job else _ABANDONED for job in jobs]
        drawn = draw(logits[: len(ids)], recipes)
        events: list[tuple[Job, TokenChunk | SamplerError]] = []
        for request_id, job, token in zip(ids, jobs, drawn, strict=True):
            if job is not None and token is not None:
                events.append((job, job.chunk(token)))
            elif job is not None:
                self._cancel(request_id)
                events.append((job, SamplerError("The model's logits are not finite.")))
        self._post(partial(_put_all, events))
        return [token.token if token else 0 for token in drawn]

    def on_failure(self, request_id: str, reason: str) -> None:
        if job := self._jobs.get(request_id):
            self._post(partial(job.put, SamplerError(f"The sampler failed: {reason}")))

    def on_exit(self, reason: str) -> None:
        self._post(partial(self._fail_all, f"The sampler ended: {reason}."))

    def _fail_all(self, sentence: str) -> None:
        for job in self._jobs.values():
            job.put(SamplerError(sentence))

    def _post(self, call: Callable[[], None]) -> None:
        # The thread outlives a loop that was closed without `aclose`; nobody is listening then.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)


def _put_all(events: Sequence[tuple[Job, TokenChunk | SamplerError]]) -> None:
    for job, event in events:
        job.put(event)
