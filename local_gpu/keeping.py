"""Which adapters and states of a trainer stay on disk.

Rule: what is open, being opened or loaded stays, however old. The rest is counted, and the oldest
go; but a version that could not be published goes first, or servers that are away for long would
push out every version that there is to go back to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from local_gpu.config import LocalConfig
from local_gpu.files import prune, remove, stamp
from tinker_claw.errors import BackendError


class Keeping:
    """Told by the trainer what becomes of its versions. `prune_*` and `drop` block."""

    def __init__(self, config: LocalConfig, live: Callable[[], frozenset[str]]) -> None:
        """`live`: refs of open samplers, asked in any thread."""
        self._config = config
        self._live = live
        self._adapters = config.root / "adapters"
        self._states = config.root / "states"
        self._opening: list[str] = []
        self._loaded: str | None = None
        self._unpublished: list[Path] = []
        """The state of the weights in hand, until they are published."""
        self._void: list[Path] = []
        """Of versions that nobody knows of, as they were not published."""

    def new_adapter(self) -> str:
        return stamp(self._adapters)

    def new_state(self) -> str:
        return stamp(self._states)

    def adapter(self, ref: str) -> Path:
        """Raises BackendError for what is no ref."""
        return _inside(self._adapters, ref)

    def state(self, ref: str) -> Path:
        """Raises BackendError for what is no ref."""
        return _inside(self._states, ref)

    @contextmanager
    def opening(self, ref: str) -> Generator[None]:
        """Keep an adapter while it is read."""
        self._opening.append(ref)
        try:
            yield
        finally:
            self._opening.remove(ref)

    def stepped(self) -> None:
        """The weights are others than before."""
        self._unpublished = []

    def saved(self, ref: str) -> None:
        """The weights in hand have this state."""
        self._unpublished = [self.state(ref)]

    def published(self) -> None:
        """They have a version."""
        self._unpublished = []

    def not_published(self, ref: str) -> None:
        """They have none, as this adapter could not be opened."""
        self._void += [self.adapter(ref), *self._unpublished]

    def loaded(self, ref: str) -> None:
        """They are those of this state."""
        self._loaded = ref
        self._unpublished = []

    def drop(self) -> None:
        """Remove what was not published, after a state was loaded in place of it."""
        void, self._void = self._void, []
        remove(folder for folder in void if folder.name != self._loaded)

    def prune_adapters(self, newest: str) -> None:
        # Each is asked about when its turn comes: one may be opened meanwhile.
        prune(
            self._adapters,
            self._config.keep_adapters,
            lambda ref: ref == newest or ref in self._opening or ref in self._live(),
        )

    def prune_states(self, newest: str) -> None:
        prune(self._states, self._config.keep_states, {newest, self._loaded}.__contains__)


def _inside(folder: Path, ref: str) -> Path:
    """The entry of that name; a ref is never a path."""
    if Path(ref).name != ref or ref in ("", ".."):
        raise BackendError(f"{ref!r} is not the name of anything in {folder}.")
    return folder / ref
