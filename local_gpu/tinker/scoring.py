"""What a request wants to know about its prompt, answered by one forward pass.

Rule: rows before the first one that is asked for are not scored, and logits never exist for the
whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from local_gpu.learn.head import read_logprobs
from local_gpu.learn.passes import Body
from local_gpu.sample.drawing import Recipe, draw
from local_gpu.tinker.requests import SampleAsk, TensorAsk
from local_gpu.tinker.wire import NOT_SCORED, PromptScores, densify
from tinker_claw.errors import RequestError, SamplerError
from tinker_claw.types import Completion, SamplingParams, StopReason


@dataclass(frozen=True, slots=True)
class Targets:
    """Ids to score at every position but the first."""

    ask: TensorAsk
    ids: NDArray[np.int64]
    """(N - 1, K); -1 asks for nothing."""

    @classmethod
    def of(cls, ask: TensorAsk, vocabulary: int) -> Targets:
        """Unfold a table whose shape was checked: where and when it is used, not before."""
        values = np.array(ask.data, np.int64)
        try:
            if ask.sparse_crow_indices is None:
                ids = values.reshape(ask.shape)
            else:
                crow = np.array(ask.sparse_crow_indices, np.int64)
                col = np.array(ask.sparse_col_indices or [], np.int64)
                ids = densify(values, crow, col, ask.shape, pad=-1)
        except (ValueError, OverflowError) as error:
            raise RequestError(
                f"target_prompt_logprobs does not fill its shape {ask.shape}."
            ) from error
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= vocabulary):
            raise RequestError(f"target_prompt_logprobs has an id outside -1..{vocabulary - 1}.")
        return cls(ask, ids)

    def first(self) -> int:
        """The first prompt position that is asked about; N if none is."""
        rows = np.flatnonzero((self.ids >= 0).any(axis=1))
        return int(rows[0]) + 1 if len(rows) else len(self.ids) + 1

    def filled(self, scored: NDArray[np.float32]) -> pb.Tensor:
        """The scores (N - 1, K) in the layout of the request; 0 where nothing was asked."""
        dense = np.where(self.ids >= 0, scored, np.float32(0)).astype(np.float32)
        tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=self.ask.shape)
        if self.ask.sparse_crow_indices is None:
            tensor.dense = dense.tobytes()
            return tensor
        crow = np.array(self.ask.sparse_crow_indices, np.int64)
        col = np.array(self.ask.sparse_col_indices or [], np.int64)
        rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
        tensor.sparse_csr.values = dense[rows, col].tobytes()
        tensor.sparse_csr.crow_indices = crow.tobytes()
        tensor.sparse_csr.col_indices = col.tobytes()
        return tensor


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """What is asked about a prompt of N tokens."""

    logprobs: bool
    logprobs_from: int
    """Positions before it get no logprobs and no candidates."""
    top_k: int
    targets: TensorAsk | None
    """Of a shape that fits; its values are not looked at yet."""

    @classmethod
    def of(cls, ask: SampleAsk, prompt_tokens: int, vocabulary: int, most_cells: int) -> PromptAsk:
        """Raises RequestError naming what does not fit."""
        last_n = ask.prompt_logprobs_last_n
        if last_n is not None and not ask.prompt_logprobs:
            raise RequestError("prompt_logprobs_last_n needs prompt_logprobs.")
        if last_n is not None and not 1 <= last_n <= prompt_tokens - 1:
            raise RequestError(
                f"prompt_logprobs_last_n is {last_n}, not in 1..{prompt_tokens - 1}."
            )
        if ask.topk_prompt_logprobs > vocabulary:
            raise RequestError(f"topk_prompt_logprobs is above the vocabulary of {vocabulary}.")
        wanted, width = ask.target_prompt_logprobs, 0
        if wanted is not None:
            shape = wanted.shape[:3]  # what is longer is wrong whatever follows
            if len(shape) != 2 or shape[0] != prompt_tokens - 1 or shape[1] < 1:
                raise RequestError(
                    f"target_prompt_logprobs has shape {shape}; a prompt of {prompt_tokens} tokens "
                    f"takes [{prompt_tokens - 1}, K]."
                )
            if (width := shape[1]) > vocabulary:
                raise RequestError(
                    f"target_prompt_logprobs has K = {width}, and the vocabulary is {vocabulary}."
                )
        if (cells := prompt_tokens * (ask.topk_prompt_logprobs + width)) > most_cells:
            raise RequestError(
                f"{prompt_tokens} prompt tokens with {cells // prompt_tokens} logprobs each are "
                f"{cells}; this server gives {most_cells} at once: ask for fewer candidates."
            )
        return cls(
            logprobs=bool(ask.prompt_logprobs),
            logprobs_from=1 if last_n is None else prompt_tokens - last_n,
            top_k=ask.topk_prompt_logprobs,
            targets=wanted,
        )

    @property
    def anything(self) -> bool:
        return self.logprobs or self.top_k > 0 or self.targets is not None

    def first(self, prompt_tokens: int, targets: Targets | None) -> int:
        """The first position whose row must be computed."""
        plain = self.logprobs_from if self.logprobs or self.top_k else prompt_tokens
        return min(plain, targets.first() if targets else prompt_tokens)


@torch.no_grad()
def score(
    body: Body, module: Any, prompt: list[int], ask: PromptAsk, then: SamplingParams
) -> tuple[PromptScores, Completion]:
    """Score a prompt and draw the one token that follows it, in the torch thread."""
    device, head = body.device, module.get_output_embeddings()
    named = None if ask.targets is None else Targets.of(ask.targets, head.out_features)
    n, first = len(prompt), ask.first(len(prompt), named)
    tokens = torch.tensor(prompt)
    (rows,) = body.hidden(module, [tokens], [first - 1])
    tokens = tokens.to(device)
    ids = tokens[first:, None]
    if named is not None:
        rest = torch.from_numpy(named.ids[first - 1 :]).to(device)
        ids = torch.cat([ids, rest.clamp(min=0)], dim=1)
    read = read_logprobs(head, rows[:-1], ids, ask.top_k)
    if not bool(read.chosen.isfinite().all()):
        raise SamplerError("The model's logprobs are not finite.")
    chosen = read.chosen.float().cpu().numpy()
    completion = _one_token(head(rows[-1:]).float(), then)
    shown = slice(ask.logprobs_from - first, None)
    top_ids, top, own, targets = None, None, None, None
    if ask.logprobs:
        own = np.full(n, np.nan, np.float32)
        own[ask.logprobs_from :] = chosen[shown, 0]
    if ask.top_k:
        top_ids = np.zeros((n, ask.top_k), np.int32)
        top = np.full((n, ask.top_k), NOT_SCORED, np.float32)
        top_ids[ask.logprobs_from :] = read.top_ids.cpu().numpy()[shown]
        top[ask.logprobs_from :] = read.top.float().cpu().numpy()[shown]
    if named is not None:
        full = np.zeros(named.ids.shape, np.float32)
        full[first - 1 :] = chosen[:, 1:]
        targets = named.filled(full)
    return PromptScores(own, top_ids, top, targets), completion


def _one_token(logits: torch.Tensor, params: SamplingParams) -> Completion:
    uniform = Random(params.seed).random()
    recipe = Recipe(params.temperature, params.top_p, params.top_k, uniform, params.student_topk)
    (drawn,) = draw(logits, [recipe])
    if drawn is None:
        raise SamplerError("The model's logits are not finite.")
    stopped = drawn.token in params.stop_tokens
    asked = params.student_topk > 0
    return Completion(
        tokens=(drawn.token,),
        logprobs=(drawn.logprob,),
        topk_ids=(drawn.topk_ids,) if asked else (),
        topk_logprobs=(drawn.topk_logprobs,) if asked else (),
        stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
        params=params,
    )
