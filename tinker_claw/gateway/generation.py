"""A generation, from the sampler to the ledger.

Rule: what was sampled is written exactly as it came, and before the client is told that it is
complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from tinker_claw.billing.budget import Account
from tinker_claw.conversation.attribution import without_volatile
from tinker_claw.conversation.history import reply_digest
from tinker_claw.errors import ClawError, LedgerError
from tinker_claw.formats.base import Finish, FinishedReply, TokenCounts
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.index import Stream
from tinker_claw.gateway.prompt import exact_digest
from tinker_claw.gateway.request import Job
from tinker_claw.gateway.sampling import Sampling
from tinker_claw.privacy.marker import Privacy
from tinker_claw.render.stream import CutStream
from tinker_claw.served import ServedTurn
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Completion, Delta, Kind, Reply, StopReason, TokenChunk

Show = Callable[[list[Delta]], Awaitable[None]]


class Generation:
    """Samples and captures one job."""

    def __init__(self, deps: GatewayDeps, job: Job) -> None:
        self._deps = deps
        self._job = job
        # Not `spending.paying`: this bill is written in the transaction of its turn.
        self._account = Account(partial(deps.spending.record, "serve"))
        self.sampling = Sampling(deps, job, self._account.add)
        """Its version is the one that answers, a stand-in's where the job's own failed."""
        request = job.request
        at = len(job.prompt.tokens) - job.prompt.begun
        prompt, begun = job.prompt.tokens[:at], job.prompt.tokens[at:]
        self._parser = CutStream(
            deps.renderer.stream(prompt, request.tools, may_call=request.may_call),
            job.params.stop,
            one_call=request.one_call,
        )
        self._begun = self._parser.feed(begun)
        """Deltas of the part of the reply that was given to the model."""
        self._thought_before = self._parser.thought
        """Tokens of thinking in that part."""
        self.rest: list[Delta] = []
        """Deltas that were held back until the end."""
        self._waited_s = 0.0
        """Seconds spent waiting for a slot."""
        self._first_token_s: float | None = None
        self.cancelled_because = TurnRefusal(Reason.HUNG_UP)
        """Why a run that is cancelled breaks off."""
        self._broken: TurnRefusal | None = None
        """Why the reply broke off, if it did."""

    async def run(self, show: Show | None = None) -> FinishedReply:
        """Sample to the end, handing deltas to `show` as they come.

        A run that is cancelled, or whose `show` fails, captures what was sampled until then.

        Raises:
            BackendError: no version could answer, or continue the reply that had begun.
            LedgerError: the turn could not be written.
        """
        if self._job.own_answer is not None:
            reply = Reply(self._job.own_answer)
            self.rest = reply.deltas
            return FinishedReply(reply, "stop", TokenCounts(0, 0, 0), self._job.version)
        caller = self._job.caller
        try:
            waits = time.monotonic()
            async with caller.limits.slot(caller.user, episode=caller.episode):
                self._waited_s = time.monotonic() - waits
                return await self._run(show)
        finally:
            if self._account.is_open:  # it was billed, and there is no turn to write that to
                with suppress(LedgerError):
                    self._deps.spending.record("serve", self._account.close())

    async def _run(self, show: Show | None) -> FinishedReply:
        async def take(chunk: TokenChunk) -> bool:
            if chunk.tokens and self._first_token_s is None:
                self._first_token_s = time.monotonic() - self._job.started
            deltas, self._begun = [*self._begun, *self._parser.feed(chunk.tokens)], []
            if deltas and show is not None:
                await show(deltas)
            return self._parser.cut_because is None

        try:
            await self.sampling.run(take)
        except ClawError:
            raise
        except BaseException as error:  # the client hung up, or its format failed
            cancelled = isinstance(error, asyncio.CancelledError)
            kind = type(error).__name__
            self._broken = (
                self.cancelled_because if cancelled else TurnRefusal(Reason.BROKE_OFF, kind)
            )
            if self.sampling.begun:
                self._capture(self.sampling.completion(aborted=True), self._parser.finish()[1])
            raise
        self.rest, reply = self._parser.finish()
        completion = self.sampling.completion(cut=self._parser.cut_because is not None)
        try:
            await self._deps.compute.own_round()
        finally:  # also where the client left meanwhile: the reply is complete
            self._capture(completion, reply)
        return FinishedReply(
            reply=reply,
            finish=self._finish(completion, reply),
            tokens=TokenCounts(
                prompt=len(self._job.prompt.tokens),
                completion=len(completion.tokens),
                cached=completion.cached_tokens,
                thought=self._parser.thought - self._thought_before,
            ),
            version=self.sampling.version,
            stop_string=self._parser.stop_string,
        )

    def _finish(self, completion: Completion, reply: Reply) -> Finish:
        if completion.stop_reason is StopReason.LENGTH:  # there may have been more calls
            return "length"
        if reply.tool_calls:
            return "calls"
        return "stop" if self._parser.stop_string is None else "stop string"

    def _capture(self, completion: Completion, reply: Reply) -> None:
        """Write the turn, and index it for the request that continues it."""
        deps, job, place = self._deps, self._job, self._job.place
        caller, prompt = job.caller, job.prompt
        prompt_tokens, completion_tokens = len(prompt.tokens), len(completion.tokens)
        caller.limits.served(caller.user, prompt_tokens, completion_tokens)
        if job.kept.privacy is Privacy.PRIVATE or deps.index.has_forgotten(
            place.session_id, job.started
        ):
            deps.telemetry.turn_not_kept(
                prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
            )
            return
        holds = self._secret_in_reply(completion)
        turn = ServedTurn(
            place,
            caller.user,
            self.sampling.version,
            prompt,
            completion,
            reply_text=deps.secrets.redact(_as_text(reply), job.kept.secrets),
            reply_digest=reply_digest(reply),
            untrained_because=self._untrained_because(completion, holds),
            response_id=job.writer.id,
            fallback=self.sampling.fallback,
            keeps_tokens=(job.kept.reason or holds) is None,
            images=job.images,
            episode=caller.episode,
            seconds=time.monotonic() - job.started,
            first_token_s=self._first_token_s,
            waited_s=self._waited_s,
        )
        bill = deps.spending.bill("serve", self._account.usage)
        turn_id = deps.ledger.turns.add(turn, bill)
        self._account.close()
        deps.spending.count(bill)
        if place.identity.done:
            deps.index.end(place.session_id)
        elif place.identity.kind is Kind.MAIN:
            stream = _stream(job, completion) if turn.keeps_tokens else None
            deps.index.add(place.session_id, place.history, turn.reply_digest, turn_id, stream)
        deps.telemetry.served(turn, turn_id, bill and bill.usd)

    def _secret_in_reply(self, completion: Completion) -> str | None:
        """Describe a secret or personal data in the reply; None: there is none."""
        # As it was sampled: the reply lacks thinking and what a stop string cut off. Without its
        # stop token the text mostly equals the reply, which is then searched only once.
        stops, sampled = self._job.params.stop_tokens, completion.tokens
        ended = sampled[-1:] and sampled[-1] in stops
        text = self._deps.renderer.decode(sampled[:-1] if ended else sampled).strip()
        return self._deps.secrets.secret_in_text(text, self._job.kept.secrets)

    def _untrained_because(self, completion: Completion, holds: str | None) -> TurnRefusal | None:
        """Return the first reason why the turn cannot be trained: what its request tells, then what
        its reply does. The ledger may add one (`TurnTable.add`)."""
        if self._job.untrained_because is not None:
            return self._job.untrained_because
        if holds is not None:
            return TurnRefusal(Reason.HOLDS, holds)
        if completion.stop_reason is StopReason.ABORT:
            return self._broken
        if completion.stop_reason is StopReason.CUT:
            return self._parser.cut_because
        if not completion.tokens:
            return TurnRefusal(Reason.EMPTY)
        return self.sampling.unfit_because()


def _stream(job: Job, completion: Completion) -> Stream | None:
    """Return the token stream that a later prompt may extend; None: none may."""
    messages = job.request.messages
    # The client has seen less than was sampled.
    left = completion.stop_reason in (StopReason.ABORT, StopReason.CUT)
    # The client drops a volatile message, so no later request begins with this prompt.
    if left or len(without_volatile(messages)) != len(messages):
        return None
    return Stream(
        job.prompt,
        completion.tokens,
        exact_digest(messages, job.request.tools, job.request.switches),
    )


def _as_text(reply: Reply) -> str:
    """The reply for the judge, tool calls included."""
    calls = [f"[calls {call.name} with {call.arguments}]" for call in reply.tool_calls]
    return "\n".join([reply.text, *calls] if reply.text else calls)
