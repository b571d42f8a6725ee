"""Training on ranks: the control process's side.

Rule: if a rank dies or hangs in a command, all are ended and a BackendError is raised; if its
device failed, an OutageError. The next command restarts them, with a fresh policy and no other
model; it fails for a model that was lost with the old ones, until its state is read. After a step
that failed, for whatever reason, the state before it is read by new processes: the old ones are not
trusted. Ranks that do not answer for `_HANGS_S` count as hung.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from local_gpu.config import LocalConfig, Say
from local_gpu.halves import POLICY, Facts, ScoreAsk
from local_gpu.learn.losses import RecordPass, Scored
from local_gpu.model.lora import LoraShape
from local_gpu.ranks.messages import (
    CLOSE,
    Command,
    Failure,
    RankAnswer,
    RankLost,
    Start,
    decode,
    encode,
)
from local_gpu.ranks.torchrun import Ranks
from tinker_claw.errors import BackendError, ClawError, ConfigError, OutageError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

_LOOK_S = 0.5
_LAST_WORDS_S = 5.0
"""Seconds for the other ranks to be ended, and for the log to say why."""
_POLITE_S = 10.0
_NOT_OURS: Final = (
    *("--rdzv", "--standalone", "--node-rank", "--nproc-per-node"),
    "--max-restarts",  # restarted ranks would wait for messages sent to the old ones
)
_APART_S: Final = 3600.0
"""Seconds that a rank waits for others at most. Ranks differ by less within one command; only those
of other machines ever wait for so long."""
_HANGS_S: Final = {"cuda": 3600.0, "cpu": 24 * 3600.0}
"""Seconds without an answer after which ranks hang: many times what a step of large models takes on
GPUs, and of small ones on CPUs."""
_MAKES: Final = frozenset({"create", "read_state", "read_adapter"})
"""Commands that make a model, whatever was there before."""


class RankedLearning:
    """Implements `Learning` by processes. For use by one thread; only `close` may be called from
    another."""

    def __init__(
        self,
        config: LocalConfig,
        *,
        hangs_s: float | None = None,
        start_s: float = 1800.0,
        module: str = "local_gpu.ranks",
        told: Say | None = None,
    ) -> None:
        """Start the ranks, and wait until each has loaded the base model.

        Args:
            config: of every rank; `ranks`, `train_gpus` and `torchrun` say where they run.
            hangs_s: timeout of a command; None: by the device.
            start_s: timeout for starting them, on every machine, and loading the model.
            module: what each rank runs.
            told: called with what is being waited for.

        Raises:
            ConfigError: a setting does not fit.
            BackendError: they did not start; the sentence has the end of their log.
        """
        self._config = config = _placed(config)
        _check(config)
        device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
        self._hangs_s = hangs_s or _HANGS_S["cuda" if device == "cuda" else "cpu"]
        self._start_s = start_s
        self._module = module
        self._told = told
        self._ranks: Ranks | None = None
        self._models = set[str]()  # models that new ranks would lack, or have in another state
        self._lost = set[str]()  # those that died with the ranks
        self._cause = ""  # why they died, until these are loaded again
        self._failed = False  # a step failed in these processes
        self._closed = False
        self._begun = False  # they have been ready once
        self._calling = threading.Lock()
        self.facts = self._start()
        self._begun = True

    def create(self, model: str, shape: LoraShape, seed: int) -> None:
        self._call("create", model, shape, seed, model=model)

    def drop(self, model: str) -> None:
        self._lost.discard(model)
        if model in self._models:
            self._call("drop", model)
            self._models.discard(model)

    def step(self, passes: Sequence[LossPass], adam: Adam, model: str = POLICY) -> StepReport:
        self._models.add(model)
        try:
            return self._call("step", tuple(passes), adam, model, model=model)
        except ClawError:
            self._failed = model not in self._lost  # else no process has it that took the step
            raise

    def forward_backward(self, wanted: RecordPass, model: str) -> list[Scored]:
        return self._call("forward_backward", wanted, model, model=model)

    def forward(self, wanted: RecordPass, model: str) -> list[Scored]:
        return self._call("forward", wanted, model, model=model)

    def optim_step(self, adam: Adam, model: str) -> float:
        return self._call("optim_step", adam, model, model=model)

    def discard(self, model: str) -> None:
        self._call("discard", model, model=model)

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        return self._call("score", adapter, tuple(asks))

    def write_adapter(self, folder: Path, model: str = POLICY) -> None:
        self._call("write_adapter", folder, model, model=model)

    def write_probe(self, folder: Path, size: float) -> None:
        self._call("write_probe", folder, size)

    def export_adapter(self, folder: Path, model: str = POLICY) -> None:
        self._call("export_adapter", folder, model, model=model)

    def write_state(self, folder: Path, model: str = POLICY) -> None:
        self._call("write_state", folder, model, model=model)

    def read_state(self, folder: Path, model: str = POLICY) -> None:
        self._call("read_state", folder, model, model=model)

    def read_adapter(self, folder: Path, model: str) -> None:
        self._call("read_adapter", folder, model, model=model)

    def close(self) -> None:
        """End the ranks: idle ones with a command, others at once."""
        self._closed = True
        idle = self._calling.acquire(blocking=False)
        try:
            if (ranks := self._ranks) is not None:
                if idle:
                    with suppress(OSError):
                        ranks.link.send_bytes(encode(Command(CLOSE)))
                    ranks.wait(_POLITE_S)
                ranks.stop()
        finally:
            if idle:
                self._calling.release()

    def _call(self, name: str, *arguments: Any, model: str | None = None) -> Any:
        with self._calling:
            if self._closed:
                raise BackendError("The trainer is closed.")
            if self._ranks is not None and self._ranks.ended():
                self._end("The ranks died while they had nothing to do.")
            if model in self._lost and name not in _MAKES:
                raise OutageError(f"{self._cause} The weights went with them: load a state first.")
            if self._failed and name in _MAKES:
                self._end("The ranks were ended after a step that failed.")
            if self._ranks is None:
                self._start_anew()
                if self._closed:  # meanwhile
                    self._end("The trainer is closed.")
                    raise BackendError("The trainer is closed.")
            answer = self._ask(Command(name, arguments), self._hangs_s, name)
            if model is not None and name in _MAKES:
                self._models.add(model)
                self._lost.discard(model)
            return answer

    def _start_anew(self) -> None:
        """Start the ranks again. Raises OutageError, as it went well before with the same
        settings."""
        try:
            self._start()
        except ClawError as error:
            raise OutageError(f"The ranks do not start again: {error}") from error
        self._failed = False

    def _start(self) -> Facts:
        config = self._config
        count = (
            "a rank, which writes" if config.ranks == 1 else f"{config.ranks} ranks, which write"
        )
        told = f"Starting {count} to {self._log}."
        if config.torchrun:
            told += (
                f" On each other machine, with the model in {config.model} as here, and its own "
                "--node-rank: torchrun --nproc-per-node GPUS "
                f"--node-rank 1 {' '.join(config.torchrun)} -m {self._module}"
            )
        if self._told is not None:
            self._told(told)
        self._ranks = Ranks(
            self._module,
            ranks=config.ranks,
            extra=config.torchrun,
            env=_environment(config),
            log=self._log,
        )
        try:
            # Without the key: ranks of other machines get the config over the network.
            secret = replace(config, sampler_api_key=None)
            start = Start(secret, _APART_S)
            return self._ask(start, self._start_s, "loading the base model")
        except BaseException:
            self._end("The ranks did not start.")
            raise

    def _ask(self, what: Start | Command, seconds: float, name: str) -> Any:
        """Send a message and wait for the value of its answer."""
        ranks = self._ranks
        assert ranks is not None
        reason = f"The ranks were silent for {seconds:.0f} s ({name})"
        until = time.monotonic() + seconds
        try:
            ranks.link.send_bytes(encode(what))
            while not ranks.link.poll(_LOOK_S) and time.monotonic() < until:
                if ranks.ended() and not ranks.link.poll():
                    raise EOFError
            reply = decode(ranks.link.recv_bytes()) if ranks.link.poll() else None
        except (EOFError, OSError):
            reply, reason = None, f"The ranks died ({name})"
        if isinstance(reply, Failure):
            raise reply.error
        if isinstance(reply, RankAnswer):
            return reply.value
        if isinstance(reply, RankLost):
            reason = f"Rank {reply.rank} cannot go on ({name}): {reply.sentence.rstrip('.')}."
            kind = OutageError if reply.outage else BackendError
            raise kind(f"{reason}{self._last_words(ranks, reason)} See {self._log}.")
        reason += "."
        words = self._last_words(ranks, reason)
        raise BackendError(f"{reason}{words} {self._log} ends:\n{ranks.tail()}")

    def _last_words(self, ranks: Ranks, reason: str) -> str:
        """Wait for the ranks to end, end those that remain, and say what comes next."""
        ranks.wait(_LAST_WORDS_S)
        self._end(reason)
        return " They start anew when they are asked again." if self._begun else ""

    def _end(self, why: str) -> None:
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks = None
        self._cause = self._cause if self._lost else why
        self._lost |= self._models
        self._models.clear()

    @property
    def _log(self) -> Path:
        return self._config.root / "logs" / "ranks.log"


def _placed(config: LocalConfig) -> LocalConfig:
    """Return the config for a rank, which takes the first visible GPU: a named one is made the only
    visible one."""
    kind, _, number = config.device.partition(":")
    if kind != "cuda" or not number.isdecimal() or config.ranks > 1:
        return config
    return replace(config, device=kind, train_gpus=config.train_gpus or (int(number),))


def _check(config: LocalConfig) -> None:
    if config.train_gpus and len(config.train_gpus) != config.ranks:
        raise ConfigError(
            f"{len(config.train_gpus)} GPUs are to learn in {config.ranks} ranks: one GPU a rank."
        )
    if ":" in config.device:
        raise ConfigError(f"device {config.device!r} is one GPU; ranks take one each: say cuda.")
    if wrong := [flag for flag in config.torchrun if flag.replace("_", "-").startswith(_NOT_OURS)]:
        raise ConfigError(
            f"{wrong[0]} is not for this machine, which has rank 0: give torchrun --nnodes, "
            "--master-addr and --master-port, and the others their --node-rank."
        )


def _environment(config: LocalConfig) -> dict[str, str]:
    """Environment variables of the ranks besides those of this process."""
    share = max(1, (os.cpu_count() or 1) // config.ranks)
    threads = config.threads or os.environ.get("OMP_NUM_THREADS") or share
    code = str(Path(__file__).parents[2])
    paths = [code, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",  # their output is in the log, whatever ends them
    }
    if config.train_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [name for name in map(str.strip, visible.split(",")) if name] if visible else None
        if names is not None and max(config.train_gpus) >= len(names):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES shows {len(names)} GPUs; number {max(config.train_gpus)} "
                "(from 0) is to learn."
            )
        picked = [names[i] if names else str(i) for i in config.train_gpus]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(picked)
    return env
