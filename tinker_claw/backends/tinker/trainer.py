"""LoRA weights at the service: steps, states, published versions.

Rule: a step is whole or void. All of its requests are submitted before any is awaited, so that the
service can take them together; if one of them fails or comes late, the optimizer may have applied
half of the gradients. Those weights are suspect: they are not used any more, and the caller loads a
committed state, which begins a new session.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import tinker
from tinker import types as sdk
from tinker.lib.public_interfaces import APIFuture

from tinker_claw.backends.model_files import may_see
from tinker_claw.backends.tinker.access import ServedModel, address, choose, served_models
from tinker_claw.backends.tinker.convert import loss_of, rows_of, to_sdk
from tinker_claw.backends.tinker.failures import Fault, failing, fault_of, outage, reason
from tinker_claw.backends.tinker.probe import Abilities, probe
from tinker_claw.backends.tinker.sampler import BASE_REF, Scoring, TinkerSampler
from tinker_claw.backends.tinker.session import Address, ServiceSession
from tinker_claw.backends.tinker.storage import Shelf, download, unused_name
from tinker_claw.config.settings import Run, Settings
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ConfigError,
    LearningEndedError,
    StepError,
)
from tinker_claw.ledger.database import FILE, open_read_only
from tinker_claw.policy import KEPT_SAMPLERS, KEPT_STATES
from tinker_claw.types import (
    Adam,
    Capabilities,
    Charge,
    LossPass,
    StepReport,
    Usage,
    uncharged,
)

T = TypeVar("T")

FALLBACK_CONTEXT = 32_768
"""Context length in tokens where neither the service nor the settings give one."""
_EXPORT_S = 86_400
"""Seconds that the service keeps an export, which is downloaded at once."""
_NORM = "unclipped_grad_l2:mean"
"""The gradient's norm before clipping, where a server reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Timeouts of the service, in seconds, and how many of the newest checkpoints stay."""

    sample_timeout_s: float = 300.0
    step_timeout_s: float = 900.0
    save_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    keep_states: int = KEPT_STATES
    keep_samplers: int = KEPT_SAMPLERS


async def offered(
    settings: Settings, *, key: str | None = None, within_s: float = ServiceLimits().start_timeout_s
) -> tuple[Address, ServedModel]:
    """Return the service's address and its entry of the model. Spends nothing.

    A model that it trains no more is returned, with `trainable` false, where a run has trained it.

    Args:
        key: None: TINKER_API_KEY, else the SDK's other sources.

    Raises:
        ConfigError: key, address or model is wrong; the sentence says what to do.
    """
    # The SDK would report exceptions with their stacks; conversations pass through here.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    where = address(settings.run.base_url, key)
    served = await served_models(where, within_s)
    try:
        return where, choose(settings.run.model_name, served, where.base_url)
    except ConfigError:
        if not _has_begun(settings.run):
            raise
    context = {model.name: model.context_tokens for model in served}.get(settings.run.model_name)
    return where, ServedModel(settings.run.model_name, context, trainable=False)


def _has_begun(run: Run) -> bool:
    """Return whether the data directory holds a run of this model."""
    if not (file := run.directory / FILE).exists():
        return False
    with open_read_only(file) as rows:
        begun = rows.one("SELECT 1 FROM versions LIMIT 1") is not None
        return begun and rows.meta("model") == run.model_name


class TinkerTrainer:
    """Implements `tinker_claw.policy.Trainer`. Made by `start`."""

    def __init__(
        self, settings: Settings, limits: ServiceLimits, where: Address, served: ServedModel
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._model = settings.run.model_name
        self._where = where
        offered = served.context_tokens or FALLBACK_CONTEXT
        self._context_tokens = min(offered, settings.run.context_tokens or offered)
        self._trains = served.trainable
        self._training = ServiceSession(where, "training")
        self._sampling = ServiceSession(where, "sampling")
        self._client: tinker.TrainingClient | None = None
        self._suspect = False
        self._abilities: Abilities | None = None
        self._loaded: str | None = None
        # Paths of the present weights:
        self._versions: list[str] = []
        self._saves: list[str] = []
        self._open: Counter[str] = Counter()
        self._states = Shelf(where, limits.keep_states, self._in_use)
        self._samplers = Shelf(where, limits.keep_samplers, self._in_use)

    @classmethod
    async def start(
        cls,
        settings: Settings,
        limits: ServiceLimits = ServiceLimits(),
        *,
        key: str | None = None,
    ) -> TinkerTrainer:
        """Check the key, the address and the model. Spends nothing.

        Args:
            key: None: TINKER_API_KEY, else the SDK's other sources.

        Raises:
            ConfigError: one of them is wrong; the sentence says what to do.
        """
        where, served = await offered(settings, key=key, within_s=limits.start_timeout_s)
        return cls(settings, limits, where, served)

    async def capabilities(self) -> Capabilities:
        if not self._trains:
            return Capabilities(
                model=self._settings.served_name,
                losses=frozenset(),
                two_d_targets=False,
                student_topk=False,
                context_tokens=self._context_tokens,
                sees=may_see(self._settings),
                ended=self._ended(),
            )
        return (await self._probed()).can

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        if not passes:
            raise StepError("The step has no passes.")
        client = await self._ready()
        sparse = (await self._probed()).sparse_targets
        datums = await asyncio.to_thread(lambda: [to_sdk(p, sparse=sparse) for p in passes])
        tokens = [sum(len(d.tokens) - 1 for d in p.datums) for p in passes]
        self._suspect = True  # until everything has come back well, however this ends
        self._versions, self._saves = [], []
        futures: dict[str, APIFuture[Any]] = {}
        for number, (loss_pass, data) in enumerate(zip(passes, datums, strict=True), 1):
            name = f"forward_backward {number} ({loss_pass.loss})"
            futures[name] = client.forward_backward(
                data, loss_pass.loss, dict(loss_pass.config) or None
            )
        futures["optim_step"] = client.optim_step(sdk.AdamParams(**asdict(adam)))
        charge(Usage(trained=sum(tokens)))
        results = await self._training.wait_all(futures, self._limits.step_timeout_s)
        *outputs, stepped = results.values()
        # What an outage took was not computed.
        charge(Usage(trained=-sum(compress(tokens, map(_is_outage, outputs)))))
        try:
            raise_failures(results)
        except BackendError:
            await self._still_offered()
            raise
        report = report_of(passes, outputs, stepped, sum(tokens))
        self._suspect = False
        return report

    async def _still_offered(self) -> None:
        """Raise LearningEndedError where the service trains this model no more."""
        try:
            served = await served_models(self._where, self._limits.start_timeout_s)
        except ConfigError:  # it is away
            return
        if served and not any(model.name == self._model and model.trainable for model in served):
            raise LearningEndedError(self._ended())

    def _ended(self) -> str:
        run = self._settings.run
        export = ["tinker-claw", "export", "--adapter", "FOLDER", "--data-dir", str(run.directory)]
        export += ["--base-url", run.base_url] if run.base_url else []
        return (
            f"{self._where.base_url} does not train {self._model} any more: learning has ended, "
            "and replies continue as long as it samples what was learned. "
            f"`{shlex.join(export)}` fetches that as long as it loads it."
        )

    async def publish(self) -> TinkerSampler:
        client = await self._ready()
        saved = await self._saved("publishing the weights", client.save_weights_for_sampler, "v")
        self._versions.append(saved.path)
        await self._samplers.add(client.model_id, saved.path)
        return await self.open(saved.path)

    async def open(self, ref: str) -> TinkerSampler:
        if ref == BASE_REF:
            return await self.base()
        sampler = self._sampler(ref)
        self._open[ref] += 1  # what is being opened is not deleted either
        try:
            if self._trains:  # else nothing could publish it anew: where it is gone, others answer
                await sampler.connect()
        except BaseException:
            self._open[ref] -= 1
            raise
        return sampler

    async def base(self) -> TinkerSampler:
        return self._sampler(BASE_REF)

    async def save_state(self, name: str) -> str:
        client = await self._ready()
        saved = await self._saved("saving the state", client.save_state, name)
        self._saves.append(saved.path)
        await self._states.add(client.model_id, saved.path)
        return saved.path

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        """Go on from a saved state in a new session.

        The old session is finished only when the new one has the weights. If no version of the
        weights before is open by now, they have answered no request and are deleted: a long outage
        would push out every version to go back to.
        """
        with failing(f"loading the state {ref!r} at --base-url {self._where.base_url}", lost=True):
            fresh, client = await self._loaded_in_new_session(ref, moments)
        old, self._training = self._training, fresh
        self._client, self._suspect, self._loaded = client, False, ref
        await old.aclose()
        if self._versions and not any(map(self._in_use, self._versions)):
            await self._samplers.drop(self._versions)
            await self._states.drop(self._saves)
        self._versions, self._saves = [], []

    async def _loaded_in_new_session(
        self, ref: str, moments: bool, *, again: bool = True
    ) -> tuple[ServiceSession, tinker.TrainingClient]:
        """Load in a new session; retry once if that is lost, too, as when the service restarts."""
        fresh = ServiceSession(self._where, "training")
        try:
            client = await fresh.ask(
                lambda service: (
                    service.create_training_client_from_state_with_optimizer(ref)
                    if moments
                    else service.create_training_client_from_state(ref)
                ),
                self._limits.save_timeout_s,
            )
        except Exception as error:
            await fresh.aclose()
            if again and fault_of(error) is Fault.LOST:
                return await self._loaded_in_new_session(ref, moments, again=False)
            raise
        return fresh, client

    async def export_adapter(self, directory: Path) -> None:
        client = await self._ready()
        what, save = "exporting the adapter", client.save_weights_external
        saved = await self._saved(what, partial(save, ttl_seconds=_EXPORT_S), "export")
        try:
            await download(self._where, saved.path, directory)
        except (tinker.TinkerError, TimeoutError, ValueError, RuntimeError, OSError) as error:
            raise BackendError(f"Tinker: {what} failed: {reason(error)}.") from error

    def forget(self) -> None:
        """Do nothing: no prompt is kept here."""

    async def aclose(self) -> None:
        """Finish both sessions."""
        await asyncio.gather(self._training.aclose(), self._sampling.aclose())

    def _in_use(self, path: str) -> bool:
        """Return whether a version serves from this path, or training would resume from it."""
        return path == self._loaded or self._open[path] > 0

    async def _ready(self) -> tinker.TrainingClient:
        """The training client; made on first use.

        Raises:
            StepError: its weights are suspect.
        """
        if self._suspect:
            raise StepError("The weights at Tinker are suspect; load a committed state first.")
        if self._client is None:
            rank, seed = self._settings.training.lora_rank, self._settings.run.seed
            with failing("creating the LoRA weights"):
                self._client = await self._training.ask(
                    lambda service: service.create_lora_training_client(
                        self._model, rank=rank, seed=seed, train_unembed=False
                    ),
                    self._limits.save_timeout_s,
                )
        return self._client

    async def _probed(self) -> Abilities:
        if self._abilities is None:
            training = await self._ready()
            with failing("opening the base model"):
                sampling = await self._sampling.ask(
                    lambda service: service.create_sampling_client(base_model=self._model),
                    self._limits.start_timeout_s,
                )
            self._abilities = await probe(
                training,
                sampling,
                self._training,
                self._limits.sample_timeout_s,
                model=self._settings.served_name,
                context_tokens=self._context_tokens,
                images=may_see(self._settings),
            )
        return self._abilities

    async def _saved(self, what: str, save: Callable[[str], APIFuture[T]], name: str) -> T:
        with failing(what):
            return await self._training.wait(save(unused_name(name)), self._limits.save_timeout_s)

    def _sampler(self, ref: str) -> TinkerSampler:
        return TinkerSampler(
            ref,
            self._model,
            self._sampling,
            context_tokens=self._context_tokens,
            timeout_s=self._limits.sample_timeout_s,
            scoring=lambda: self._abilities.scoring if self._abilities else Scoring(),
            closed=lambda ref: self._open.subtract([ref]),
        )


def raise_failures(results: Mapping[str, Any]) -> None:
    """Raise what failed, by name; an outage only where no failure may be due to the batch."""
    failed = {name: value for name, value in results.items() if isinstance(value, Exception)}
    if not failed:
        return
    failures = "; ".join(f"{name}: {reason(error)}" for name, error in failed.items())
    first = next(iter(failed.values()))
    if not all(map(_is_outage, failed.values())):
        raise StepError(f"The step is void: {failures}.") from first
    raise outage("a step", failures) from first


def _is_outage(result: Any) -> bool:
    """Return whether waiting helps, as nothing is said against the request."""
    return isinstance(result, Exception) and fault_of(result) in (Fault.AWAY, Fault.LOST)


def report_of(
    passes: Sequence[LossPass],
    outputs: Sequence[sdk.ForwardBackwardOutput],
    stepped: sdk.OptimStepResponse,
    tokens: int,
) -> StepReport:
    metrics = stepped.metrics or {}
    try:
        return StepReport(
            losses=tuple(map(loss_of, outputs)),
            logprobs=tuple(
                tuple(
                    rows_of(datum, arrays["logprobs"])
                    for datum, arrays in zip(loss_pass.datums, output.loss_fn_outputs, strict=True)
                )
                for loss_pass, output in zip(passes, outputs, strict=True)
            ),
            grad_norm=float(metrics[_NORM]) if _NORM in metrics else None,
            tokens=tokens,
        )
    except (KeyError, ValueError, AlignmentError) as error:
        raise StepError(f"Tinker's answer to a step is incomplete: {error}.") from error
