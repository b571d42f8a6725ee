"""A causal LM from a folder or the hub, checked before anything is built on it.

Rule: whatever this backend would compute wrongly is refused, and whatever it computes in another
way than usual is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from local_gpu.model import BaseModel, Quantization, fused_experts, lora_targets
from local_gpu.quantized import check_quantization, quantize
from local_gpu.tryout import obstacle
from tinker_claw.errors import ConfigError, ModelFileError

_SAMPLED_VALUES: Final = 64
_WHOLE: Final = (
    "The local backend learns on whole weights: in place of quantised ones (AWQ, GPTQ, FP8 ...) "
    "take the model that they were made from, on a small GPU with --base-quantization 4bit."
)


def load_base(
    source: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = "none",
) -> BaseModel:
    """Load a causal LM from a folder or the hub.

    It passes through this machine's memory, also where its layers end in four bits.

    Raises:
        ModelFileError: it is missing or its files are corrupt.
        ConfigError: it is a kind of model that this backend computes wrongly, or four bits cannot
            be had here.
    """
    if quantization == "4bit":
        check_quantization(device)
    module = _load(source, dtype)
    module.eval().requires_grad_(False)
    # Of the weights as they came: an adapter of four bits belongs to the whole base, too.
    fingerprint = _fingerprint(module)
    if quantization == "4bit":
        quantize(module, device=device, dtype=dtype)
    module.to(device)
    _check_values(module, source)
    with torch.no_grad():
        against = obstacle(module)
    return BaseModel(
        module=module,
        source=source,
        fingerprint=fingerprint,
        vocabulary=int(module.get_output_embeddings().out_features),
        context_tokens=_context_tokens(module, source),
        device=device,
        dtype=dtype,
        obstacle=against,
        notes=tuple(_notes(module, source, against)),
    )


def _load(source: str, dtype: torch.dtype) -> Any:
    if (Path(source) / "adapter_config.json").exists():
        # transformers would load its base, and put the adapter in.
        raise ModelFileError(f"{source!r} is an adapter, no model: name its base.")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True
        )
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise ModelFileError(
            f"No model could be loaded from {source!r}: give a folder with config.json and "
            f"model.safetensors, or a Hugging Face id. ({_first_line(error)})"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"The model in {source!r} needs more than is installed ({_first_line(error)}). {_WHOLE}"
        ) from error
    except (SafetensorError, StrictDataclassError, RuntimeError, ValueError, KeyError) as error:
        raise ModelFileError(
            f"The model files in {source!r} are corrupt or incomplete; download or build them "
            f"again. ({_first_line(error)})"
        ) from error
    module, told = loaded
    if getattr(module, "hf_quantizer", None) is not None:
        # Some of their kernels know no gradients, and what peft puts on them nobody has compared.
        raise ConfigError(f"The weights in {source!r} are quantised. {_WHOLE}")
    if missing := sorted(told["missing_keys"]):
        # transformers would have filled them with random numbers.
        raise ModelFileError(
            f"The model files in {source!r} lack {missing[0]} and {len(missing) - 1} more weights; "
            "download or build them again."
        )
    return module


def _context_tokens(module: Any, source: str) -> int:
    """What the positions were trained for."""
    found = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if found is None:
        raise ConfigError(
            f"The model in {source!r} does not say how many positions it has "
            "(max_position_embeddings in config.json). Use a model such as Qwen3."
        )
    return int(found)


def _notes(module: Any, source: str, against: str | None) -> Iterator[str]:
    if against is not None:
        yield (
            f"{source} {against}: its samples are computed one by one, without shared prefixes, "
            "which is correct and slower."
        )
    if fused_experts(module):
        yield (
            f"{source} is a mixture of experts: LoRA is on {', '.join(lora_targets(module))}; "
            "experts and routers stay as they are."
        )


def _check_values(module: Any, source: str) -> None:
    """Try a few tokens: NaN weights and heads that do more than one matrix product show here."""
    if module.base_model is module:
        raise ConfigError(
            f"The model in {source!r} gives no hidden states apart from its logits, which the "
            "local backend needs. Use a model such as Qwen3."
        )
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
