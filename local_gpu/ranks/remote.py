"""Training on ranks: the control process's side.

Rule: if a rank dies or hangs in a command, all are ended and a BackendError is raised; if its
device failed or its memory was full, an OutageError. The next command starts them again, with a
fresh policy; one that needs the weights that were lost fails until a state is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from local_gpu.config import LocalConfig, Say
from local_gpu.halves import Facts, ScoreAsk
from local_gpu.ranks.messages import BUILD, Failure, RankAnswer, RankCommand, RankLost
from local_gpu.ranks.processes import Processes, RanksLostError
from local_gpu.ranks.rank import Build, build_learner
from tinker_claw.errors import BackendError, ClawError, ConfigError, OutageError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

_HANGS_S: Final = {"cuda": 3600.0, "cpu": 24 * 3600.0}
"""Seconds without an answer after which ranks hang: many times what a step of large models takes on
GPUs, and of small ones on CPUs."""
_OF_WEIGHTS: Final = frozenset({"step", "write_adapter", "export_adapter", "write_state"})
"""Commands that need the policy's weights."""


class RankedLearning:
    """Implements `Learning` by processes. For use by one thread; only `close` may be called from
    another."""

    def __init__(
        self,
        config: LocalConfig,
        *,
        hangs_s: float | None = None,
        start_s: float = 1800.0,
        build: Build = build_learner,
        say: Say | None = None,
    ) -> None:
        """Start the ranks, and wait until each has loaded the base model.

        Args:
            config: of every rank; `ranks` and `train_gpus` say where they run.
            hangs_s: timeout of a command; None: by the device.
            start_s: timeout for loading the model.
            build: makes each rank's learner, in its process.
            say: called with what is being waited for.

        Raises:
            ConfigError: a setting does not fit.
            BackendError: they did not start; the sentence has the end of their log.
        """
        self._config = config = _placed(config)
        _check(config)
        device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
        self._hangs_s = hangs_s or _HANGS_S["cuda" if device == "cuda" else "cpu"]
        self._start_s = start_s
        self._build = build
        self._say = say
        self._ranks: Processes | None = None
        self._learned = False
        """Whether the policy is another than that of new ranks."""
        self._lost: str | None = None
        """Why the policy was lost with the ranks, until a state is loaded."""
        self._closed = False
        self._begun = False  # they have been ready once
        self.facts = self._start()
        self._begun = True

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        self._learned = True
        return self._call("step", tuple(passes), adam)

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        return self._call("score", adapter, tuple(asks))

    def write_adapter(self, folder: Path) -> None:
        self._call("write_adapter", folder)

    def write_probe(self, folder: Path, size: float) -> None:
        self._call("write_probe", folder, size)

    def export_adapter(self, folder: Path) -> None:
        self._call("export_adapter", folder)

    def write_state(self, folder: Path) -> None:
        self._call("write_state", folder)

    def read_state(self, folder: Path, moments: bool = True) -> None:
        self._call("read_state", folder, moments)
        self._learned, self._lost = True, None

    def close(self) -> None:
        """End the ranks at once: files appear whole or not at all."""
        self._closed = True
        if (ranks := self._ranks) is not None:
            ranks.stop()

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._closed:
            raise BackendError("The trainer is closed.")
        if self._ranks is not None and (dead := self._ranks.ended()) is not None:
            self._end(f"{dead.sentence} while it had nothing to do.")
        if self._lost is not None and name in _OF_WEIGHTS:
            raise OutageError(f"{self._lost} The weights went with them: load a state first.")
        if self._ranks is None:
            try:
                self._start()
            except ClawError as error:  # it went well before, with the same settings
                raise OutageError(f"The ranks do not start again: {error}") from error
        return self._ask(RankCommand(name, arguments), self._hangs_s)

    def _start(self) -> Facts:
        config = self._config
        if self._say is not None:
            self._say(f"Starting {config.ranks} ranks, which write to {self._log}.")
        self._ranks = Processes(self._build, config, self._log)
        try:
            return self._ask(RankCommand(BUILD), self._start_s)
        except BaseException:
            self._end("The ranks did not start.")
            raise

    def _ask(self, command: RankCommand, seconds: float) -> Any:
        """Have the ranks carry out a command; return rank 0's value, or raise the first failure."""
        ranks = self._ranks
        assert ranks is not None
        try:
            if self._closed:  # meanwhile
                raise BackendError("The trainer is closed.")
            answers = ranks.ask(command, seconds)
        except RanksLostError as error:
            raise self._lost_error(ranks, error.why, command.name) from error
        if (failure := next((a for a in answers if isinstance(a, Failure)), None)) is not None:
            raise failure.error
        assert isinstance(answers[0], RankAnswer)
        return answers[0].value

    def _lost_error(self, ranks: Processes, why: RankLost, name: str) -> BackendError:
        """End all ranks; return the error that says why, and what comes next."""
        reason = f"The ranks cannot go on ({name}): {why.sentence.rstrip('.')}."
        self._end(reason)
        if self._closed:
            return BackendError("The trainer is closed.")
        if why.budget is not None:
            self._config = replace(self._config, micro_batch_tokens=why.budget)
            most = "one sample each" if why.budget == 1 else f"at most {why.budget:,} tokens"
            reason += f" The next passes have {most}."
        if self._begun:
            reason += " They start anew when they are asked again."
        if why.outage or why.budget is not None:
            return OutageError(f"{reason} See {self._log}.")
        return BackendError(f"{reason} {self._log} ends:\n{ranks.tail()}")

    def _end(self, why: str) -> None:
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks = None
        if self._learned:
            self._learned, self._lost = False, why

    @property
    def _log(self) -> Path:
        return self._config.root / "logs" / "ranks.log"


def _placed(config: LocalConfig) -> LocalConfig:
    """Return the config for ranks, which know a GPU by its number in `train_gpus`."""
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
