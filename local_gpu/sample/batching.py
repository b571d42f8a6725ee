"""transformers' continuous batching with our own sampling step: all private API is used here.

transformers schedules requests, owns the paged KV cache and shares prefixes. What it leaves open is
replaced: sampling (temperature 0 kills its loop, and it has neither seeds nor candidates per
request), delivery (it copies a growing list per token), and the order of prefills.

Rule: `Events` is called in the engine's thread; everything else here is called from outside it.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.scheduler import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
)

from local_gpu.model.load import own_stream
from tinker_claw.errors import ConfigError

SUPPORTED: Final = "5.23"
"""The minor release of transformers whose private classes were read for this file."""
PAGE_TOKENS: Final = 32
"""Tokens per cache block: prefixes are shared in multiples of it."""
_SCHEDULER: Final = "tinker_claw_shortest_prefill"
_MAX_REQUESTS: Final = 64
_SALT_BYTES: Final = 32
"""Of the hash of a salt, over the first eight ids: those are small numbers, so that what remains of
every word tells two salts apart."""


class Scheduled(Protocol):
    """A request's part in one forward pass, as transformers keeps it."""

    state: Any
    has_new_token: bool
    query_length: int


class Events(Protocol):
    """What the engine's thread tells. None of it may raise."""

    def on_logits(self, batch: Sequence[Scheduled], logits: Tensor) -> list[int]:
        """Choose a token for each row [R, V] of the requests with `has_new_token`, in order."""
        ...

    def on_failure(self, request_id: str, reason: str) -> None: ...

    def on_exit(self, reason: str) -> None:
        """The thread has ended; nothing more will come for any request."""
        ...


class Batcher(ContinuousBatchingManager):
    """One generation thread with its KV cache over one module."""

    _events: Events

    def __init__(self, module: Any, *, kv_cache_tokens: int, max_batch_tokens: int) -> None:
        check_version()
        self._device: torch.device = module.device
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=-(-kv_cache_tokens // PAGE_TOKENS),
            # A chunk may not ask for more than the share of the cache kept free for it.
            max_batch_tokens=min(max_batch_tokens, max(PAGE_TOKENS, kv_cache_tokens // 8)),
            max_requests_per_batch=_MAX_REQUESTS,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            scheduler_type=_SCHEDULER,
        )
        super().__init__(module, GenerationConfig(eos_token_id=-1, pad_token_id=0), config)
        # It would reseed torch's global generator, which belongs to the rest of the process.
        self.distributed_helper.set_tp_seed = _no_seed

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Our attention (`local_gpu.tree`) serves paged batches already."""

    def start_with(self, events: Events) -> None:
        """Start the generation thread, which tells `events` what it does."""
        self._events = events
        self.output_router = _Failures(events)
        self.background_thread_status.clear()
        # A daemon, so that a process which ends in an error does not wait for it forever.
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, name="tinker-claw-sampler", daemon=True
        )
        self._generation_thread.start()

    def drain(self) -> None:
        """Wait until the requests in flight have ended, then end the thread and free the cache.

        Not `stop`, whose full garbage collections hold up every other thread for a while.
        """
        status = self.background_thread_status
        status.request_stop(BackgroundThreadStatus.FLUSH_AND_STOP, global_rank=0)
        self._wake_up_loop.set()
        self._generation_thread.join()
        # It and its events refer to one another; the weights must not wait for the collector.
        self.model = None

    def submit(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, stop_tokens: Sequence[int]
    ) -> None:
        self.add_request(
            list(prompt),
            request_id=request_id,
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_tokens) or [-1],
        )

    @property
    def accepts(self) -> bool:
        return self.is_running() and self.background_thread_status.can_accept_new_requests() is None

    @property
    def held_requests(self) -> int:
        """Requests that the scheduler holds, running or waiting."""
        processor = self.batch_processor
        if processor is None:
            return 0
        scheduler = processor.scheduler
        return len(scheduler.active_requests) + len(scheduler.waiting_requests)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        if self._device.type == "cuda":
            # It writes a pass's inputs in the thread's stream and computes in one of its own, which
            # does not wait for the first: a busy GPU would compute with those of the pass before.
            processor.inputs_and_outputs.compute_stream = torch.cuda.current_stream(self._device)
        processor.model_runner = _Runner(processor, self._events)
        processor.__class__ = _Processor
        processor.cache.__class__ = _SaltedCache
        return processor

    def _run_generation_loop(self) -> None:
        try:
            with own_stream(self._device):
                super()._run_generation_loop()
        finally:
            self.batch_processor = None
            error = self.background_thread_status.fatal_error
            self._events.on_exit(f"the sampler's loop failed: {error}" if error else "it closed")


class _Processor(ContinuousBatchProcessor):
    def __del__(self) -> None:
        """Nothing: the original collects garbage, and the last reference frees the cache."""


class _SaltedCache(PagedAttentionCache):
    """Finds a prompt's blocks again under the salt of its request only.

    Blocks are known by a hash of their tokens and of the block before, so that another beginning
    of the first one makes them all others.
    """

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        return super().search_prefix_match(request_id, _salted(request_id, prompt_ids))

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        if complete_blocks:
            tokens = _salted(state.request_id, state.initial_tokens + state.generated_tokens)
            state = SimpleNamespace(
                request_id=state.request_id,
                status=state.status,
                initial_tokens=tokens,
                generated_tokens=[],
            )
        super().mark_complete_blocks(state, complete_blocks)


def salted_id(number: int, salt: str | None) -> str:
    """A request's id, which carries its salt."""
    return f"{number}:{salt or ''}"


def _salted(request_id: str, tokens: list[int]) -> list[int]:
    """Tokens as they are hashed: the first ones are no ids any more, and other ones by salt."""
    salt = request_id.partition(":")[2]
    if not salt:
        return tokens
    words = array("i", hashlib.blake2b(salt.encode(), digest_size=_SALT_BYTES).digest())
    head = [token ^ word for token, word in zip(tokens, words, strict=False)]
    return [*head, *tokens[len(head) :]]


class _Runner(ModelRunner):
    """The forward pass, with our sampling step behind it."""

    def __init__(self, processor: ContinuousBatchProcessor, events: Events) -> None:
        super().__init__(
            logit_processor=processor.logit_processor,
            cb_config=processor.cb_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=processor.cache,
            do_sample=False,
            return_logprobs=False,
        )
        self._events = events

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        batch: Any = self.inputs_and_outputs
        tokens = self._events.on_logits(batch.requests_in_batch, scores[0])
        output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=output_ids.dtype)


class _Failures(OutputRouter):
    """Passes on what fails; tokens have left through `on_logits` already."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def deliver(self, output: Any) -> None:
        if output.error is not None:
            self._events.on_failure(output.request_id, output.error)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class _ShortestPrefillFirst(FIFOScheduler):
    """Decoding requests first, then the shortest prefill: a short prompt passes a long one."""

    def _process_candidates(self, candidates: list[Any], *args: Any, **kwargs: Any) -> Any:
        # sorted() is stable, and a decoding request has nothing left to prefill.
        ordered = sorted(candidates, key=lambda state: len(state.remaining_prefill_tokens))
        return super()._process_candidates(ordered, *args, **kwargs)


SCHEDULER_MAPPING[_SCHEDULER] = _ShortestPrefillFirst


def check_version(version: str = transformers.__version__) -> None:
    """Raise ConfigError for a transformers whose private classes may differ from those used."""
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise ConfigError(
            f"The embedded sampler works with transformers {SUPPORTED}.x, and {version} is "
            f"installed: pip install 'transformers=={SUPPORTED}.*'."
        )


def _no_seed(seed: int | None, model_device: torch.device) -> None:
    """Stands in for a method that seeds torch's global generator."""
