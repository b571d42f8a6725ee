"""One generation, from the sampler to the ledger.

Rule: what was sampled is written exactly as it came, and before anyone is told that it is
complete. A generation that fails before its first token is tried again here, because agents
rewrite the user's message when they try again themselves; while the service is away, for minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinker_claw.errors import OutageError, SamplerError
from tinker_claw.gateway.admit import Job
from tinker_claw.gateway.book import Book, Stream, exact_digest
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.patience import Patience
from tinker_claw.ledger import NewTurn
from tinker_claw.metering import Account, charged
from tinker_claw.render import Delta
from tinker_claw.sessions import digests, last_user_words, reply_digest, without_volatile
from tinker_claw.telemetry import log
from tinker_claw.types import Completion, Kind, Reply, StopReason, TokenChunk
from tinker_claw.wire import Usage
from tinker_claw.wire.reply import FinishReason

Show = Callable[[list[Delta]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A captured generation."""

    rest: list[Delta]
    """Deltas that were held back until the end."""
    reply: Reply
    finish: FinishReason
    usage: Usage


class Generation:
    """Samples and captures one job."""

    def __init__(self, deps: GatewayDeps, book: Book, job: Job) -> None:
        self._deps = deps
        self._book = book
        self._job = job
        self._parser = deps.renderer.stream(job.prompt.tokens, job.request.tools)
        self._chunks: list[TokenChunk] = []
        self._first_token_s: float | None = None
        self._account = Account()
        self._captured = False

    async def run(self, show: Show) -> Outcome:
        """Sample to the end, handing deltas to `show` as they come.

        A cancelled run captures what was sampled until then.

        Raises:
            BackendError: no token came after all attempts, or the stream broke.
            LedgerError: the turn could not be written.
        """
        with charged() as self._account:
            try:
                return await self._run(show)
            finally:
                if not self._captured:  # it was billed, and there is no turn to write that to
                    self._deps.spending.record("serve", self._account.usage)

    async def _run(self, show: Show) -> Outcome:
        try:
            await self._sample(show)
        except asyncio.CancelledError:
            self._abort()
            raise
        completion = Completion.collect(self._chunks, self._job.params)
        rest, reply = self._parser.finish()
        self._capture(completion, reply)
        return Outcome(
            rest=rest,
            reply=reply,
            finish=_finish_reason(completion, reply),
            usage=Usage(
                prompt_tokens=len(self._job.prompt.tokens),
                completion_tokens=len(completion.tokens),
                cached_tokens=completion.cached_tokens,
            ),
        )

    async def _sample(self, show: Show) -> None:
        deps = self._deps
        patience = Patience(self._job.started, deps.settings.outage_patience_s, deps.waits)
        while True:
            try:
                with deps.outages.watching("serving"):
                    return await self._attempt(show)
            except (SamplerError, OutageError) as error:
                wait_s = patience.wait_s(error)
                if self._first_token_s is not None or wait_s is None or deps.outages.closing:
                    raise
                self._chunks.clear()
                if isinstance(error, OutageError):  # `outages` has logged it, once for all requests
                    await deps.outages.rest("serving", wait_s)
                    if deps.outages.closing:
                        raise
                else:
                    log.warning("sampler.failed", error=str(error), again_in_s=wait_s)
                    await asyncio.sleep(wait_s)

    async def _attempt(self, show: Show) -> None:
        job = self._job
        async with _closing(job.sampler.stream(job.prompt.tokens, job.params)) as chunks:
            async for chunk in chunks:
                self._chunks.append(chunk)
                if chunk.tokens and self._first_token_s is None:
                    self._first_token_s = time.monotonic() - job.started
                await show(self._parser.feed(chunk.tokens))

    def _abort(self) -> None:
        if self._first_token_s is None:
            return
        completion = Completion.collect(self._chunks, self._job.params, aborted=True)
        self._capture(completion, self._parser.finish()[1])

    def _capture(self, completion: Completion, reply: Reply) -> None:
        job = self._job
        messages = job.request.messages
        history, answer = digests(messages), reply_digest(reply)
        bill = self._deps.spending.bill("serve", self._account.usage)
        turn_id = self._deps.turns.add(
            NewTurn(
                session_id=job.session_id,
                kind=job.identity.kind,
                kind_reason=job.identity.reason,
                policy_version=job.version,
                prompt=job.prompt.tokens,
                completion=completion,
                hint_at=job.prompt.hint_at,
                request_text=last_user_words(messages),
                reply_text=_as_text(reply),
                history=history,
                reply_digest=answer,
                untrained_because=_untrained_because(job, completion),
            ),
            bill,
        )
        self._captured = True
        self._deps.spending.count(bill)
        if job.identity.kind is Kind.MAIN and not job.identity.done:
            self._book.add(job.session_id, history, answer, turn_id, _stream(job, completion))
        self._deps.observer.turn_captured(
            session=job.session_id,
            turn=turn_id,
            kind=job.identity.kind,
            reason=job.identity.reason,
            version=job.version,
            prompt_tokens=len(job.prompt.tokens),
            cached_tokens=completion.cached_tokens,
            completion_tokens=len(completion.tokens),
            seconds=time.monotonic() - job.started,
            first_token_s=self._first_token_s,
            usd=bill.usd if bill else None,
        )


@asynccontextmanager
async def _closing(
    chunks: AsyncIterator[TokenChunk],
) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
    """Close a sampler's stream at once, however it is left: that is what aborts a generation."""
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


def _untrained_because(job: Job, completion: Completion) -> str | None:
    if job.untrained_because is None and completion.stop_reason is StopReason.ABORT:
        return "the client hung up"
    if job.untrained_because is None and not completion.tokens:
        return "nothing was sampled"
    return job.untrained_because


def _stream(job: Job, completion: Completion) -> Stream | None:
    """What a later prompt may begin with."""
    messages = job.request.messages
    aborted = completion.stop_reason is StopReason.ABORT
    # The client drops a volatile message, so no later request begins with this prompt.
    if aborted or len(without_volatile(messages)) != len(messages):
        return None
    return Stream(
        prompt=job.prompt.tokens,
        tokens=completion.tokens,
        hint_at=job.prompt.hint_at,
        exact=exact_digest(messages, job.request.tools, job.request.enable_thinking),
    )


def _finish_reason(completion: Completion, reply: Reply) -> FinishReason:
    if reply.tool_calls:
        return "tool_calls"
    return "length" if completion.stop_reason is StopReason.LENGTH else "stop"


def _as_text(reply: Reply) -> str:
    """The reply for the judge, tool calls included."""
    calls = [f"[calls {call.name} with {call.arguments}]" for call in reply.tool_calls]
    return "\n".join([reply.text, *calls] if reply.text else calls)
