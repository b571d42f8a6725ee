"""A model's body over prefix trees: many sequences in one row, every shared prefix once.

Whether a model's sequences can share rows is tested on the model itself. Rule: both its
configuration and its numbers must allow it. Only a model that gives the same hidden states both
ways shares rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from local_gpu.device import first_line
from local_gpu.tree.kernels import ATTENTION, Attend, Kernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree, grow

_SHARED: Final = 6
_OWN: Final = 6
"""Tokens of a prefix that two sequences share, and of what each has of its own."""
_AGREE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative error of a hidden state. Rounding stays below, a leak from another sequence does not."""
_LENGTHENING: Final = "longrope"
"""Changes the frequencies of a whole pass as soon as one position is beyond the original training
length; and transformers writes them into a buffer, which every version of a model shares here."""
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, AttributeError, KeyError)
"""Errors of models that take no position_ids, or no attention but their own."""


class ImageInputs(Protocol):
    """Images of a batch (`local_gpu.model.vision`)."""

    def hidden(self, tree: PrefixTree, **attention: Attend) -> Tensor | None:
        """Return the last hidden states (1, T, hidden) of a tree; None: it shows no image."""
        ...


@dataclass(frozen=True, slots=True)
class Body:
    """Computation of hidden states on one device."""

    kernel: Kernel
    device: torch.device
    packs: bool = True
    """False: the model has layers that do not fit a prefix tree, so sequences are computed one by
    one."""
    share: bool = True
    """False: sequences stand in one row, and share nothing (for comparison)."""

    def hidden(
        self,
        module: Any,
        sequences: Sequence[Tensor],
        firsts: Sequence[int],
        pictures: ImageInputs | None = None,
    ) -> list[Tensor]:
        """Compute the last hidden states of each sequence from its `first` position on.

        They are (n_i - first, hidden). That of position p predicts token p + 1.

        Args:
            pictures: what ids beyond the vocabulary stand for; None: there are none.
        """
        if not self.packs:
            return [self._alone(module, s)[at:] for s, at in zip(sequences, firsts, strict=True)]
        tree = grow(sequences, share=self.share)
        over_tree = self.kernel.prepare(tree, self.device)
        rows = None if pictures is None else pictures.hidden(tree, over_tree=over_tree)
        if rows is None:
            rows = module.base_model(
                input_ids=tree.tokens.to(self.device)[None],
                position_ids=tree.positions.to(self.device)[None],
                use_cache=False,
                over_tree=over_tree,
            ).last_hidden_state
        wanted = [r[at:] for r, at in zip(tree.rows, firsts, strict=True)]
        # Indexed once: the gradient of each indexing is zeros as large as the whole row.
        return list(rows[0, torch.cat(wanted).to(self.device)].split([len(w) for w in wanted]))

    def idle(self, module: Any, *, learn: bool) -> None:
        """Run a pass that changes nothing, forward and, with `learn`, backward."""
        with torch.set_grad_enabled(learn):
            (rows,) = self.hidden(module, [torch.zeros(1, dtype=torch.int64)], [0])
        if learn and rows.requires_grad:  # not where LoRA is on the head alone
            (rows * 0).sum().backward()

    def _alone(self, module: Any, sequence: Tensor) -> Tensor:
        inputs = sequence.to(self.device)[None]
        return module.base_model(input_ids=inputs, use_cache=False).last_hidden_state[0]


def obstacle(module: Any) -> str | None:
    """Return why sequences cannot share rows, as a clause; None: they can.

    Then `ATTENTION` is in place; with an obstacle the model keeps its own attention.
    """
    if (clause := next(_named_obstacles(module.config.get_text_config()), None)) is not None:
        return clause
    sequences = _sequences(module)
    whole = [0] * len(sequences)
    own = module.config._attn_implementation
    alone = Body(SdpaKernel(), module.device, packs=False).hidden(module, sequences, whole)
    try:
        module.set_attn_implementation(ATTENTION)
        packed = Body(SdpaKernel(), module.device).hidden(module, sequences, whole)
    except _REFUSALS as error:
        module.set_attn_implementation(own)
        return f"takes no prefix tree ({first_line(error)})"
    if all(map(_agree, alone, packed)):
        return None
    module.set_attn_implementation(own)
    return "computes something else over a prefix tree than over each sequence alone"


def _named_obstacles(text: Any) -> Iterator[str]:
    """Yield obstacles that a text model's configuration names; a short trial would not show most of
    them."""
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
    """List the kinds of rotary embedding: one for all layers, or one for each type of layer."""
    by_layer_type = [entry for entry in settings.values() if isinstance(entry, Mapping)]
    return {entry.get("rope_type") for entry in (settings, *by_layer_type)}


def _sequences(module: Any) -> tuple[Tensor, Tensor]:
    ids = torch.arange(1, _SHARED + 2 * _OWN + 1) % module.get_output_embeddings().out_features
    shared, first, second = ids.split([_SHARED, _OWN, _OWN])
    return torch.cat([shared, first]), torch.cat([shared, second])


def _agree(alone: Tensor, packed: Tensor) -> bool:
    """Both (T, hidden). The median: a router at a tie sends single tokens to other experts."""
    ours, theirs = packed[_SHARED:].float(), alone[_SHARED:].float()
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return bool(error.median() < _AGREE.get(alone.dtype, _AGREE[torch.bfloat16]))
