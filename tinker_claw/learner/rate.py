"""The learning rate that `--learning-rate auto` stands for."""

from __future__ import annotations

_BASE = 5e-5
_LORA_FACTOR = 10.0
_REFERENCE_HIDDEN = 2000
_EXPONENTS = {"llama": 0.781}
_EXPONENT = 0.0775


def lora_learning_rate(hidden_size: int, model_type: str) -> float:
    """5e-5 * 10 * (2000 / hidden_size) ** e, with e = 0.781 for Llama and 0.0775 otherwise.

    Source: the LoRA rate of tinker-cookbook (hyperparam_utils), fitted on Llama and Qwen models.
    """
    exponent = _EXPONENTS.get(model_type, _EXPONENT)
    return _BASE * _LORA_FACTOR * (_REFERENCE_HIDDEN / hidden_size) ** exponent
