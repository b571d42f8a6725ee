"""Tell torch's errors apart: out of memory, device fault, or invalid input.

Rule: decided here alone, by class where torch has one and else by the library's message.
"""

from __future__ import annotations

from typing import Final

import torch

_NO_ROOM: Final = (
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Messages of an out-of-memory error from the CPU's allocator, CUDA's driver, and libraries that
allocate beside PyTorch."""
_REFUSED: Final = (
    "invalid argument",
    "invalid configuration argument",
    "_INVALID_VALUE",
    "_BAD_PARAM",
    "_NOT_SUPPORTED",
)
"""Messages of a refused call: the arguments were wrong, and the device works as before."""
_BROKEN: Final = (
    "CUDA error",
    "CUDA driver error",
    "HIP error",
    "device-side assert",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "cuDNN error",
    "CUSOLVER_STATUS_",
    "CUSPARSE_STATUS_",
    "NCCL error",
    "NCCL Error",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
)
"""Messages of a device fault in a RuntimeError: not every library has an error class of its own."""


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means out of memory. PyTorch has a class of its own only for what it
    allocates itself, on a GPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in _NO_ROOM)


def device_fault(error: BaseException) -> str | None:
    """Return the device's own message, if a device fault caused this error, or None.

    None also if it was only out of memory. After a device fault every further call of the process
    may fail, whatever is computed.
    """
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, RuntimeError) and _is_the_devices(at):
            return str(at).strip().partition("\n")[0]
        at = at.__cause__ or at.__context__
    return None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _is_the_devices(error: RuntimeError) -> bool:
    words = str(error)
    if out_of_memory(error) or any(sign in words for sign in _REFUSED):
        return False
    return isinstance(error, torch.AcceleratorError) or any(sign in words for sign in _BROKEN)
