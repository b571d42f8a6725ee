"""Checks before the tinker SDK is imported: its release, and an import without torch.

Nothing of it is imported here: an old release may fail to.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from tinker_claw.errors import ConfigError

SDK_VERSION = "0.38.0"


def check_sdk() -> None:
    """Refuse another release of the SDK than the one that this program was written against.

    Raises:
        ConfigError: says which is there and how to get the right one.
    """
    try:
        installed = version("tinker")
    except PackageNotFoundError:
        installed = "missing"
    if installed != SDK_VERSION:
        raise ConfigError(
            f"the tinker package is {installed}, and this program needs exactly {SDK_VERSION}, "
            f"because its wire changes between releases: pip install tinker=={SDK_VERSION}"
        )


@contextmanager
def without_torch() -> Generator[None]:
    """Hide torch from imports inside the block, unless it is imported already.

    The SDK imports it if installed, for tensors that are not used here: three seconds, and a
    quarter of a gigabyte in a gateway that computes nothing. Afterwards torch can be imported.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment] - None makes an import fail
    try:
        yield
    finally:
        del sys.modules["torch"]
