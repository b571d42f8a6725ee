"""Replies and errors of OpenAI's chat completions.

Rule: shapes are OpenAI's; the one addition is `reasoning_content`, as reasoning servers send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from uuid import uuid4

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    Finish,
    FinishedReply,
    GenerationRequest,
    Json,
    ReplyHead,
    TokenCounts,
    TokenLogprob,
    data,
)
from tinker_claw.formats.fields import called
from tinker_claw.types import Delta

_DONE = b"data: [DONE]\n\n"
_FINISH: Mapping[Finish, str] = {
    "stop": "stop",
    "stop string": "stop",
    "length": "length",
    "calls": "tool_calls",
}

_UNFINISHED = "\ufffd"


class ChatReply:
    """A completion, or its chunks as bytes, each an event."""

    def __init__(self, request: GenerationRequest, head: ReplyHead) -> None:
        self.id = f"chatcmpl-{uuid4().hex}"
        self._model = request.model
        self._wants_usage = request.wants_usage
        self._created = head.created
        self._calls = 0
        self._version = head.version

    def whole(self, done: FinishedReply) -> Json:
        self._version = done.version
        everyone = (done, *done.others)
        choices = [_choice(index, one) for index, one in enumerate(everyone)]
        usage = _usage([one.tokens for one in everyone])
        return self._fields("chat.completion", choices) | {"usage": usage}

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        self._version = version
        return b"".join([self._chunk(self._delta(delta)) for delta in deltas])

    def keep_alive(self) -> bytes:
        """An empty chunk: agents ignore SSE comments as keep-alives."""
        return self._chunk({})

    def end(self, done: FinishedReply) -> bytes:
        told = {} if done.logprobs is None else {"logprobs": _logprobs(done.logprobs)}
        last = self._chunk({}, finish_reason=_FINISH[done.finish], **told)
        if self._wants_usage:
            usage = {"usage": _usage([done.tokens])}
            last += data(self._fields("chat.completion.chunk", []) | usage)
        return last + _DONE

    def error(self, error: RequestError) -> bytes:
        # No finish_reason follows.
        return data(error_body(error))

    def _fields(self, kind: str, choices: Sequence[Json]) -> Json:
        """Fields that a completion and its chunks have in common."""
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"v{self._version}",
            "choices": choices,
        }

    def _delta(self, delta: Delta) -> Json:
        if delta.call is not None:
            self._calls += 1
            return {"tool_calls": [{"index": self._calls - 1, **called(delta.call)}]}
        return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}

    def _chunk(self, delta: Json, finish_reason: str | None = None, **told: Json) -> bytes:
        choice = {"index": 0, "delta": delta, **told, "finish_reason": finish_reason}
        return data(self._fields("chat.completion.chunk", [choice]))


def _choice(index: int, done: FinishedReply) -> Json:
    reply = done.reply
    message: Json = {
        "role": "assistant",
        "content": reply.text or (None if reply.tool_calls else ""),
    }
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [*map(called, reply.tool_calls)]
    logprobs = None if done.logprobs is None else _logprobs(done.logprobs)
    finish = _FINISH[done.finish]
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {"content": token_logprobs(tokens), "refusal": None}


def token_logprobs(tokens: Sequence[TokenLogprob]) -> list[Json]:
    """Logprobs as OpenAI's two formats show them."""
    return [
        _token(one.text, one.logprob) | {"top_logprobs": [_token(*other) for other in one.top]}
        for one in tokens
    ]


def _token(text: str, logprob: float) -> Json:
    # A token may be a part of a character, and then it has no text of its own.
    bytes_ = None if _UNFINISHED in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": bytes_}


def _usage(replies: Sequence[TokenCounts]) -> Json:
    """Token usage of all replies to one prompt, which counts once."""
    prompt, completion = replies[0].prompt, sum(tokens.completion for tokens in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached},
        "completion_tokens_details": {"reasoning_tokens": sum(one.thought for one in replies)},
    }


def error_body(error: RequestError) -> Json:
    """OpenAI's error object."""
    kind = {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    }.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}
