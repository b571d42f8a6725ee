"""The base's linear layers in four bits (nf4, scales quantised once more), by bitsandbytes.

The output embedding, the embeddings and the norms stay as they are. Adapters are not quantised:
they compute in the base's format, and learn around the rounding of these weights.

Rule: quantised weights are never written. On some processors bitsandbytes would lay them out anew
at the first pass, and compute in bfloat16 from then on; that is turned off.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from local_gpu.model import fused_experts
from tinker_claw.errors import ConfigError

_DEVICES: Final = ("cuda", "cpu")
_SETTINGS: Final = {"quant_type": "nf4", "compress_statistics": True}


def check_quantization(device: torch.device) -> None:
    """Before anything is loaded.

    Raises:
        ConfigError: four bits cannot be had here.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "4-bit base weights need bitsandbytes: pip install -c constraints.txt -e "
            "'.[local,4bit]' in the project's folder, or leave --base-quantization out."
        )
    if device.type not in _DEVICES:
        raise ConfigError(
            f"4-bit base weights cannot be had on {device.type}: take --device cuda or cpu, or "
            "leave --base-quantization out."
        )


def quantize(module: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Put every linear layer but the output embedding on `device` in four bits, one by one.

    Raises:
        ConfigError: most of this model is no linear layers, or bitsandbytes cannot do it here.
    """
    if blocks := fused_experts(module):
        raise ConfigError(
            f"The experts in {blocks[0].rstrip('.')} are no linear layers, and would stay in 16 "
            "bits: leave --base-quantization out, or take a dense model."
        )
    head = module.get_output_embeddings()
    layers = [
        (name, layer)
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and layer is not head
    ]
    try:
        for name, layer in layers:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, _quantized(layer, device, dtype))
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"bitsandbytes could not quantise the base on {device}: {reason.splitlines()[0]}"
        ) from error
    module.is_loaded_in_4bit = True  # what peft goes by


def _quantized(layer: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    bits: Any = import_module("bitsandbytes.nn")  # an extra
    made = bits.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        device="meta",
        **_SETTINGS,
    )
    made.support_avx512bf16_for_cpu = False
    # Without its module, which would hold the scales a second time, and have every clone copy them.
    made.weight = bits.Params4bit(layer.weight.data, requires_grad=False, **_SETTINGS).to(device)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.to(device), requires_grad=False)
    return made.eval()
