"""Load the base model: check its files, choose format and device, quantize to 4 bits if asked.

The model is a causal LM from a folder or the hub. Rule: whatever this backend would compute wrongly
is refused, and whatever it computes in another way than usual is reported. A device that cannot be
used is reported before anything is loaded.

4-bit weights (nf4, with quantised scales, by bitsandbytes) are the base's linear layers only. The
output embedding, the embeddings and the norms stay as they are. Adapters are not quantised: they
compute in the base's format, and are trained with the rounding of these weights.

Rule: quantised weights are never written. On some processors bitsandbytes would repack them at the
first pass, and compute in bfloat16 from then on; that is turned off.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.core_model_loading import PrefixChange

from local_gpu.config import Dtype, LocalConfig
from local_gpu.device import first_line
from local_gpu.model.lora import (
    BaseModel,
    Quantization,
    fused_experts,
    lora_targets,
    refuse_quantized,
)
from local_gpu.tree.body import obstacle
from tinker_claw.errors import ConfigError, ModelFileError
from tinker_claw.shipped import install

SEEING: Final = frozenset({"qwen3_vl"})
"""Model types whose text half is loaded here as a Qwen3, and which have a vision half."""
_TEXT_HALF: Final = ("model.", "model.language_model.")
_TEXT_CHARACTERS: Final = 4096
_DEVICES: Final = ("cuda", "cpu")
_SETTINGS: Final = {"quant_type": "nf4", "compress_statistics": True}


def check_quantization(device: torch.device) -> None:
    """Check that 4-bit weights work here, before anything is loaded.

    Raises:
        ConfigError: 4-bit weights do not work here.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"4-bit base weights need bitsandbytes: {install('local,4bit')}, or leave "
            "--base-quantization out."
        )
    if device.type not in _DEVICES:
        raise ConfigError(
            f"4-bit base weights cannot be had on {device.type}: take --device cuda or cpu, or "
            "leave --base-quantization out."
        )


def quantize(module: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Put every linear layer but the output embedding on `device` in 4 bits, one by one.

    Raises:
        ConfigError: most of this model is not linear layers, or bitsandbytes fails here.
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
        raise ConfigError(
            f"bitsandbytes could not quantise the base on {device}: {first_line(error)}"
        ) from error
    module.is_loaded_in_4bit = True  # read by peft


def _quantized(layer: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    bits: Any = import_module("bitsandbytes.nn")  # an extra
    linear = bits.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        device="meta",
        **_SETTINGS,
    )
    linear.support_avx512bf16_for_cpu = False
    # Without its module, which would hold the scales a second time, and have every clone copy them.
    linear.weight = bits.Params4bit(layer.weight.data, requires_grad=False, **_SETTINGS).to(device)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.to(device), requires_grad=False)
    return linear.eval()


_SAMPLED_VALUES: Final = 64
_UNKNOWN: Final = "does not recognize this architecture"
"""Part of transformers' message on an unknown model_type."""


def load_base(
    source: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = "none",
) -> BaseModel:
    """Load a causal LM from a folder or the hub.

    It is loaded into CPU memory first, even if its layers are then quantised to 4 bits.

    Raises:
        ModelFileError: it is missing or its files are corrupt.
        ConfigError: this backend would compute this kind of model wrongly, or 4-bit weights do not
            work here.
    """
    if quantization == "4bit":
        check_quantization(device)
    module = _load(source, dtype)
    module.eval().requires_grad_(False)
    # Before quantizing: an adapter trained on 4 bits also belongs to the whole base.
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
        part=_part(module) if config_of(source).model_type not in SEEING else _TEXT_HALF,
    )


def _load(source: str, dtype: torch.dtype) -> Any:
    if (Path(source) / "adapter_config.json").exists():
        # transformers would load its base, and put the adapter in.
        raise ModelFileError(f"{source!r} is an adapter, no model: name its base.")
    try:
        config = config_of(source)
        refuse_quantized(config, source)  # before loading gigabytes
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,  # a pickle can run code, and is no error that names itself
            **text_half(config),
        )
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise ModelFileError(
            f"No model could be loaded from {source!r}: give a folder with config.json and "
            f"model.safetensors, or a Hugging Face id. ({first_line(error)})"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"The model in {source!r} needs more than is installed ({first_line(error)})."
        ) from error
    except (SafetensorError, StrictDataclassError, RuntimeError, ValueError, KeyError) as error:
        if _UNKNOWN in str(error):
            raise ConfigError(
                f"The model in {source!r} is of a kind (model_type in config.json) that this "
                "release of transformers does not know. Name another one."
            ) from error
        raise ModelFileError(
            f"The model files in {source!r} are corrupt or incomplete; download or build them "
            f"again. ({first_line(error)})"
        ) from error
    module, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):
        # transformers would have filled them with random numbers.
        raise ModelFileError(
            f"The model files in {source!r} lack {missing[0]} and {len(missing) - 1} more weights; "
            "download or build them again."
        )
    return module


def config_of(source: str) -> Any:
    """Read the configuration of a model."""
    return AutoConfig.from_pretrained(source)


def image_token(source: str) -> int | None:
    """Return the id of the token that stands for a part of an image; None: there is none."""
    return getattr(config_of(source), "image_token_id", None)


def end_tokens(source: str) -> tuple[int, ...]:
    """Return the tokens that end a reply, as a model's files name them."""
    ids: Any = config_of(source).get_text_config().eos_token_id
    with suppress(OSError):  # it has no such file
        ids = GenerationConfig.from_pretrained(source).eos_token_id or ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def real_text(source: str, vocabulary: int) -> tuple[int, ...]:
    """Return a piece of real text, this module's own, in a model's tokens; any tokens where there
    is no tokenizer."""
    text = Path(__file__).read_text()[:_TEXT_CHARACTERS]
    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source)
    except (OSError, ValueError, HFValidationError, HfHubHTTPError):
        half = max(2, vocabulary // 2)  # control tokens are mostly at a vocabulary's end
        return tuple((i * i * 7919 + i * 104_729 + 11) % half for i in range(len(text) // 4))
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def text_half(config: Any) -> dict[str, Any]:
    """Options that load the text half of Qwen3-VL as a Qwen3: on text its positions are equal in
    all three dimensions, which is the same as one."""
    if config.model_type not in SEEING:
        return {}
    settings = {**config.text_config.to_dict(), "tie_word_embeddings": config.tie_word_embeddings}
    del settings["model_type"]
    rotation = settings["rope_parameters"]
    kept = ("rope_type", "rope_theta")
    settings["rope_parameters"] = {name: rotation[name] for name in kept if name in rotation}
    return {
        "config": Qwen3Config(**settings),
        "key_mapping": {r"^model\.language_model\.": "model."},
    }


def _part(module: Any) -> tuple[str, str]:
    """Value of `BaseModel.part`; transformers records which names it changed when it loaded the
    files."""
    for change in getattr(module, "_weight_conversions", None) or ():
        if isinstance(change, PrefixChange) and change.prefix_to_remove and not change.scope_prefix:
            here = f"{change.model_prefix}." if change.model_prefix else ""
            return here, f"{here}{change.prefix_to_remove}."
    return "", ""


def _context_tokens(module: Any, source: str) -> int:
    """Sequence length that the model's positions were trained for."""
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        raise ConfigError(
            f"The model in {source!r} does not say how many positions it has "
            "(max_position_embeddings in config.json). Use a model such as Qwen3."
        )
    return int(positions)


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
    """Compute a few tokens, to find NaN weights and heads that do more than one matrix product."""
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
    if not same_but_for_rounding(logits, head):
        raise ConfigError(
            f"The model in {source!r} transforms its logits after the head, which the local "
            "backend does not compute. Use a model such as Qwen3."
        )


def same_but_for_rounding(got: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are the same matrix product, apart from rounding to their format.

    A kernel may add up in another order, which moves single values by the format's epsilon, to
    either side. A deliberate change moves all of them to one side, if only a little: a soft cap at
    30 makes logits of 3 smaller by 3e-3, where bfloat16 rounds by as much.
    """
    eps = torch.finfo(got.dtype).eps
    got, right = got.double(), right.double()
    distance = (got - right).norm() / right.norm().clamp_min(1e-30)
    slope = (got * right).sum() / right.square().sum().clamp_min(1e-30) - 1
    return float(distance) <= max(4 * eps, 1e-5) and abs(float(slope)) <= max(eps / 32, 1e-5)


def _fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        flat = parameter.detach().flatten()
        picked = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(picked.numpy().tobytes())
    return digest.hexdigest()[:16]


_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def open_base(
    source: str,
    *,
    device: str,
    dtype: Dtype,
    threads: int | None,
    quantization: Quantization = "none",
) -> BaseModel:
    """Load a base model; auto is CUDA where there is one, and bfloat16 there.

    Raises:
        ConfigError: the device cannot be used, or the model cannot be loaded.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(automatic if device == "auto" else device)
        if target.type == "cuda":
            keep_memory_whole()
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used here: {error}. Install a torch for this "
            "GPU and its driver (pytorch.org/get-started says which), or give --device cpu."
        ) from error
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    fitting = "bfloat16" if target.type == "cuda" else "float32"
    return load_base(
        source,
        device=target,
        dtype=formats[fitting if dtype == "auto" else dtype],
        quantization=quantization,
    )


def base_of(config: LocalConfig) -> BaseModel:
    """Load the base model of a configuration, whole; see `open_base`."""
    return open_base(
        config.model,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        quantization=config.quantization,
    )


def keep_memory_whole() -> None:
    """Configure the allocator so that passes of many lengths do not fragment a GPU's memory.

    Not by the environment variable, which servers started from here would inherit: vLLM processes
    that share a model cannot exchange memory of this kind. A variable set by the user takes
    precedence.
    """
    torch_c: Any = import_module("torch._C")
    set_option = getattr(torch_c, "_accelerator_setAllocatorSettings", None)
    if set_option is None or any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        return
    with suppress(RuntimeError):  # a torch or a system that has no such memory: it works without
        set_option("expandable_segments:True")
