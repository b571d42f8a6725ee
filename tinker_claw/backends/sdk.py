"""Which release of the tinker SDK is installed. Imports none of it: an old one may not import."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from tinker_claw.errors import ConfigError

SDK_VERSION: Final = "0.38.0"


def check_sdk() -> None:
    """Refuse another release of the SDK than the one that this program was written against.

    Raises:
        ConfigError: says which is there and how to get the right one.
    """
    try:
        found = version("tinker")
    except PackageNotFoundError:
        found = "missing"
    if found != SDK_VERSION:
        raise ConfigError(
            f"the tinker package is {found}, and this program needs exactly {SDK_VERSION}, because "
            f"its wire changes between releases: pip install tinker=={SDK_VERSION}"
        )
