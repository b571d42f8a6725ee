"""Wire formats: bytes in, a validated neutral request out, and the bytes that go back.

Rule: what cannot be honoured is refused with a sentence that names the field; nothing is dropped
silently. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinker_claw import plugins
from tinker_claw.formats.base import WireFormat
from tinker_claw.formats.chat import Chat
from tinker_claw.formats.messages import Messages
from tinker_claw.formats.responses import Responses

FORMATS: dict[str, Callable[[], WireFormat]] = {
    "chat": Chat,
    "messages": Messages,
    "responses": Responses,
}
"""Built-in formats, by name."""


def spoken() -> tuple[WireFormat, ...]:
    """Return an instance of every format: built-in ones, then those of installed packages.

    Raises:
        ConfigError: a plug-in cannot be loaded.
    """
    added = [plugins.load(entry, _make_format) for entry in plugins.added("format").values()]
    return (*(make() for make in FORMATS.values()), *added)


def _make_format(named: Any) -> WireFormat:
    """Make a format of an installed package, and use what its first request would miss."""
    instance = named()
    if not isinstance(instance, WireFormat) or not (instance.about and instance.routes):
        raise TypeError("it is not a class under WireFormat with an `about` and `routes`")
    return instance
