"""transformers' continuous batching with our own sampling step: all private API is used here.

transformers schedules requests, owns the paged KV cache and shares prefixes. What it leaves open is
replaced: sampling (temperature 0 crashes its loop, and it has neither seeds nor candidates per
request), delivery (it copies a growing list per token), and the order of prefills.

Rule: the feed is called in the engine's thread; everything else here is called from outside it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

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
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
)

from local_gpu.model.load import own_stream
from local_gpu.room import PERSONS
from tinker_claw.errors import ConfigError

if TYPE_CHECKING:
    from local_gpu.sample.embedded import Feed

SUPPORTED: Final = "5.23"
"""Minor release of transformers that this file supports, as it uses private classes."""
PAGE_TOKENS: Final = 32
"""Tokens per cache block: prefixes are shared in multiples of it."""
_SCHEDULER: Final = "tinker_claw_persons_first"
_MAX_REQUESTS: Final = 64
_SALT_BYTES: Final = 32
"""Bytes of the hash of a salt, written over the first eight ids: ids are small numbers, so that
what remains of every word tells two salts apart."""


class Scheduled(Protocol):
    """A request's part in one forward pass, as transformers keeps it."""

    state: Any
    has_new_token: bool
    query_length: int


class Batcher(ContinuousBatchingManager):
    """One generation thread with its KV cache over one module."""

    events: Feed

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
        self.distributed_helper.set_tp_seed = lambda seed, model_device: None

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: our attention (`local_gpu.tree`) serves paged batches already."""

    def start_with(self, events: Feed) -> None:
        """Start the generation thread, which reports to `events`."""
        self.events = events
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
        # It and its events form a reference cycle; the weights must not wait for the collector.
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

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        if self._device.type == "cuda":
            # It writes a pass's inputs in the thread's stream and computes in one of its own, which
            # does not wait for the first: a busy GPU would compute with those of the pass before.
            processor.inputs_and_outputs.compute_stream = torch.cuda.current_stream(self._device)
        processor.model_runner = _Runner(processor, self.events)
        processor.__class__ = _Processor
        cast(_PersonsFirst, processor.scheduler).events = self.events
        processor.cache.__class__ = _SaltedCache
        return processor

    def _run_generation_loop(self) -> None:
        try:
            with own_stream(self._device):
                super()._run_generation_loop()
        finally:
            self.batch_processor = None
            error = self.background_thread_status.fatal_error
            self.events.on_exit(f"the sampler's loop failed: {error}" if error else "it closed")


class _Processor(ContinuousBatchProcessor):
    def prepare_next_batch(self) -> bool:
        scheduler, found = cast(_PersonsFirst, self.scheduler), False
        scheduler.events.take_turn()
        try:
            found = super().prepare_next_batch()
        finally:
            if not found:
                scheduler.events.end_turn(0)
        return found

    def _generation_step(self, model: Any) -> None:
        scheduler, began = cast(_PersonsFirst, self.scheduler), time.perf_counter()
        try:
            super()._generation_step(model)
        finally:
            scheduler.took(time.perf_counter() - began)

    def __del__(self) -> None:
        """Do nothing: the original collects garbage, and the last reference frees the cache."""


class _SaltedCache(PagedAttentionCache):
    """A cache that reuses a prompt's blocks only under the salt of its request.

    Blocks are identified by a hash of their tokens and of the block before, so changing the start
    of the first one changes all of them.
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
    """Request id that carries a salt."""
    return f"{number}:{salt or ''}"


def _salted(request_id: str, tokens: list[int]) -> list[int]:
    """Tokens for hashing: the salt's hash replaces part of the first ones, which are then no
    ids."""
    salt = request_id.partition(":")[2]
    if not salt:
        return tokens
    words = array("i", hashlib.blake2b(salt.encode(), digest_size=_SALT_BYTES).digest())
    head = [token ^ word for token, word in zip(tokens, words, strict=False)]
    return [*head, *tokens[len(head) :]]


class _Runner(ModelRunner):
    """The forward pass, with our sampling step behind it."""

    def __init__(self, processor: ContinuousBatchProcessor, events: Feed) -> None:
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
    """Reports failures; tokens have left through `on_logits` already."""

    def __init__(self, events: Feed) -> None:
        super().__init__()
        self._events = events

    def deliver(self, output: Any) -> None:
        if output.error is not None:
            self._events.on_failure(output.request_id, output.error)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class _PersonsFirst(FIFOScheduler):
    """A scheduler that puts people first, then decoding requests, then the shortest prefill.

    While people wait, others take part in a pass only when passes for people alone have taken
    `PERSONS` times as long as the others' part in the last one: a reply takes one and a half times
    as long as alone, and others still progress. A request left out keeps its cache, unless a person
    needs it.
    """

    events: Feed

    def reset(self) -> None:
        super().reset()
        self._persons = self._others = self._prefills = False
        """Whether people and others take part in this pass, and whether it has more than one token
        of a prompt."""
        self._owed_s = 0.0
        """Seconds of passes for people alone that are due before others take part."""
        self._alone_s = 0.0
        """Seconds that a one-token pass for people alone took last. It is halved with each pass
        beside others; otherwise one slow pass would let others take part for ever."""

    def took(self, seconds: float) -> None:
        """Note how long the pass took."""
        self.events.end_turn(0 if self._persons else seconds)
        if not self._persons:
            self._owed_s = PERSONS * seconds  # a person who has come meanwhile has waited for it
        elif self._others:
            self._owed_s += PERSONS * max(0.0, seconds - self._alone_s)
            self._alone_s /= 2
        else:
            self._owed_s = max(0.0, self._owed_s - seconds)
            if not self._prefills:
                self._alone_s = seconds

    def _process_candidates(self, candidates: list[Any], *args: Any, **kwargs: Any) -> Any:
        known = (*self.active_requests.values(), *self.waiting_requests.values())
        persons = _in_order([state for state in known if self._of_person(state)])
        if persons:
            self._make_room()
        others = _in_order(
            [s for s in candidates if not self._of_person(s) and s.status < RequestStatus.FINISHED]
        )
        alone = bool(persons) and self._owed_s > 0
        wanted = persons if alone else [*persons, *others]
        found = super()._process_candidates(wanted, *args, **kwargs)
        if alone and not found[0]:  # the oldest of the others has the cache
            found = super()._process_candidates([*persons, *others], *args, **kwargs)
        taken = [self._of_person(part.state) for part in found[0]]
        self._persons, self._others = any(taken), not all(taken)
        self._prefills = any(part.query_length > 1 for part in found[0])
        return found

    def _of_person(self, state: Any) -> bool:
        return self.events.of_person(state.request_id)

    def _make_room(self) -> None:
        """Free the cache of the others' newest requests, which recompute it. The oldest one keeps
        its own, so that every request ends."""
        others = [s for s in self.active_requests.values() if not self._of_person(s)]
        while len(others) > 1 and not self._try_to_meet_safety_margin():
            state = others.pop()
            self.finish_request(state.request_id)
            self.add_waiting_request(state.create_equivalent_initial_request())
            state.status = RequestStatus.FINISHED


def _in_order(states: list[Any]) -> list[Any]:
    # sorted() is stable, and a decoding request has nothing left to prefill.
    return sorted(states, key=lambda state: len(state.remaining_prefill_tokens))


SCHEDULER_MAPPING[_SCHEDULER] = _PersonsFirst


def check_version(version: str = transformers.__version__) -> None:
    """Raise ConfigError for a transformers whose private classes may differ from those used."""
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise ConfigError(
            f"The embedded sampler works with transformers {SUPPORTED}.x, and {version} is "
            f"installed: pip install 'transformers=={SUPPORTED}.*'."
        )
