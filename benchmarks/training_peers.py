"""The other sides: peft with transformers and, where installed, the parts that TRL trains with.

TRL has no step on given completions in its public interface; what its GRPO trainers compute is
driven here by the same pieces: the head of `add_fused_lm_head` and, from its asynchronous trainer,
`TreeRow` with its attention (FlashAttention 3, so on CUDA alone). Loop, budget and loss are ours.

Rule: a peer gets its best setting, bfloat16 autocast on CUDA included, and the same base tensors.
"""

from __future__ import annotations

import importlib
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


class LeftOut(Exception):
    """A side cannot be measured here; the message says why."""


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
        self.patch(module)
        self.model: Any = with_peft(module, settings.lora.rank, settings.lora.alpha)
        take_over(self.model, settings.adapter)
        if settings.checkpointing:
            checkpoint_layers(self.model)
        self._parameters = trained(self.model)
        self._adam = torch.optim.AdamW(self._parameters.values(), lr=0.0)

    def patch(self, module: Any) -> None:
        """Change the model before peft wraps it."""

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
            some = datums[first : first + rows]
            with self.autocast():
                loss = padded_loss(self.model, some, self.device)
            loss.backward()
            lengths = [len(d.tokens) for d in some]
            longest, even = max(lengths), len(set(lengths)) == 1
            # transformers drops a mask that hides nothing, and SDPA is causal then.
            pairs = causal_pairs(longest) if even else longest**2
            computed = len(some) * longest
            done += self.work(computed, len(some) * pairs, computed)
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


class TrlFused(Peer):
    """TRL's fused head, one sample at a time, without padding and without stored logits."""

    head_products = 3

    def patch(self, module: Any) -> None:
        _trl("trl.trainer.utils").add_fused_lm_head(module, outputs=("log_probs",))

    def backward(self, datums: Sequence[Datum]) -> Work:
        done = self.work(0, 0, 0)
        for datum in datums:
            tokens = torch.tensor(datum.tokens, device=self.device)[None]
            labels = tokens.clone()
            labels[:, : datum.start] = -100
            with self.autocast():
                out = self.model(input_ids=tokens, labels=labels, fused_lm_head=True)
            chosen = out.log_probs[0, datum.start - 1 :]
            ppo(chosen, *_arrays([datum], self.device)).backward()
            n = len(datum.tokens)
            # Only where Triton runs it leaves out what has no label.
            rows = n - datum.start if self.device.type == "cuda" else n - 1
            done += self.work(n, causal_pairs(n), rows)
        return done


class TrlTree(Peer):
    """TRL's packed rows with shared prefixes, from its asynchronous GRPO trainer."""

    head_products = 3

    def __init__(self, name: str, settings: Settings) -> None:
        if settings.base.device.type != "cuda":
            raise LeftOut("its attention is FlashAttention 3, on CUDA alone")
        self._packing = _trl("trl.experimental.async_grpo.packing")
        self._packing.register_tree_attention()
        try:
            importlib.import_module("kernels")
            self._packing._flash_attn()
        except Exception as error:  # any error of a hub, a loader or a driver is reported
            raise LeftOut(f"its FlashAttention 3 did not load: {_first_line(error)}") from error
        super().__init__(name, settings, self._packing.TREE_ATTENTION)

    def patch(self, module: Any) -> None:
        _trl("trl.trainer.utils").add_fused_lm_head(module, outputs=("log_probs",))

    def backward(self, datums: Sequence[Datum]) -> Work:
        done = self.work(0, 0, 0)
        row, mine = self._packing.TreeRow(), list[Datum]()
        for datum in datums:
            sample = self._sample(datum)
            if mine and not row.fits(sample, self.settings.pass_tokens):
                done += self._row(row, mine)
                row, mine = self._packing.TreeRow(), []
            row.add(sample)
            mine.append(datum)
        return done + self._row(row, mine)

    def _row(self, row: Any, datums: Sequence[Datum]) -> Work:
        packed = row.pack()
        longest_q, longest_k = packed.pop("tree_max_seqlens").tolist()
        on = {name: tensor.to(self.device) for name, tensor in packed.items()}
        with self.autocast():
            out = self.model(
                input_ids=on["input_ids"][None],
                position_ids=on["position_ids"][None],
                shift_labels=on["shift_labels"][None],
                fused_lm_head=True,
                tree_kv_index=on["tree_kv_index"],
                tree_cu_seqlens_q=on["tree_cu_seqlens_q"],
                tree_cu_seqlens_k=on["tree_cu_seqlens_k"],
                tree_max_seqlen_q=longest_q,
                tree_max_seqlen_k=longest_k,
            )
        chosen = out.log_probs[0][on["token_index"]]
        ppo(chosen, *_arrays(datums, self.device)).backward()
        # `load`: the depth of every node, itself included, added up.
        labelled = int((packed["shift_labels"] != -100).sum())
        return self.work(len(packed["input_ids"]), row.load, labelled)

    @staticmethod
    def _sample(datum: Datum) -> dict[str, Any]:
        tail = len(datum.tokens) - datum.start
        mask = torch.zeros(len(datum.tokens), dtype=torch.long)
        mask[datum.start :] = 1
        behaviour = torch.zeros(len(datum.tokens))
        behaviour[-tail:] = torch.tensor(datum.logprobs)
        # Advantages per token are put in by the caller: there a sample has one.
        return {
            "input_ids": torch.tensor(datum.tokens),
            "completion_mask": mask,
            "old_log_probs": behaviour,
            "advantage": 0.0,
            "group_id": 0,
        }


def _arrays(datums: Sequence[Datum], device: torch.device) -> tuple[Tensor, Tensor]:
    """Behaviour logprobs and advantages of all datums, end to end."""
    behaviour = torch.tensor([q for d in datums for q in d.logprobs], device=device)
    return behaviour, torch.tensor([a for d in datums for a in d.advantages], device=device)


def _trl(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LeftOut(f"TRL is not installed whole: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
