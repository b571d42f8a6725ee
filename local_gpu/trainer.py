"""The local backend as the gateway's trainer: one policy, with its versions and states.

    root/states/<ref>      float32, with the optimizer's moments
    root/adapters/<ref>    versions that serve or have served, in PEFT's format and the base's type

Rule: what is open, being opened or loaded stays, however old. Of the rest `policy.to_keep` says
what stays; but a version that answered no request is removed first, or a long outage of the servers
would push out every version to go back to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from local_gpu.backend import LocalBackend
from local_gpu.config import LocalConfig
from local_gpu.halves import BASE_REF
from local_gpu.learn.losses import LOSSES
from local_gpu.model.files import entries, remove, slug, stamp, sweep, written
from local_gpu.sample.member import PoolOptions
from tinker_claw.errors import BackendError
from tinker_claw.policy import Sampler, to_keep
from tinker_claw.types import Adam, Capabilities, Charge, LossPass, StepReport, uncharged


class LocalTrainer:
    """Implements `tinker_claw.policy.Trainer` on this machine. Made by `start`."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._files = VersionFiles(config, lambda: self._backend.serving.live())
        self._backend: LocalBackend

    @classmethod
    async def start(cls, config: LocalConfig, options: PoolOptions | None = None) -> LocalTrainer:
        """Start the trainer. For arguments and errors see `LocalBackend.start`."""
        trainer = cls(config)
        adapter = trainer._files.adapter
        trainer._backend = await LocalBackend.start(config, adapter, options)
        return trainer

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model=self._config.name or self._config.model,
            losses=frozenset(LOSSES),
            two_d_targets=True,
            student_topk=True,
            context_tokens=self._backend.serving.context_tokens,
            score_fresh=self._backend.serving.rounds_otherwise,
            sees=self._backend.serving.sees,
            trains_images=self._backend.serving.sees and self._backend.learning.facts.trains_images,
        )

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        def step() -> StepReport:
            self._files.stepping()
            return self._backend.learning.step(passes, adam)

        return await self._backend.step(step)

    async def publish(self) -> Sampler:
        def write() -> str:
            folder = self._files.new_adapter()
            self._backend.learning.write_adapter(folder)
            self._files.published(folder.name)
            return folder.name

        return await self.open(await self._backend.run(write))

    async def open(self, ref: str) -> Sampler:
        if ref == BASE_REF:
            return await self.base()
        with self._files.opening(ref) as folder:
            return await self._backend.serving.open(ref, folder)

    async def base(self) -> Sampler:
        return await self._backend.serving.base()

    async def save_state(self, name: str) -> str:
        def write() -> str:
            ref = f"{self._files.new_state()}-{slug(name)}"
            self._backend.learning.write_state(self._files.state(ref))
            self._files.saved(ref)
            return ref

        return await self._backend.run(write)

    async def load_state(self, ref: str, *, moments: bool = True) -> None:
        def read() -> None:
            self._backend.learning.read_state(self._files.state(ref), moments)
            self._files.loaded(ref)

        await self._backend.run(read)

    async def export_adapter(self, directory: Path) -> None:
        await self._backend.run(lambda: self._backend.learning.export_adapter(directory))

    def forget(self) -> None:
        self._backend.serving.forget()

    async def aclose(self) -> None:
        """Close every sampler that is still open, then the training half."""
        await self._backend.aclose()


class VersionFiles:
    """The folders of a trainer's versions and states, and which of them stay.

    The trainer reports what happens to its weights. Methods that change folders block.
    """

    def __init__(self, config: LocalConfig, live: Callable[[], frozenset[str]]) -> None:
        """`live`: refs of open samplers, called in any thread."""
        self._config = config
        self._live = live
        self._adapters = config.root / "adapters"
        self._states = config.root / "states"
        self._opening: list[str] = []
        self._loaded: str | None = None
        # Refs of the present weights:
        self._versions: list[str] = []
        self._saved: list[str] = []
        for folder in (self._adapters, self._states):
            sweep(folder)

    def new_adapter(self) -> Path:
        return self._adapters / stamp(self._adapters)

    def new_state(self) -> str:
        return stamp(self._states)

    def adapter(self, ref: str) -> Path:
        """Raises BackendError for what is no ref."""
        return _inside(self._adapters, ref)

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
        self._versions, self._saved = [], []

    def published(self, ref: str) -> None:
        """Record that the weights are published as `ref`."""
        self._versions.append(ref)
        _prune(self._adapters, self._config.keep_adapters, self._in_use)

    def saved(self, ref: str) -> None:
        """Record that the weights and moments are saved as `ref`."""
        self._saved.append(ref)
        _prune(self._states, self._config.keep_states, {ref, self._loaded}.__contains__)

    def loaded(self, ref: str) -> None:
        """Record that the weights come from the saved state `ref`.

        If no version of the weights before is open by now, they have answered no request and are
        removed: versions that serve, and that training continues from, are open.
        """
        if self._versions and not {*self._opening, *self._live()}.intersection(self._versions):
            remove(map(self.adapter, self._versions))
            remove(self.state(state) for state in self._saved if state != ref)
        self.stepping()
        self._loaded = ref

    def _in_use(self, version: str) -> bool:
        return version in (*self._versions[-1:], *self._opening) or version in self._live()


def _prune(folder: Path, keep: int, spare: Callable[[str], bool]) -> None:
    """Remove the entries that `to_keep` leaves out, except those for which `spare` is true.

    `spare` is called right before each removal: an entry may be opened meanwhile.

    Args:
        keep: how many of the newest stay.
    """
    times = {name: at for name in entries(folder) if (at := written(name)) is not None}
    remove(folder / name for name in sorted(times.keys() - to_keep(times, keep)) if not spare(name))


def _inside(folder: Path, ref: str) -> Path:
    """Return the entry of that name; a ref that is a path is refused."""
    if Path(ref).name != ref or ref in ("", ".."):
        raise BackendError(f"{ref!r} cannot name a state or an adapter: {folder} has none such.")
    return folder / ref
