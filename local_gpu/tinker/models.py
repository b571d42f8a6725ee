"""Operations of clients on models in training: each request once, and in its turn.

Rule: a request that was sent twice, with the same model and seq_id (or session and model_seq_id),
is carried out once, and the second one gets the id of the first. An error in a numbered request is
reported by its future, in its turn: its number is used up all the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from local_gpu.tinker import requests
from local_gpu.tinker.futures import CREATION, Answer, Promises
from local_gpu.tinker.sampling import Samplers
from local_gpu.tinker.sessions import Session, Sessions
from local_gpu.tinker.store import Place
from local_gpu.tinker.training import Shared, TrainingRun
from local_gpu.tinker.wire import parse_forward_backward
from tinker_claw.errors import RequestError

Work: TypeAlias = Callable[[], Awaitable[Answer]]
_METADATA = 1 << 16
"""Most characters of metadata: every listing reads them."""
_ANSWER_TYPES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


class Models:
    """Every method returns the id under which `retrieve_future` gives the result."""

    def __init__(
        self, shared: Shared, sessions: Sessions, samplers: Samplers, promises: Promises
    ) -> None:
        self._shared = shared
        self._sessions = sessions
        self._samplers = samplers
        self._promises = promises

    def create(self, ask: requests.CreateModel) -> str:
        """Create a model. Raises RequestError at once: there is no turn yet that could report
        it."""
        session = self._sessions.get(ask.session_id)
        lora = ask.lora_config or requests.Lora()
        check_base(self._shared, ask.base_model)
        _check_lora(lora, self._shared.config.max_rank)
        _check_optimizer(ask.optimizer_config)
        run = self._run(session, ask.model_seq_id, ask.user_metadata)
        return self._in_turn(run, CREATION, lambda: run.create(lora))

    def load_weights(self, ask: requests.LoadWeights) -> str:
        if ask.model_id is not None:
            return self._of(
                ask.model_id,
                ask.seq_id,
                lambda run: run.load(ask.path, with_optimizer=ask.optimizer),
            )
        if ask.session_id is None or ask.model_seq_id is None:
            raise RequestError("load_weights needs model_id, or session_id with model_seq_id.")
        session = self._sessions.get(ask.session_id)
        if ask.base_model is not None:
            check_base(self._shared, ask.base_model)
        _check_optimizer(ask.optimizer_config or requests.Optimizer())
        run = self._run(session, ask.model_seq_id, ask.user_metadata)
        return self._in_turn(
            run, CREATION, lambda: run.create_from(ask.path, with_optimizer=ask.optimizer)
        )

    def forward_backward(self, body: bytes) -> str:
        message = parse_forward_backward(body)
        return self._of(
            message.model_id, message.seq_id or None, lambda run: run.forward_backward(message)
        )

    def optim_step(self, ask: requests.OptimStep) -> str:
        return self._of(ask.model_id, ask.seq_id, lambda run: run.optim_step(ask))

    def save_weights(self, ask: requests.SaveWeights) -> str:
        return self._of(ask.model_id, ask.seq_id, lambda run: self._save(run, "weights", ask))

    def save_weights_external(self, ask: requests.SaveExternal) -> str:
        async def save(run: TrainingRun) -> Answer:
            if ask.age_encryption_recipients:
                raise RequestError("age_encryption_recipients: nothing is encrypted here.")
            return await self._save(run, "external_weights", ask)

        return self._of(ask.model_id, ask.seq_id, save)

    def save_weights_for_sampler(self, ask: requests.SaveForSampler) -> str:
        def save(run: TrainingRun) -> Awaitable[Answer]:
            if ask.path is None:
                return self._save_nameless(run, ask)
            return self._save(run, "sampler_weights", ask)

        return self._of(ask.model_id, ask.seq_id, save)

    def _of(
        self,
        model_id: str,
        seq_id: int | None,
        work: Callable[[TrainingRun], Awaitable[Answer]],
    ) -> str:
        run = self._sessions.run(model_id)
        return self._in_turn(run, seq_id, lambda: work(run))

    def _in_turn(self, run: TrainingRun, seq_id: int | None, work: Work) -> str:
        number = run.turns.unnumbered() if seq_id is None else seq_id
        run.asked_at = datetime.now(UTC)
        if known := run.turns.requests.get(number):
            return known

        async def numbered() -> Answer:
            async with run.turns.turn(number):
                return await work()

        request_id = self._promises.start(run.session_id, numbered)
        run.turns.requests[number] = request_id
        return request_id

    def _run(self, session: Session, number: int, metadata: dict[str, Any] | None) -> TrainingRun:
        told = {key: str(value) for key, value in (metadata or {}).items()}
        run = TrainingRun(session.id, number, told or None, self._shared)
        if run.id not in session.runs:
            check_metadata(told)
            self._sessions.check_room(len(session.runs), "models in this session")
        return session.runs.setdefault(run.id, run)

    async def _save(self, run: TrainingRun, kind: str, ask: requests.SaveWeights) -> Answer:
        if ask.path is None:
            raise RequestError("A checkpoint needs a name.")
        place = Place.of(run.id, kind, ask.path)
        check_metadata(ask.user_metadata or {})
        facts = {"user_metadata": ask.user_metadata}
        await run.save(place, overwrite=ask.overwrite, facts=facts)
        await self._samplers.close(place)  # samplers of what was overwritten
        return {"type": _ANSWER_TYPES[kind], "path": place.path}

    async def _save_nameless(self, run: TrainingRun, ask: requests.SaveForSampler) -> Answer:
        """Weights that only this session's sampling client will use."""
        session = self._sessions.get(run.session_id)
        number = ask.sampling_session_seq_id
        if number is None:
            raise RequestError("save_weights_for_sampler needs path or sampling_session_seq_id.")
        place = Place.of(run.id, "sampler_weights", f"_ephemeral-{number:06d}")
        await run.save(place, overwrite=True, facts={"ephemeral": True})
        for old in run.retire_ephemeral(place):
            await self._shared.backend.aside(partial(self._shared.store.remove, old))
            await self._samplers.close(old)
        sampler = session.add_sampler(number, place.path)
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}


def check_base(shared: Shared, name: str) -> None:
    if name != shared.config.offered:
        raise RequestError(
            f"base_model {name!r} is not served here; this server serves {shared.config.offered}.",
            status=HTTPStatus.NOT_FOUND,
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    if sum(len(key) + len(value) for key, value in metadata.items()) > _METADATA:
        raise RequestError(f"user_metadata has more than {_METADATA} characters.")


def _check_lora(lora: requests.Lora, max_rank: int) -> None:
    if lora.unknown is not None:
        raise _unprocessable(
            f"lora_config has a field {lora.unknown!r}, which is not served here: it takes rank, "
            "seed, train_mlp, train_attn and train_unembed, and alpha is 32."
        )
    if not 1 <= lora.rank <= max_rank:
        raise _unprocessable(
            f"rank {lora.rank} is not trained here: take one in 1..{max_rank} in "
            "create_lora_training_client."
        )
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise _unprocessable(
            "train_mlp, train_attn and train_unembed are all False, so nothing would be trained."
        )


def _check_optimizer(optimizer: requests.Optimizer) -> None:
    if optimizer.type != "adamw":
        raise _unprocessable(
            f"optimizer {optimizer.type!r} is not served here; use adamw (AdamOptimizerConfig)."
        )
    if optimizer.unknown is not None:
        raise _unprocessable(
            f"optimizer_config has a field {optimizer.unknown!r}, which is not served here."
        )


def _unprocessable(sentence: str) -> RequestError:
    return RequestError(sentence, status=HTTPStatus.UNPROCESSABLE_ENTITY)
