"""Reference gradients for every side of the benchmark, computed without any of our code.

Rule: no line of loss, attention or model is shared with a side that is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from benchmarks.baseline import take_over, trained, with_peft
from benchmarks.training_peers import checkpoint_layers
from benchmarks.training_sides import Gradients, Settings
from tinker_claw.types import Datum

_ATTENTION = "tinker_claw_benchmark_reference"


def true_gradients(settings: Settings, datums: Sequence[Datum], dtype: torch.dtype) -> Gradients:
    """Compute the gradients one sample after the other, in a copy of the model in `dtype`."""
    module = copy.deepcopy(settings.base.module).to(dtype)
    module.set_attn_implementation(_ATTENTION)
    model: Any = with_peft(module, settings.lora.rank, settings.lora.alpha)
    model.to(dtype)
    take_over(model, settings.adapter)
    if settings.checkpointing:
        checkpoint_layers(model)
    for datum in datums:
        tokens = torch.tensor(datum.tokens, device=settings.base.device)
        tail = len(datum.tokens) - datum.start
        rows = model(input_ids=tokens[None], use_cache=False, logits_to_keep=tail + 1).logits
        logprobs = rows[0, :-1].log_softmax(-1)
        _plain_ppo(logprobs.gather(1, tokens[datum.start :, None])[:, 0], datum).backward()
    parameters = trained(model)
    return {name: cast(Tensor, p.grad).float().cpu() for name, p in parameters.items()}


def _plain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention with the key heads repeated. With fewer key heads in float32, CUDA has no
    fused kernel, and all scores of a sample of 23,000 tokens would take 68 GB."""
    times = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _plain_attention)


def _plain_ppo(chosen: Tensor, datum: Datum) -> Tensor:
    """PPO loss written a second time, so that not every side depends on one line."""
    q = torch.tensor(datum.logprobs).to(chosen)
    gain = torch.tensor(datum.advantages).to(chosen)
    ratio = torch.exp(chosen - q)
    return torch.maximum(-ratio * gain, -torch.clamp(ratio, min=0.8, max=1.28) * gain).sum()
