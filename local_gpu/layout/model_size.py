"""How big a model is, from its config.json alone.

Rule: no weights are read. The model is built on torch's meta device, where tensors have shapes and
no memory, so every architecture that transformers knows counts itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinker_claw.errors import ModelFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Counts of a model."""

    parameters: int
    """All of them; a head that is tied to the embeddings counts once."""
    linear: int
    """Those in the linear layers of the body, which LoRA adapts and 4 bits may hold."""
    lora: int
    """Adapter parameters per unit of rank: inputs and outputs of those layers, added up."""
    largest_layer: int
    """Parameters of the largest layer of the body."""
    layers: int
    caching_layers: int
    """Those that keep keys and values of every token; linear attention does not."""
    hidden: int
    feed_forward: int
    queries: int
    """Heads times their size."""
    keys: int
    """Key-value heads times their size."""
    vocabulary: int
    context_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Of KV cache per token, in bfloat16."""
        return 2 * self.caching_layers * self.keys * 2


def model_size(source: str) -> ModelSize:
    """Size up the model of a folder or hub id.

    Raises:
        ModelFileError: there is no config.json that transformers can build.
    """
    import torch  # what only reckons with a ModelSize needs neither
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelFileError(
            f"The config.json of {source!r} is missing, or of a kind that this release of "
            f"transformers cannot build. ({first})"
        ) from error
    return _count(config.get_text_config(), module)


def _count(text: Any, module: Any) -> ModelSize:
    from torch import nn

    head = module.get_output_embeddings()
    linear = [m for m in module.modules() if isinstance(m, nn.Linear) and m is not head]
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    layers = int(text.num_hidden_layers)
    return ModelSize(
        parameters=sum(p.numel() for p in module.parameters()),
        linear=sum(m.weight.numel() for m in linear),
        lora=sum(m.in_features + m.out_features for m in linear),
        largest_layer=max(
            sum(p.numel() for p in child.parameters())
            for block in module.base_model.modules()
            if isinstance(block, nn.ModuleList)
            for child in block
        ),
        layers=layers,
        caching_layers=sum("linear" not in kind for kind in kinds) if kinds else layers,
        hidden=int(text.hidden_size),
        feed_forward=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        queries=heads * size,
        keys=int(getattr(text, "num_key_value_heads", None) or heads) * size,
        vocabulary=int(text.vocab_size),
        context_tokens=int(text.max_position_embeddings),
    )
