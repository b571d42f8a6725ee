"""The base model and modules that share its tensors.

Every live version is a module tree of its own over the same base parameters and buffers, with LoRA
layers of its own; only the adapters take memory.

Rule: base tensors are never written and torch's global random generator is never drawn from.
Modules are built one at a time, across threads: while peft injects layers, it patches for the whole
process how modules register parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, Final, Literal, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from tinker_claw.errors import BackendError, ConfigError

Adapter = Mapping[str, Tensor]
"""LoRA tensors by module path, e.g. `model.layers.0.mlp.up_proj.lora_A.weight`."""

Quantization = Literal["none", "4bit"]
"""Quantization of the base's linear layers."""

_ADAPTER: Final = "default"
BUILDING: Final = Lock()
"""Held while modules are built (see above)."""
_EXPERTS: Final = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Linear layer names that peft takes for experts and routers in a mixture of experts."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The frozen base with the facts that every module over it shares."""

    module: Any
    """A transformers causal LM in eval mode whose parameters take no gradients."""
    source: str
    """The folder or hub id it came from."""
    fingerprint: str
    """Names, shapes and a sample of the values of all parameters, hashed."""
    vocabulary: int
    context_tokens: int
    """Sequence length that the positions were trained for."""
    device: torch.device
    dtype: torch.dtype
    """Number format of activations in the base and in every adapter over it."""
    obstacle: str | None = None
    """Why its sequences cannot share one row of a pass, as a clause; None: they can."""
    notes: tuple[str, ...] = ()
    """Sentences about this model that a user should know."""
    part: tuple[str, str] = ("", "")
    """Prefixes of module paths where this is the text half of a larger model: here, and in the
    checkpoint, e.g. `model.` and `model.language_model.`."""

    @property
    def packs(self) -> bool:
        return self.obstacle is None

    def name_in_files(self, name: str) -> str:
        """Return the name of a module or tensor in the checkpoint, which is what servers know."""
        here, there = self.part
        return there + name.removeprefix(here) if name.startswith(here) else name

    def name_here(self, name: str) -> str:
        """Return the name of a module or tensor here; the reverse of `name_in_files`."""
        here, there = self.part
        return here + name.removeprefix(there) if name.startswith(there) else name


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Size of an adapter. It is on all linear layers but experts, routers and the head."""

    rank: int
    alpha: int
    """The update is scaled by alpha / rank."""
    head: bool = False
    """Whether it is on the output embedding, too. An input embedding tied to that stays as it
    is."""


def clone(module: Any) -> Any:
    """Copy the module tree over the same tensors: new modules, no new parameters or buffers."""
    shared = {id(t): t for t in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, shared)


def with_lora(base: BaseModel, shape: LoraShape, adapter: Adapter) -> Any:
    """A clone of the base carrying `adapter`, in eval mode, rounded to the base's format.

    One format throughout: peft would compute adapters that are float32 over a bfloat16 base in
    float32, which is several times slower on a GPU, and not what a server computes.

    Raises:
        BackendError: the adapter does not fit this base model or this rank.
    """
    with BUILDING:
        module = _injected(base, shape)
        layers = dict(_lora_layers(module))
        _check_fit(base, shape, layers, adapter)
        for name, layer in layers.items():
            value = adapter[name].detach().to(base.device, base.dtype, copy=True)
            layer.weight = nn.Parameter(value, requires_grad=False)
        return module.eval()


def for_sampling(module: Any) -> Any:
    """Replace peft's layers by plain ones with three products, in place.

    At one token per sequence peft's layers are most of what an adapter costs: a model of 30 layers
    has 210 of them. The module cannot be trained any more, and has no adapter parameters.
    """
    layers = [(path, layer) for path, layer in module.named_modules() if hasattr(layer, "lora_A")]
    for path, layer in layers:
        parent, _, last = path.rpartition(".")
        setattr(module.get_submodule(parent), last, _Sampling(layer))
    return module


class _Sampling(nn.Module):
    """Layer without peft's other features: y = W x + B A x alpha / rank, over the same tensors."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer = layer.base_layer
        # Plain tensors: a parameter set while peft builds in another thread would lose its values,
        # and torch multiplies by a tensor without values as if it had some.
        self.down: Tensor = layer.lora_A[_ADAPTER].weight.detach()
        self.up: Tensor = layer.lora_B[_ADAPTER].weight.detach()
        self.scale: float = layer.scaling[_ADAPTER]

    @property
    def weight(self) -> Tensor:
        """Weight of the base layer, because some models read its dtype."""
        return cast(Tensor, self.base_layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        change = linear(linear(x, self.down), self.up)
        return torch.add(self.base_layer(x), change, alpha=self.scale)


def fresh_adapter(base: BaseModel, shape: LoraShape, seed: int) -> dict[str, Tensor]:
    """A new adapter that changes nothing yet: A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0, float32.

    That is peft's initialisation (Kaiming uniform with a = sqrt 5), drawn from a generator of its
    own. A is (rank, in), B is (out, rank).
    """
    generator = torch.Generator().manual_seed(seed)
    with BUILDING:
        module = _injected(base, shape)
    adapter: dict[str, Tensor] = {}
    for name, layer in _lora_layers(module):
        rows, columns = cast(Tensor, layer.weight).shape
        if ".lora_B." in name:
            adapter[name] = torch.zeros(rows, columns)
        else:
            draw = torch.rand(rows, columns, generator=generator)
            adapter[name] = (2 * draw - 1) / columns**0.5
    return adapter


def drawn_adapter(base: BaseModel, shape: LoraShape, size: float) -> dict[str, Tensor]:
    """Make a random adapter in the base's format, always the same one.

    For an input x of root mean square 1, B A x alpha / rank has a root mean square of `size`.
    """
    generator = torch.Generator().manual_seed(0)
    scale = size * (shape.rank / 3) ** -0.5 * shape.rank / shape.alpha  # A x has 1 / sqrt 3
    return {
        name: (
            scale * torch.randn(tensor.shape, generator=generator) if ".lora_B." in name else tensor
        ).to(base.dtype)
        for name, tensor in fresh_adapter(base, shape, seed=0).items()
    }


def adapter_parameters(module: Any) -> dict[str, nn.Parameter]:
    """Return the adapter parameters of a module made by `with_lora`, by the names of `Adapter`."""
    return {name: cast(nn.Parameter, layer.weight) for name, layer in _lora_layers(module)}


def lora_config(base: BaseModel, shape: LoraShape) -> LoraConfig:
    """PEFT's description of an adapter.

    Raises:
        ConfigError: it would be on no layer.
    """
    if not (targets := lora_targets(base.module, shape)):
        raise ConfigError(
            f"{base.source!r} has none of the layers that LoRA trains; use a model such as Qwen3."
        )
    return LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.source,
        inference_mode=True,
    )


def lora_targets(module: Any, shape: LoraShape | None = None) -> list[str]:
    """Return the last names of the paths of the layers that LoRA is on.

    Not peft's "all-linear": another release of peft may resolve that differently, and in a mixture
    of experts it includes experts and routers, which servers load in other formats.
    """
    layers = _targets(module, shape or LoraShape(1, 1))
    return sorted({path.rpartition(".")[2] for path in layers})


def shape_of(base: BaseModel, rank: int, alpha: int, names: Iterable[str]) -> LoraShape:
    """Return the shape of an adapter whose tensors have these names."""
    on = {name.partition(".lora_")[0] for name in names}
    return LoraShape(rank, alpha, head=not on <= _targets(base.module, LoraShape(1, 1)).keys())


def _targets(module: Any, shape: LoraShape) -> dict[str, Any]:
    """The layers that LoRA is on, by path."""
    head, blocks = module.get_output_embeddings(), fused_experts(module)

    def wanted(path: str, layer: nn.Module) -> bool:
        if layer is head:
            return shape.head
        return not (
            path.startswith(tuple(blocks)) or (blocks and path.rpartition(".")[2] in _EXPERTS)
        )

    return {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and wanted(path, layer)
    }


_WHOLE: Final = (
    "The local backend learns on whole weights: in place of quantised ones (AWQ, GPTQ, FP8 ...) "
    "take the model that they were made from, on a small GPU with --base-quantization 4bit. "
    "MXFP4 (gpt-oss) was made from none: take a copy in bfloat16."
)


def refuse_quantized(config: Any, source: str) -> None:
    """Raise ConfigError if the weights are quantised, as they cannot be trained.

    Some of their kernels have no gradients, and peft's layers over them are not tested here.
    """
    for part in (config, config.get_text_config()):
        if how := getattr(part, "quantization_config", None):
            name = str(how.get("quant_method")).upper()
            raise ConfigError(f"The weights in {source!r} are quantised ({name}). {_WHOLE}")


def fused_experts(module: nn.Module) -> list[str]:
    """List prefixes of blocks in which one weight holds several experts; [] in a dense model."""
    return [
        f"{name.rpartition('.')[0]}."
        for name, layer in module.named_modules()
        if not isinstance(layer, nn.Conv1d)
        and any(weight.dim() == 3 for weight in layer.parameters(recurse=False))
    ]


def _check_fit(
    base: BaseModel, shape: LoraShape, layers: Mapping[str, nn.Module], adapter: Adapter
) -> None:
    expected = {name: tuple(cast(Tensor, layer.weight).shape) for name, layer in layers.items()}
    actual = {name: tuple(tensor.shape) for name, tensor in adapter.items()}
    if expected != actual:
        wrong = next(n for n in sorted(expected | actual) if expected.get(n) != actual.get(n))
        raise BackendError(
            f"The adapter does not fit {base.source!r} at rank {shape.rank}: {wrong} is "
            f"{actual.get(wrong)} in the adapter and {expected.get(wrong)} in the model."
        )


def _injected(base: BaseModel, shape: LoraShape) -> Any:
    """Clone the base with an adapter on the meta device: peft draws no random numbers."""
    module = clone(base.module)
    try:
        with warnings.catch_warnings():
            # A warning on merging tied heads. Nothing is merged here, and none is exported.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            config = lora_config(base, shape)
            inject_adapter_in_model(config, module, _ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(
            f"peft puts no adapter on {base.source!r}: {error}. Use a model such as Qwen3."
        ) from error
    return module


def _lora_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List (adapter tensor name, the small linear layer that holds it), in module order."""
    layers: list[tuple[str, nn.Module]] = []
    for name, layer in module.named_modules():
        path, _, last = name.rpartition(".")
        if last == _ADAPTER and path.endswith((".lora_A", ".lora_B")):
            layers.append((f"{path}.weight", layer))
    return layers
