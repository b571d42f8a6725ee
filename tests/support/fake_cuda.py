"""Tensors that say they are on a GPU, in a process without one.

Their values are on the CPU and real, so whatever is computed comes out; but an operation that is
given tensors of both devices raises, as CUDA would, and whatever makes the host wait for the GPU
is noted. Flash attention, which CUDA alone has, is spelt out by its formula, with what its kernels
insist on. What a GPU computes otherwise, and how fast, does not show here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
_aten: Any = torch.ops.aten
_EITHER = {_aten.copy_.default}
"""Operations that carry values from one device to the other."""
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default}
"""Operations whose indices may be on the CPU; the indexed tensor decides the device."""
_AWAITED = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
}
"""Operations after which the host waits for the GPU's result."""


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        return GPU

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def on_gpu(tensor: Tensor) -> Tensor:
    """Return the same values, claimed to be on the GPU."""
    make: Any = Tensor._make_subclass
    made: Tensor = make(OnGpu, tensor.detach(), tensor.requires_grad)
    return made


class FakeCuda(TorchFunctionMode):
    """A context in which `cuda` is a device."""

    def __init__(self, free: int | None = 1 << 30) -> None:
        """`free`: bytes of its memory; None: not reported."""
        self._free = free
        self.waits: list[str] = []
        """Operations that made the host wait, in order."""
        self.unfused: list[str] = []
        """Calls of attention for which CUDA would compute all scores."""
        self.shares: list[float] = []
        """Shares of its memory that the process was told to keep to."""
        self.emptied = 0
        """Number of calls that gave back the allocator's cached memory."""

    def __enter__(self) -> Any:
        # When a module moves, its parameters would otherwise only get new values.
        self._before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._lazy_init, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
        self._told, torch.cuda.mem_get_info = torch.cuda.mem_get_info, self._memory
        cuda: Any = torch.cuda
        self._others = cuda.set_per_process_memory_fraction, cuda.empty_cache
        cuda.set_per_process_memory_fraction = lambda share, _: self.shares.append(share)
        cuda.empty_cache = self._empty
        self._below = _Below()
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)
        torch.cuda._lazy_init = self._lazy_init
        torch.cuda.mem_get_info = self._told
        torch.cuda.set_per_process_memory_fraction, torch.cuda.empty_cache = self._others
        torch.__future__.set_overwrite_module_params_on_conversion(self._before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.numpy and isinstance(args[0], OnGpu):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.tolist and isinstance(args[0], OnGpu):
            return self._moved(args[0], CPU).tolist()
        if func in (Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__):
            self.waits += ["a number"] * isinstance(args[0], OnGpu)
        if func is scaled_dot_product_attention and isinstance(args[0], OnGpu):
            self._look(*args[:2], kwargs)
        if func is Tensor.cpu:
            func, args = Tensor.to, (args[0], CPU)
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func is not torch.tensor or torch.device(kwargs.get("device") or CPU).type == "cpu":
            return func(*args, **kwargs)
        self.waits.append("to the GPU")
        return on_gpu(func(*args, **{**kwargs, "device": CPU}))

    def _memory(self, device: Any = None) -> tuple[int, int]:
        if self._free is None:
            raise RuntimeError("CUDA error: operation not supported")
        return self._free, 80 << 30

    def _empty(self) -> None:
        self.emptied += 1

    def _look(self, query: Tensor, key: Tensor, settings: dict[str, Any]) -> None:
        grouped = query.shape[1] != key.shape[1]
        masked = settings.get("attn_mask") is not None
        if grouped and (masked or query.dtype not in HALF):
            self.unfused.append(f"{query.shape} {key.shape} {query.dtype} {masked=}")

    def _moved(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """`Tensor.to` of a tensor that is on the GPU, or moves there."""
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        parse: Any = torch._C._nn._parse_to
        device, dtype, _, _ = parse(*args, **kwargs)
        here = isinstance(tensor, OnGpu)
        there = here if device is None else device.type == "cuda"
        if here and there:
            return tensor.to(dtype or tensor.dtype, copy=copy)
        if not (here or there):
            return tensor.to(*args, copy=copy, **kwargs)
        self.waits.append("to the GPU" if there else "to the CPU")
        with _plainly():
            plain = tensor.detach().to(dtype or tensor.dtype, copy=True)
        return on_gpu(plain) if there else plain


class _Below(TorchDispatchMode):
    """Dispatch mode for tensors created on the GPU, also by backward passes, where no function is
    seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(t, OnGpu) for t in tree_leaves((args, kwargs))):
            return _compute(func, args, kwargs)
        if (device := kwargs.get("device")) is None or device.type != "cuda":
            return func(*args, **kwargs)
        return tree_map_only(Tensor, on_gpu, func(*args, **{**kwargs, "device": CPU}))


def _plainly() -> Any:
    disable: Any = torch._C._DisableTorchDispatch
    return disable()


def _plain(tensor: Tensor) -> Tensor:
    """The same values in the same order in memory, on the CPU."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation below autograd."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ours = [isinstance(t, OnGpu) for t in tensors]
    if func in _INDEXED:
        fine = ours[0]
    else:
        # A number, as a tensor without dimensions, goes with everything.
        fine = all(o or t.dim() == 0 for o, t in zip(ours, tensors, strict=True))
    if not fine and func not in _EITHER:
        places = (f"{tuple(t.shape)} {t.device.type}" for t in tensors)
        raise RuntimeError(f"{func} was given tensors on two devices: {', '.join(places)}")
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU}
    with _plainly():
        if func in _FLASH:
            func, (args, kwargs) = _FLASH[func], tree_map_only(OnGpu, _plain, (args, kwargs))
        out = func(*args, **kwargs)
    if func in _AWAITED:
        return out
    return tree_map_only(Tensor, lambda t: t if isinstance(t, OnGpu) else on_gpu(t), out)


# Flash attention, [B, H, n, D] and sequences end to end, [T, H, D]


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attention scores [B, H, n, m], float32; with fewer queries than keys, they are the last
    ones."""
    assert query.dtype in HALF, "FlashAttention only supports fp16 and bf16"
    assert query.stride(-1) == key.stride(-1) == 1, "the last dimension must be contiguous"
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
    n, m = scores.shape[2:]
    hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    return scores.masked_fill(hidden, float("-inf")) if causal else scores


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    scores = _scores(query, key, is_causal, scale)
    values = value.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    out = (scores.softmax(-1) @ values).to(query.dtype)
    # As it comes: a piece of a row that has the heads next to one another.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, scores.logsumexp(-1), None, None, query.shape[2], key.shape[2], None, None, None


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward pass with the given log-sum and output, which may be of more keys than these."""
    assert (cum_seq_q, cum_seq_k, dropout_p) == (None, None, 0)
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert logsumexp.shape == query.shape[:3]
    assert logsumexp.is_contiguous()
    assert logsumexp.dtype == torch.float32
    assert grad_out.dtype == out.dtype == query.dtype
    groups, times = key.shape[1], query.shape[1] // key.shape[1]
    scale = scale or query.shape[-1] ** -0.5
    weights = (_scores(query, key, is_causal, scale) - logsumexp[..., None]).exp()
    grad, k, v = (
        t.float().repeat_interleave(query.shape[1] // t.shape[1], dim=1)
        for t in (grad_out, key, value)
    )
    delta = (grad * out.float()).sum(-1, keepdim=True)
    of_scores = weights * (grad @ v.transpose(2, 3) - delta) * scale
    of_keys, of_values = (
        t.transpose(2, 3) @ other for t, other in ((of_scores, query.float()), (weights, grad))
    )
    summed = (t.unflatten(1, (groups, times)).sum(2).to(key.dtype) for t in (of_keys, of_values))
    return (of_scores @ k).to(query.dtype), *summed


_FLASH: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention.default: _forward,
    _aten._scaled_dot_product_flash_attention_backward.default: _backward,
}
