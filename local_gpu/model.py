"""The base model, loaded once, and modules that share its tensors.

Every live version is a module tree of its own over the same base parameters and buffers, with LoRA
layers of its own; only the adapters take memory.

Rule: base tensors are never written and torch's global random generator is never drawn from.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    StrictDataclassError,
)
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from local_gpu.attention import ATTENTION
from tinker_claw.errors import ConfigError, ModelFileError

Adapter = Mapping[str, Tensor]
"""LoRA tensors by module path, e.g. `model.layers.0.mlp.up_proj.lora_A.weight`."""

_ADAPTER: Final = "default"
_SAMPLED_VALUES: Final = 64


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
    """What its positions were trained for."""
    device: torch.device
    dtype: torch.dtype
    """What it computes in, and every adapter over it."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    rank: int
    alpha: int
    """The update is scaled by alpha / rank."""


def load_base(source: str, *, device: torch.device, dtype: torch.dtype) -> BaseModel:
    """Load a causal LM from a folder or the hub.

    Raises:
        ModelFileError: it is missing or its files are corrupt.
        ConfigError: it is a kind of model that this backend computes wrongly.
    """
    try:
        _refuse_unsupported(AutoConfig.from_pretrained(source))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise ModelFileError(
            f"No model could be loaded from {source!r}: give a folder with config.json and "
            f"model.safetensors, or a Hugging Face id. ({_first_line(error)})"
        ) from error
    except (SafetensorError, StrictDataclassError, RuntimeError, ValueError, KeyError) as error:
        raise ModelFileError(
            f"The model files in {source!r} are corrupt or incomplete; download or build them "
            f"again. ({_first_line(error)})"
        ) from error
    module, told = loaded
    if missing := sorted(told["missing_keys"]):
        # transformers would have filled them with random numbers.
        raise ModelFileError(
            f"The model files in {source!r} lack {missing[0]} and {len(missing) - 1} more weights; "
            "download or build them again."
        )
    module.to(device).eval().requires_grad_(False)
    module.set_attn_implementation(ATTENTION)
    _check_values(module, source)
    return BaseModel(
        module=module,
        source=source,
        fingerprint=_fingerprint(module),
        vocabulary=int(module.get_output_embeddings().out_features),
        context_tokens=int(module.config.get_text_config().max_position_embeddings),
        device=device,
        dtype=dtype,
    )


def clone(module: Any) -> Any:
    """The same module tree over the same tensors: new modules, no new parameters or buffers."""
    shared = {id(t): t for t in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, shared)


def with_lora(base: BaseModel, shape: LoraShape, adapter: Adapter) -> Any:
    """A clone of the base carrying `adapter`, in eval mode, rounded to the base's format.

    One format throughout: peft would compute adapters that are float32 over a bfloat16 base in
    float32, which is several times slower on a GPU, and not what a server computes.

    Raises:
        ConfigError: the adapter does not fit this base model or this rank.
    """
    module = clone(base.module)
    # On the meta device peft draws no random numbers; every adapter tensor is set below.
    inject_adapter_in_model(lora_config(base, shape), module, _ADAPTER, low_cpu_mem_usage=True)
    layers = dict(_lora_layers(module))
    wanted = {name: tuple(cast(Tensor, layer.weight).shape) for name, layer in layers.items()}
    got = {name: tuple(tensor.shape) for name, tensor in adapter.items()}
    if wanted != got:
        name = next(n for n in sorted(wanted | got) if wanted.get(n) != got.get(n))
        raise ConfigError(
            f"The adapter does not fit {base.source!r} at rank {shape.rank}: {name} is "
            f"{got.get(name)} in the adapter and {wanted.get(name)} in the model."
        )
    for name, layer in layers.items():
        value = adapter[name].detach().to(base.device, base.dtype, copy=True)
        layer.weight = nn.Parameter(value, requires_grad=False)
    return module.eval()


def fresh_adapter(base: BaseModel, shape: LoraShape, seed: int) -> dict[str, Tensor]:
    """A new adapter that changes nothing yet: A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0, float32.

    That is peft's initialisation (Kaiming uniform with a = sqrt 5), drawn from a generator of its
    own. A is (rank, in), B is (out, rank).
    """
    generator = torch.Generator().manual_seed(seed)
    module = clone(base.module)
    inject_adapter_in_model(lora_config(base, shape), module, _ADAPTER, low_cpu_mem_usage=True)
    adapter: dict[str, Tensor] = {}
    for name, layer in _lora_layers(module):
        rows, columns = cast(Tensor, layer.weight).shape
        if ".lora_B." in name:
            adapter[name] = torch.zeros(rows, columns)
        else:
            draw = torch.rand(rows, columns, generator=generator)
            adapter[name] = (2 * draw - 1) / columns**0.5
    return adapter


def adapter_parameters(module: Any) -> dict[str, nn.Parameter]:
    """The adapter parameters of a module made by `with_lora`, by the names of `Adapter`."""
    return {name: cast(nn.Parameter, layer.weight) for name, layer in _lora_layers(module)}


def lora_config(base: BaseModel, shape: LoraShape) -> LoraConfig:
    """LoRA on every linear layer but the output embedding."""
    return LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.source,
        inference_mode=True,
    )


def _lora_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(adapter tensor name, the small linear layer that holds it), in module order."""
    found: list[tuple[str, nn.Module]] = []
    for name, layer in module.named_modules():
        path, _, last = name.rpartition(".")
        if last == _ADAPTER and path.endswith((".lora_A", ".lora_B")):
            found.append((f"{path}.weight", layer))
    return found


def _refuse_unsupported(config: Any) -> None:
    text = config.get_text_config()
    kinds = set(text.layer_types or ()) if hasattr(text, "layer_types") else set[str]()
    if kinds - {"full_attention"}:
        raise ConfigError(
            f"Model type {text.model_type!r} has {', '.join(sorted(kinds))} layers; the local "
            "backend computes full attention only. Use a dense model such as Qwen3."
        )


def _check_values(module: Any, source: str) -> None:
    """Try a few tokens: NaN weights and heads that do more than one matrix product show here."""
    tokens = torch.arange(4, device=module.device)[None]
    with torch.no_grad():
        logits = module(input_ids=tokens, use_cache=False).logits
        hidden = module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        head = module.get_output_embeddings()(hidden)
    if not bool(logits.isfinite().all()):
        raise ModelFileError(f"The model in {source!r} answers NaN: its weights are corrupt.")
    if not torch.allclose(logits, head):
        raise ConfigError(
            f"The model in {source!r} transforms its logits after the head, which the local "
            "backend does not compute. Use a model such as Qwen3."
        )


def _fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        flat = parameter.detach().flatten()
        picked = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(picked.numpy().tobytes())
    return digest.hexdigest()[:16]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
