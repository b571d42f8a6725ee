"""The local backend as the gateway's trainer: one policy, with its versions and states.

    root/states/<ref>      the newest, float32, with the optimizer's moments
    root/adapters/<ref>    versions that served, in PEFT's format: what lasts of them
    handover/<ref>         where there is memory for it: versions as they are served, in the base's
                           format, until they are closed

Rule: what is open, being opened or loaded stays, however old. The rest is counted, and the oldest
go; but a version that nobody was answered by goes first, or servers that are away for long would
push out every version that there is to go back to.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from local_gpu.backend import LocalBackend, unheard
from local_gpu.config import LocalConfig
from local_gpu.halves import BASE_REF, POLICY
from local_gpu.learn.losses import LOSSES
from local_gpu.model.files import entries, new_folder, remove, slug, stamp, sweep
from tinker_claw.errors import BackendError
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Capabilities, LossPass, StepReport

_HANDOVER: Final = "tinker-claw-handover-"
_AT_ONCE: Final = 2
"""Versions for which there must be room in memory: one serves while the next is loaded."""


class LocalTrainer:
    """Implements `tinker_claw.policy.Trainer` on this machine. Made by `start`."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._keeping = KeptFiles(config, lambda: self._backend.serving.live())
        self._backend: LocalBackend

    @classmethod
    async def start(
        cls,
        config: LocalConfig,
        say: Callable[[str], None] = unheard,
        away: Callable[[Sequence[str]], object] = len,
    ) -> LocalTrainer:
        """See `LocalBackend.start`, which says what is raised and what is heard."""
        trainer = cls(config)
        await asyncio.to_thread(trainer._keeping.start)
        try:
            trainer._backend = await LocalBackend.start(config, trainer._keeping.adapter, say, away)
        except BaseException:
            await asyncio.to_thread(trainer._keeping.close)
            raise
        return trainer

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model=self._config.name or self._config.model,
            losses=frozenset(LOSSES),
            two_d_targets=True,
            student_topk=True,
            context_tokens=self._backend.serving.context_tokens,
            score_fresh=self._backend.serving.rounds_otherwise,
            constrains=self._backend.serving.constrains,
            sees=self._backend.serving.sees,
        )

    async def train_step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        def step() -> StepReport:
            self._keeping.stepping()
            return self._backend.learning.step(passes, adam)

        return await self._backend.step(step)

    async def publish(self) -> Sampler:
        def write() -> str:
            learning = self._backend.learning
            folder = self._keeping.new_adapter(learning.facts.adapter_bytes)
            learning.write_adapter(folder)
            self._keeping.published(folder.name)
            return folder.name

        return await self.open(await self._backend.run(write))

    async def open(self, ref: str) -> Sampler:
        if ref == BASE_REF:
            return await self.base()
        with self._keeping.opening(ref) as folder:
            return await self._backend.serving.open(ref, folder)

    async def base(self) -> Sampler:
        return await self._backend.serving.base()

    async def save_state(self, name: str) -> str:
        def write() -> str:
            ref = f"{self._keeping.new_state()}-{slug(name)}"
            self._backend.learning.write_state(self._keeping.state(ref))
            self._keeping.saved(ref)
            return ref

        return await self._backend.run(write)

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        def read() -> None:
            learning, folder = self._backend.learning, self._keeping.state(ref)
            if moments:
                learning.read_state(folder)
            else:
                learning.read_adapter(folder, POLICY)
            self._keeping.loaded(ref)

        await self._backend.run(read)

    async def export_adapter(self, directory: Path) -> None:
        await self._backend.run(lambda: self._backend.learning.export_adapter(directory))

    async def aclose(self) -> None:
        """Close every sampler that is still open, then the half that learns."""
        try:
            await self._backend.aclose()
        finally:
            await asyncio.to_thread(self._keeping.close)


class KeptFiles:
    """The folders of a trainer's versions and states, and which of them stay.

    The trainer says what becomes of its weights. Whatever changes them blocks.
    """

    def __init__(self, config: LocalConfig, live: Callable[[], frozenset[str]]) -> None:
        """`live`: refs of open samplers, asked in any thread."""
        self._config = config
        self._live = live
        self._adapters = config.root / "adapters"
        self._states = config.root / "states"
        self._memory: MemoryFolder | None = None
        self._opening: list[str] = []
        self._loaded: str | None = None
        # Refs of the present weights:
        self._versions: list[str] = []
        self._saved: list[str] = []
        self._origin: str | None = None
        """State that the present weights were loaded from."""

    def start(self) -> None:
        """Remove what killed processes have left behind."""
        for folder in (self._adapters, self._states):
            sweep(folder)
        if self._config.handover is not None:
            with suppress(OSError):  # there is no such place here, or none for us
                self._memory = MemoryFolder(self._config.handover)

    def close(self) -> None:
        if self._memory is not None:
            try:
                self._settle()
            finally:
                self._memory.close()

    def new_adapter(self, size: int) -> Path:
        """The folder of a version of so many bytes: in memory where it has room."""
        ref = stamp(self._adapters)
        if self._memory is not None and self._memory.free() >= _AT_ONCE * size:
            return self._memory.folder / ref
        return self._adapters / ref

    def new_state(self) -> str:
        return stamp(self._states)

    def adapter(self, ref: str) -> Path:
        """Raises BackendError for what is no ref."""
        lasting = _inside(self._adapters, ref)
        if self._memory is not None and (served := self._memory.folder / ref).is_dir():
            return served
        return lasting

    def state(self, ref: str) -> Path:
        """Raises BackendError for what is no ref."""
        return _inside(self._states, ref)

    @contextmanager
    def opening(self, ref: str) -> Generator[Path]:
        """Keep an adapter while it is read."""
        self._opening.append(ref)
        try:
            yield self.adapter(ref)
        finally:
            self._opening.remove(ref)

    def stepping(self) -> None:
        """Record that the weights are about to change."""
        self._settle()
        self._versions, self._saved, self._origin = [], [], None

    def published(self, ref: str) -> None:
        """Record that the weights are published as `ref`."""
        self._versions.append(ref)
        if self._saved or self._origin:
            self._settle()
        if self._memory is not None:
            _prune(
                self._memory.folder,
                0,
                lambda ref: self._in_use(ref) or not (self._adapters / ref).exists(),
            )
        _prune(self._adapters, self._config.keep_adapters, self._in_use)

    def saved(self, ref: str) -> None:
        """Record that the weights and moments are saved as `ref`."""
        self._saved.append(ref)
        self._settle()
        _prune(self._states, self._config.keep_states, {ref, self._loaded}.__contains__)

    def loaded(self, ref: str) -> None:
        """Record that the weights come from the saved state `ref`.

        Versions of the weights before that are closed by now have answered nobody: the ones that
        serve, and that learning continues from, are open.
        """
        used = {*self._opening, *self._live()}
        kept = [version for version in self._versions if version in used]
        for version in self._versions:
            if version not in used:
                remove([self.adapter(version), self._adapters / version])
        if self._versions and not kept:
            remove(self.state(state) for state in self._saved if state != ref)
        self._versions = kept
        self.stepping()
        self._loaded = self._origin = ref

    def _settle(self) -> None:
        """Copy versions of the present weights to disk, so that their refs outlive the process.

        They are links to files of a state, which take no room and no time, where one was saved; a
        server rounds its float32 as it was rounded for the memory.
        """
        state = self._saved[-1] if self._saved else self._origin
        for version in self._versions:
            lasting = self._adapters / version
            source = self.state(state) if state else self.adapter(version)
            if lasting.exists() or not source.exists():
                continue
            with new_folder(lasting) as draft:
                for file in source.glob("adapter_*"):
                    try:
                        os.link(file, draft / file.name)
                    except OSError:  # from memory to disk, or a file system without links
                        shutil.copyfile(file, draft / file.name)

    def _in_use(self, version: str) -> bool:
        return version in (*self._versions[-1:], *self._opening) or version in self._live()


class MemoryFolder:
    """A folder of this process in memory-backed storage.

    Rule: who lives has its folder locked, in whatever container; a folder that nobody has locked
    was left by a process that was killed, and goes.
    """

    def __init__(self, place: Path) -> None:
        """Raises OSError if there is no such place, or nothing can be written there."""
        for left in place.glob(f"{_HANDOVER}*"):
            with suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{_HANDOVER}", dir=place))
        self._held = ExitStack()
        self._held.enter_context(_locked(draft))
        self.folder = draft.rename(place / f"{_HANDOVER}{token_hex(8)}")

    def free(self) -> int:
        """Bytes."""
        return shutil.disk_usage(self.folder).free

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._held.close()


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Raises OSError if somebody else has it locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _prune(folder: Path, keep: int, spare: Callable[[str], bool]) -> None:
    """Remove the oldest entries but `keep`, and those that `spare` names, never.

    Each is asked about when its turn comes: it may be opened meanwhile.
    """
    names = sorted(entries(folder))
    remove(folder / n for n in names[: max(0, len(names) - keep)] if not spare(n))


def _inside(folder: Path, ref: str) -> Path:
    """The entry of that name; a ref is never a path."""
    if Path(ref).name != ref or ref in ("", ".."):
        raise BackendError(f"{ref!r} is not the name of anything in {folder}.")
    return folder / ref
