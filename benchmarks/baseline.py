"""The code a user would write without this project: peft, padded batches, full logits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tinker_claw.types import Datum


def with_peft(module: Any, rank: int, alpha: int) -> Any:
    """Add peft's own LoRA to every linear layer, as its documentation shows."""
    shape = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft uses a name that transformers is going to remove.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        return get_peft_model(module, shape)


def trained(model: Any) -> dict[str, Tensor]:
    """LoRA parameters of a peft model, by the names of `local_gpu.model.lora.Adapter`."""
    return {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def take_over(model: Any, adapter: Mapping[str, Tensor]) -> None:
    """Copy the weights of an adapter into a peft model."""
    parameters = trained(model)
    if set(parameters) != set(adapter):
        raise ValueError(f"peft trains {len(parameters)} tensors, the adapter has {len(adapter)}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(adapter[name])


def ppo(chosen: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """The clipped loss of some tokens, summed."""
    ratio = (chosen - behaviour).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()


def padded_loss(model: Any, datums: Sequence[Datum], device: torch.device) -> Tensor:
    """PPO loss of one right-padded batch, with the logits of every position."""
    longest = max(len(d.tokens) for d in datums)
    tokens = torch.zeros(len(datums), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    behaviour, advantages = torch.zeros(2, len(datums), longest)
    for row, datum in enumerate(datums):
        end = len(datum.tokens)
        tokens[row, :end] = torch.tensor(datum.tokens)
        mask[row, :end] = 1
        behaviour[row, datum.start : end] = torch.tensor(datum.logprobs)
        advantages[row, datum.start : end] = torch.tensor(datum.advantages)
    tokens = tokens.to(device)
    logits = model(input_ids=tokens, attention_mask=mask.to(device), use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(-1)
    chosen = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
    # Where the advantage is 0 the ratio is arbitrary.
    learns = advantages[:, 1:] != 0
    picked = chosen[learns.to(device)]
    return ppo(picked, behaviour[:, 1:][learns].to(device), advantages[:, 1:][learns].to(device))
