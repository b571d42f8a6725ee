"""The service behind the routes: sessions, the model in training, samplers.

Rule: a request that is sent twice has one id, and is carried out once. A partial step is never
applied: a forward_backward that failed makes the next optim_step fail. An error in a numbered
request is its answer, in its turn: its number is used up all the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from secrets import randbits
from typing import Any, Final, TypeAlias
from uuid import uuid4

from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from local_gpu.backend import LocalBackend
from local_gpu.config import LocalConfig
from local_gpu.halves import check_request
from local_gpu.model.files import remove
from local_gpu.model.load import end_tokens
from local_gpu.model.lora import LoraShape
from local_gpu.tinker import messages
from local_gpu.tinker.checkpoints import NAMELESS, Store, path_of
from local_gpu.tinker.futures import Answer, Futures, Turns, Work
from local_gpu.tinker.messages import refuse
from tinker_claw.errors import ClawError, RequestError, StepError
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Completion, SamplingParams, StopReason

Json: TypeAlias = dict[str, Any]
_OPEN_SAMPLERS: Final = 4
"""Samplers that are open at once; the least recently used is closed."""
_MOST_SAMPLES: Final = 1024


class Service:
    """Carries out the requests of all routes, which have the names of its methods."""

    def __init__(self, config: LocalConfig, store: Store, backend: LocalBackend) -> None:
        """`backend` learns and samples in this process, and finds checkpoints by `store.folder`."""
        self._config = config
        self._name = config.name or config.model
        folder = Path(config.model)
        # The slash keeps the SDK from reading /models/x as <org>/<model>/<variant>.
        self._tokenizer = f"{folder.resolve()}/" if folder.is_dir() else config.model
        self.store = store
        self.backend = backend
        self.futures = Futures()
        self._learning: Any = backend.learning  # a LearningCore, in this process
        self._serving = backend.serving
        self._vocabulary: int = self._learning.facts.vocabulary
        self._stop_tokens = end_tokens(config.model)
        self._sessions = set[str]()
        self._turns: dict[str, Turns] = {}
        """The order of requests of each model, also of those that were replaced."""
        self._training = asyncio.Lock()
        """Held by the numbered request that is carried out: there is one at a time."""
        self._model: str | None = None
        """The model in training."""
        self._shape = LoraShape(config.rank, config.alpha)
        """Its shape."""
        self._unfinished = 0
        """Parts that the gradient of the next step lacks."""
        self._samplers: dict[str, str | None] = {}
        """Paths of the sampling sessions; None: the base."""
        self._open: dict[str | None, Sampler] = {}
        """Samplers by path, the least recently used first."""
        self._opening = asyncio.Lock()

    # Sessions

    async def get_server_capabilities(self) -> Json:
        model = {
            "model_name": self._name,
            "max_context_length": self._serving.context_tokens,
            "trainable": True,
        }
        return {"supported_models": [model]}

    async def create_session(self) -> Json:
        self._sessions.add(session_id := str(uuid4()))
        return {"session_id": session_id}

    async def session_heartbeat(self, ask: types.SessionHeartbeatRequest) -> Json:
        self._check_session(ask.session_id)
        return {}

    async def finish(self, session_id: str) -> None:
        """Cancel what is in flight, and forget the session's models and samplers."""
        self._sessions.discard(session_id)
        self.futures.cancel(f"{session_id}:")
        for owned in (self._turns, self._samplers):
            for key in [key for key in owned if key.startswith(f"{session_id}:")]:
                del owned[key]

    def _check_session(self, session_id: str | None) -> None:
        """Raises RequestError: 410, which ends a client's heartbeats."""
        if session_id not in self._sessions:
            raise _gone_error(f"session {session_id}")

    def _check_base(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise RequestError(
                f"base_model {name!r} is not served here; this server serves {self._name}.",
                status=HTTPStatus.NOT_FOUND,
            )

    # The model in training

    async def create_model(self, ask: types.CreateModelRequest) -> Json:
        lora = ask.lora_config or types.LoraConfig(rank=32)
        if lora.rank < 1 or not (lora.train_mlp and lora.train_attn):
            raise RequestError("All layers are trained here, with a rank of 1 or more.")
        shape = LoraShape(lora.rank, self._config.alpha, head=lora.train_unembed)
        seed = randbits(63) if lora.seed is None else lora.seed
        return self._begin(ask, partial(self._learning.create, shape, seed))

    async def load_weights(self, ask: types.LoadWeightsRequest) -> Json:
        """Begin a model from a checkpoint."""
        if ask.model_id is not None and ask.seq_id is not None:
            return self.in_turn(ask.model_id, ask.seq_id, self._load_into)

        def make() -> LoraShape:
            folder = self.store.existing(ask.path)
            return self._learning.create_from(folder, moments=ask.optimizer)

        return self._begin(ask, make)

    async def _load_into(self) -> Answer:
        raise RequestError("load_state is not served: take create_training_client_from_state.")

    def _begin(self, ask: Any, make: Callable[[], LoraShape]) -> Json:
        self._check_session(ask.session_id)
        self._check_base(ask.base_model)
        model_id = f"{ask.session_id}:train:{ask.model_seq_id}"  # as the SDK makes it, too
        self._turns.setdefault(model_id, Turns())

        async def begin() -> Answer:
            before, self._model = self._model, None  # where this is cancelled, nobody has it
            try:
                self._shape = await self.backend.run(make)
            except ClawError:
                self._model = before
                raise
            self._model, self._unfinished = model_id, 0
            return {"model_id": model_id}

        return self.in_turn(model_id, 0, begin)

    def in_turn(self, model_id: str, number: int, work: Work) -> Json:
        """Carry out a request of the model in its turn; return the request's id."""
        if (turns := self._turns.get(model_id)) is None:
            raise _gone_error(f"model {model_id}")
        request_id = f"{model_id}:{number}"

        async def carry_out() -> Answer:
            async with self._training:
                if number:
                    self._check_model(model_id)
                return await work()

        if number and turns.next:
            self._check_model(model_id)
        if number >= turns.next:
            self.futures.start(request_id, lambda: turns.carry_out(number, carry_out))
        return {"request_id": request_id}

    def _check_model(self, model_id: str) -> None:
        if model_id != self._model:
            raise _gone_error(f"model {model_id}")

    async def get_info(self, ask: types.GetInfoRequest) -> Json:
        self._check_model(ask.model_id)
        data = {"model_name": self._name, "tokenizer_id": self._tokenizer}
        return {"model_id": ask.model_id, "model_data": data, "lora_rank": self._shape.rank}

    async def forward_backward(self, message: pb.ForwardBackwardRequest) -> Answer:
        learning = self._learning
        vision = self._serving.vision if learning.facts.trains_images else None
        call = learning.forward if message.forward_only else learning.forward_backward
        self._unfinished += not message.forward_only
        records = await self.backend.run(
            lambda: messages.records_of(message, learning.facts, vision)
        )
        scored = await self.backend.step(lambda: call(records))
        self._unfinished -= not message.forward_only
        return messages.forward_backward_output(message, scored)

    async def optim_step(self, ask: types.OptimStepRequest) -> Answer:
        if self._unfinished:
            self._unfinished = 0
            await self.backend.run(self._learning.discard)
            raise StepError("The step is void: a forward_backward before it failed.")
        values = ask.optim_params.model_dump()
        refuse(optimizer=values.get("type"))
        for name, value in values.items():
            most = 1.0 if name.startswith("beta") else math.inf
            if not 0.0 <= value < most:
                raise RequestError(f"adam_params.{name} is {value:g}, not in [0, {most:g}).")
        norm = await self.backend.step(lambda: self._learning.optim_step(Adam(**values)))
        return {"metrics": {"unclipped_grad_l2:mean": norm}}

    async def save(self, kind: str, ask: Any) -> Answer:
        """Save the weights as a checkpoint of that kind, or for a sampler without a name."""
        head = kind == "external_weights" and self._shape.head
        refuse(
            **ask.model_dump(include={"overwrite", "age_encryption_recipients"}),
            inflight=getattr(ask, "kind", "snapshot") != "snapshot",
            train_unembed=head,
        )
        number = getattr(ask, "sampling_session_seq_id", None)
        learning = self._learning
        write = learning.write_state if kind == "weights" else learning.write_adapter
        name = ask.path if number is None else f"{NAMELESS}{number}"
        path = path_of(ask.model_id, kind, name)
        await self.backend.run(lambda: write(self.store.new(path)))
        if number is None:
            return {"path": path}
        sampler_id = f"{ask.model_id.partition(':')[0]}:sample:{number}"
        self._samplers[sampler_id] = path
        return {"sampling_session_id": sampler_id}

    # Sampling

    async def create_sampling_session(self, ask: types.CreateSamplingSessionRequest) -> Json:
        self._check_session(ask.session_id)
        self._check_base(ask.base_model)
        if ask.model_path is not None:
            self.store.existing(ask.model_path)
        sampler_id = f"{ask.session_id}:sample:{ask.sampling_session_seq_id}"
        self._samplers[sampler_id] = ask.model_path
        return {"sampling_session_id": sampler_id}

    async def get_sampler(self, sampler_id: str) -> Json:
        return {
            "sampler_id": sampler_id,
            "base_model": self._name,
            "model_path": self._path_of(sampler_id),
        }

    def _path_of(self, sampler_id: str) -> str | None:
        """Return the path of a sampler's weights; None: the base."""
        if sampler_id not in self._samplers:
            raise _gone_error(f"sampler {sampler_id}")
        return self._samplers[sampler_id]

    async def asample(self, ask: types.SampleRequest) -> Json:
        path = self._path_of(str(ask.sampling_session_id))
        if ask.seq_id is None or not 1 <= ask.num_samples <= _MOST_SAMPLES:
            raise RequestError(f"A request has a seq_id, and 1 to {_MOST_SAMPLES} samples.")
        request_id = f"{ask.sampling_session_id}:{ask.seq_id}:"  # none begins like another
        self.futures.start(request_id, lambda: self._sample(ask, path))
        sequence_ids = [f"{request_id}{i}" for i in range(ask.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    async def _sample(self, ask: types.SampleRequest, path: str | None) -> bytes:
        """Score the prompt as asked, and draw the replies."""
        prompt, params = await self._read(ask)
        sampler, out = await self._sampler(path), pb.SampleResponse()
        size = self._serving.context_tokens
        scored = ask.prompt_logprobs or ask.topk_prompt_logprobs or ask.target_prompt_logprobs
        if scored:
            await self._score(sampler, ask, prompt, params, out)
        # A prompt that fills the context can be scored, and nothing is drawn behind it.
        if scored and len(prompt) == size and params.max_tokens == 1:
            empty = Completion((), (), (), (), StopReason.LENGTH, params)
            completions = [empty] * ask.num_samples
        else:
            check_request(prompt, params, context_tokens=size, vocabulary=self._vocabulary)
            completions = await sampler.sample(prompt, params, ask.num_samples)
        messages.add_completions(out, completions)
        return out.SerializeToString()

    async def _read(self, ask: types.SampleRequest) -> tuple[tuple[int, ...], SamplingParams]:
        """Return the tokens of the prompt and the settings."""
        settings = ask.sampling_params
        refuse(
            prompt_alt_tokens_k=ask.prompt_alt_tokens_k,
            record_stability_info=ask.record_stability_info,
        )
        stop = self._stop_tokens if settings.stop is None else settings.stop
        if any(isinstance(token, str) for token in stop):
            raise RequestError("stop strings are not served here: give a list of token ids.")
        pieces = [getattr(chunk, "tokens", chunk) for chunk in ask.prompt.chunks]
        read = partial(messages.tokens_of, pieces, self._serving.vision)
        prompt, images = await self.backend.aside(read)
        room = max(1, self._serving.context_tokens - len(prompt))
        params = SamplingParams(
            max_tokens=room if settings.max_tokens is None else settings.max_tokens,
            top_k=None if settings.top_k == -1 else settings.top_k,
            stop_tokens=tuple(map(int, stop)),
            student_topk=min(ask.topk_sample_logprobs, self._vocabulary),
            images=images,
            **settings.model_dump(include={"temperature", "top_p", "seed"}),
        )
        width = 1 + ask.topk_prompt_logprobs
        if (table := ask.target_prompt_logprobs) is not None and table.shape:
            width += table.shape[-1]
        drawn = ask.num_samples * params.max_tokens * (1 + params.student_topk)
        if (logprobs := drawn + len(prompt) * width) > messages.MOST_NUMBERS:
            raise RequestError(
                f"The answer would have up to {logprobs} logprobs; this server gives "
                f"{messages.MOST_NUMBERS} at once: ask for fewer samples, tokens or candidates."
            )
        return tuple(prompt), params

    async def _score(
        self,
        sampler: Sampler,
        ask: types.SampleRequest,
        prompt: tuple[int, ...],
        params: SamplingParams,
        out: pb.SampleResponse,
    ) -> None:
        rows, k = len(prompt) - 1, ask.topk_prompt_logprobs
        last = rows if ask.prompt_logprobs_last_n is None else ask.prompt_logprobs_last_n
        if not (1 <= last <= rows and k <= self._vocabulary):
            raise RequestError(f"{last} of {rows} rows with {k} candidates each cannot be scored.")
        start, targets, ids = len(prompt) - last, None, None
        if (table := ask.target_prompt_logprobs) is not None:
            shape = table.shape or []
            if len(shape) == 2 and shape[0] == rows and shape[1] > 0:
                targets = table.to_numpy(-1)
            if targets is None or targets[: start - 1].max(initial=-1) >= 0:
                raise RequestError(
                    f"target_prompt_logprobs has shape {shape}; it takes [{rows}, K], and ids in "
                    f"the last {last} rows."
                )
            ids = targets[start - 1 :].clip(min=0).tolist()
        read = await sampler.logprobs(
            prompt, start=start, targets=ids, top_k=k, images=params.images
        )
        messages.add_scores(out, ask, read, targets)

    async def _sampler(self, path: str | None) -> Sampler:
        async with self._opening:
            sampler = self._open.pop(path, None)
            if sampler is None:
                serving = self._serving
                sampler = await (
                    serving.open(path, self.store.existing(path)) if path else serving.base()
                )
            self._open[path] = sampler
            if len(self._open) > _OPEN_SAMPLERS:
                oldest = next(iter(self._open))
                await self._open.pop(oldest).aclose()  # its replies in flight are finished
                if oldest is not None and NAMELESS in oldest:
                    remove([self.store.folder(oldest)])
        return sampler


def _gone_error(what: str) -> RequestError:
    return RequestError(
        f"There is no {what} here: it has ended, another model took its place, or the server was "
        "restarted. Open a new ServiceClient and load a checkpoint.",
        status=HTTPStatus.GONE,
    )
