"""The other sides: peft with transformers, as its users write it.

Rule: a peer gets its best setting, bfloat16 autocast on CUDA included, and the same base tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.baseline import padded_loss, ppo, take_over, trained, with_peft
from benchmarks.training_sides import Gradients, Settings
from benchmarks.training_work import Work, causal_pairs
from local_gpu.model.lora import clone
from tinker_claw.types import Datum


def checkpoint_layers(model: Any) -> None:
    """Keep one activation per layer, as the documentation of both recommends."""
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    model.train()  # where transformers checkpoints


class Peer:
    """A peft model and torch's AdamW; how a batch becomes losses is for subclasses."""

    head_products = 2

    def __init__(self, name: str, settings: Settings, attention: str = "sdpa") -> None:
        self.name = name
        base = settings.base
        self.device = base.device
        self.settings = settings
        module = clone(base.module)
        module.set_attn_implementation(attention)
        self.model: Any = with_peft(module, settings.lora.rank, settings.lora.alpha)
        take_over(self.model, settings.adapter)
        if settings.checkpointing:
            checkpoint_layers(self.model)
        self._parameters = trained(self.model)
        self._adam = torch.optim.AdamW(self._parameters.values(), lr=0.0)

    def backward(self, datums: Sequence[Datum]) -> Work:
        """Accumulate the gradients of a batch."""
        raise NotImplementedError

    def step(self, datums: Sequence[Datum]) -> Work:
        try:
            work = self.backward(datums)
            self._adam.step()
        finally:
            self._adam.zero_grad()
        return work

    def gradients(self, datums: Sequence[Datum]) -> Gradients:
        try:
            self.backward(datums)
            return {n: cast(Tensor, p.grad).float().cpu() for n, p in self._parameters.items()}
        finally:
            self._adam.zero_grad()

    def autocast(self) -> AbstractContextManager[Any]:
        """Use autocast as the trainers of transformers do with bf16; without it peft's LoRA runs in
        float32."""
        dtype = self.settings.base.dtype
        return nullcontext() if dtype.itemsize > 2 else torch.autocast(self.device.type, dtype)

    def work(self, tokens: int, pairs: int, head_rows: int) -> Work:
        """Make the work record, with the fields that all passes of this side share."""
        return Work(tokens, pairs, head_rows, self.head_products, self.settings.checkpointing)


class Padded(Peer):
    """Right-padded batches and full logits, as the documentation of both suggests."""

    def __init__(self, name: str, settings: Settings, rows: int | None) -> None:
        """`rows`: samples of a batch; None puts all into one."""
        super().__init__(name, settings)
        self._rows = rows

    def backward(self, datums: Sequence[Datum]) -> Work:
        done = self.work(0, 0, 0)
        rows = self._rows or len(datums)
        for first in range(0, len(datums), rows):
            batch = datums[first : first + rows]
            with self.autocast():
                loss = padded_loss(self.model, batch, self.device)
            loss.backward()
            lengths = [len(d.tokens) for d in batch]
            longest, even = max(lengths), len(set(lengths)) == 1
            # transformers drops a mask that hides nothing, and SDPA is causal then.
            pairs = causal_pairs(longest) if even else longest**2
            computed = len(batch) * longest
            done += self.work(computed, len(batch) * pairs, computed)
        return done


class LossRows(Peer):
    """One sample at a time with the logits of the loss rows only: the best that peft's users
    write."""

    def backward(self, datums: Sequence[Datum]) -> Work:
        done = self.work(0, 0, 0)
        for datum in datums:
            tokens = torch.tensor(datum.tokens, device=self.device)
            n, tail = len(datum.tokens), len(datum.tokens) - datum.start
            with self.autocast():
                out = self.model(input_ids=tokens[None], use_cache=False, logits_to_keep=tail + 1)
            logprobs = out.logits[0, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(1, tokens[datum.start :, None])[:, 0]
            ppo(chosen, *_arrays([datum], self.device)).backward()
            done += self.work(n, causal_pairs(n), tail + 1)
        return done


def _arrays(datums: Sequence[Datum], device: torch.device) -> tuple[Tensor, Tensor]:
    """Behaviour logprobs and advantages of all datums, end to end."""
    behaviour = torch.tensor([q for d in datums for q in d.logprobs], device=device)
    return behaviour, torch.tensor([a for d in datums for a in d.advantages], device=device)
