"""SGLang's dialect: its own `/generate`, with token ids in and out.

    python -m sglang.launch_server --model-path MODEL --enable-lora --max-lora-rank 32 \
        --lora-target-modules all --enable-priority-scheduling

Written from the sources of 0.5.23, and tested against a stand-in that answers in their shapes,
never against a real server. From the sources:

* logprobs are tempered, but not renormalised where top_p or top_k cut (training drops those), and
  untempered at temperature 0; SGLANG_RETURN_ORIGINAL_LOGPROB must not be set;
* seeds work only with --enable-deterministic-inference;
* the model's own end tokens end a completion whenever stop tokens are given, asked for or not;
* events hold all tokens so far, or those since the last event, by how the server was started;
* `extra_key` separates cached prefixes, as an adapter does (older releases accept and ignore it:
  every server is tested, see `exam.keeps_apart`);
* a higher `priority` goes first, and preempts a running request whose own is lower by more than 10,
  which resumes later with its tokens; without the flag it is ignored;
* an unload waits until the requests in flight have ended, and data-parallel replicas load nothing.

Rule: every request states every setting that affects sampling.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar

from local_gpu.sample.dialect import END_TOKEN, HttpServer, StreamPiece, seed_of
from local_gpu.sample.http import HttpAnswer, Refusal
from local_gpu.sample.server import ServerInfo
from tinker_claw.types import SamplingParams, Tokens

T = TypeVar("T")

_PERSON: Final = 100
"""Priority of people's requests: above `--priority-scheduling-preemption-threshold`, which is
10."""


class SglangServer(HttpServer):
    """Implements `Server` over SGLang's HTTP routes."""

    loads, unloads = "/load_lora_adapter", "/unload_lora_adapter"

    async def _pieces(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int, info: ServerInfo
    ) -> AsyncGenerator[StreamPiece]:
        readers = [_Events(params) for _ in range(n)]
        body = _request(name, prompt, params, n)
        async with aclosing(self._link.events("/generate", body)) as events:
            async for event in events:
                index: int = event.get("index", 0) if n > 1 else 0
                yield replace(readers[index].piece(event), index=index)

    def _means_not_loaded(self, refusal: Refusal) -> bool:
        told = refusal.answer.told
        return "never been loaded" in told or "are not loaded" in told


def _request(name: str | None, prompt: Tokens, params: SamplingParams, n: int) -> dict[str, object]:
    """Body of a request; n > 1 sends a batch of the same prompt, so that each can have its own
    seed."""

    def each(one: Sequence[T]) -> T | list[T]:
        return list(one) if n > 1 else one[0]

    seed = seed_of(params)
    return {
        "input_ids": each([list(prompt)] * n),
        "sampling_params": each(
            [_sampling(params, None if seed is None else seed + i) for i in range(n)]
        ),
        "lora_path": each([name] * n),
        "return_logprob": True,
        "logprob_start_len": -1,  # of the reply only
        "top_logprobs_num": params.student_topk,
        "return_text_in_logprobs": False,
        "stream": True,
        "extra_key": params.cache_salt,
        "priority": _PERSON if params.person else 0,
    }


def _sampling(params: SamplingParams, seed: int | None) -> dict[str, object]:
    return {
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,  # -1 means all
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "sampling_seed": seed,
        "stop_token_ids": list(params.stop_tokens),
        # It would switch stop_token_ids off as well.
        "ignore_eos": not params.stop_tokens,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "n": 1,
    }


class _Events:
    """The events of one completion."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._seen = 0

    def piece(self, event: Mapping[str, Any]) -> StreamPiece:
        meta: Mapping[str, Any] = event["meta_info"]
        total: int = meta["completion_tokens"]
        ids = self._new(event["output_ids"], total)
        told = self._new(meta["output_token_logprobs"], total)
        rows: list[Any] = []
        if self._params.student_topk:
            rows = self._new(meta["output_top_logprobs"], total)
        self._seen = total
        if [row[1] for row in told] != ids:
            raise ValueError("logprobs of other tokens")
        return StreamPiece(
            index=0,
            tokens=ids,
            logprobs=[row[0] for row in told],
            candidates=[{id: logprob for logprob, id, _ in row} for row in rows],
            ended=self._ended(meta["finish_reason"]),
            cached_tokens=meta.get("cached_tokens"),
        )

    def _new(self, told: list[Any], total: int) -> list[Any]:
        """Entries since the last event; a list of all may be ahead of its own count."""
        if len(told) >= total:
            return told[self._seen : total]
        if len(told) == total - self._seen:
            return told
        raise ValueError(f"{len(told)} entries of {total}, after {self._seen}")

    def _ended(self, reason: Mapping[str, Any] | None) -> str | None:
        if reason is None:
            return None
        if reason["type"] == "stop" and reason["matched"] not in self._params.stop_tokens:
            return END_TOKEN
        status = reason.get("status_code")
        if reason["type"] == "abort" and isinstance(status, int) and status < 500:
            raise Refusal(HttpAnswer(status, reason))
        return str(reason["type"])
