"""Whether many sequences of a model can share one row of a pass, found out on the model itself.

Rule: what a configuration says against it counts, and so does what the model computes. Only a
model that gives the same hidden states both ways shares rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from local_gpu.learn.passes import Body
from local_gpu.tree.kernels import ATTENTION, SdpaKernel

_SHARED: Final = 6
_OWN: Final = 6
"""Tokens: a beginning that two sequences share, and what each has of its own."""
_AGREE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative error of a hidden state. Rounding stays below, a neighbour that leaks in does not."""
_LENGTHENING: Final = "longrope"
"""Other frequencies for all of a pass as soon as one position of it is beyond the first training's
length; and transformers writes them into a buffer, which every version of a model shares here."""
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, AttributeError, KeyError)
"""What models raise that take no position_ids, or no attention but their own."""


def obstacle(module: Any) -> str | None:
    """Why sequences cannot share rows, as a clause; None: they can, and `ATTENTION` is in place.

    With an obstacle the model keeps its own attention.
    """
    if (told := next(_told(module.config.get_text_config()), None)) is not None:
        return told
    sequences = _sequences(module)
    whole = [0] * len(sequences)
    own = module.config._attn_implementation
    alone = Body(SdpaKernel(), module.device, packs=False).hidden(module, sequences, whole)
    try:
        module.set_attn_implementation(ATTENTION)
        packed = Body(SdpaKernel(), module.device).hidden(module, sequences, whole)
    except _REFUSALS as error:
        module.set_attn_implementation(own)
        return f"takes no prefix tree ({(str(error) or type(error).__name__).splitlines()[0]})"
    if all(map(_agree, alone, packed)):
        return None
    module.set_attn_implementation(own)
    return "computes something else over a prefix tree than over each sequence alone"


def _told(text: Any) -> Iterator[str]:
    """What a text model's configuration says; a short try-out would not show most of it."""
    kinds = sorted({*(getattr(text, "layer_types", None) or ())} - {"full_attention"})
    if kinds:
        yield f"has {' and '.join(kinds)} layers"
    window = getattr(text, "sliding_window", None)
    if window is not None and window < text.max_position_embeddings:
        yield f"attends to the last {window} tokens only"
    if chunk := getattr(text, "attention_chunk_size", None):
        yield f"attends within chunks of {chunk} tokens"
    if _LENGTHENING in _rotations(getattr(text, "rope_parameters", None) or {}):
        yield f"turns its positions by the length of the longest sequence ({_LENGTHENING})"


def _rotations(settings: Mapping[str, Any]) -> set[Any]:
    """The kinds of rotary embedding: one for all layers, or one for each type of layer."""
    each = [one for one in settings.values() if isinstance(one, Mapping)]
    return {one.get("rope_type") for one in (settings, *each)}


def _sequences(module: Any) -> tuple[Tensor, Tensor]:
    ids = torch.arange(1, _SHARED + 2 * _OWN + 1) % module.get_output_embeddings().out_features
    shared, first, second = ids.split([_SHARED, _OWN, _OWN])
    return torch.cat([shared, first]), torch.cat([shared, second])


def _agree(alone: Tensor, packed: Tensor) -> bool:
    """Both (T, hidden). The median: a router at a tie sends single tokens to other experts."""
    ours, theirs = packed[_SHARED:].float(), alone[_SHARED:].float()
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return bool(error.median() < _AGREE.get(alone.dtype, _AGREE[torch.bfloat16]))
