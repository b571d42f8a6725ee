"""Supervised training of the demo's model on drawn dialogues.

One rule: only what an assistant would have sampled is trained, its text and the stop token. A hint
is encoded apart from the message before it and the ids are joined, because that is how the gateway
splices a hint into a prompt that is already tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.demo.recipe.data import training_dialogue
from examples.demo.recipe.grammar import HINTED, Line, Priors
from examples.demo.recipe.tokenizer import CONTEXT_TOKENS, PAD_ID, START_ID, STOP_ID, VOCABULARY

_POOL_DIALOGUES = 320
"""Dialogues that are drawn together and sorted by length, so that batches have little padding."""
_MUON_FACTOR = 6.0
"""Muon's rate over Adam's: its updates of a layer's matrices have unit spectral norm."""
_IGNORED = -100
"""The label of a token that is not trained."""


class Example(NamedTuple):
    """A dialogue as tokens."""

    ids: list[int]
    labels: list[int]
    """[T] the id itself where it is trained, else -100."""


@dataclass(frozen=True)
class Stage:
    """One run over drawn dialogues with a rate that warms up and falls as a cosine."""

    steps: int
    peak_rate: float
    priors: Priors
    dressed: float
    """Share of dialogues inside an agent's trimmings, 0 to 1."""
    seed: int
    worded: float = 0.0
    """Share of dialogues about a sum that is asked for in any way, 0 to 1."""
    batch_tokens: int = 2560
    """Padded tokens of a batch, at most."""
    batch_dialogues: int = 24
    """Dialogues of a batch, at most: without it the short skills would share very few steps."""
    warmup_steps: int = 40

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, down to 2 % of the peak."""
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * fall * min(1.0, (step + 1) / self.warmup_steps)


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Make the untrained model, 0.73 M parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=PAD_ID,
        eos_token_id=STOP_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3ForCausalLM(config)


def encode_prompt(tokenizer: Tokenizer, lines: Sequence[Line]) -> list[int]:
    """Return the ids of a conversation up to the place where the assistant begins to write."""
    ids = [token for line in lines for token in _encode_line(tokenizer, line).ids]
    return [*ids, START_ID, *tokenizer.encode("assistant\n").ids]


def encode_dialogue(tokenizer: Tokenizer, lines: Sequence[Line]) -> Example:
    """Return a dialogue's ids and labels."""
    ids: list[int] = []
    labels: list[int] = []
    for line in lines:
        example = _encode_line(tokenizer, line)
        ids += example.ids
        labels += example.labels
    return Example(ids, labels)


def _encode_line(tokenizer: Tokenizer, line: Line) -> Example:
    """Return one message's ids and labels, role line and closing line break included."""
    head = [START_ID, *tokenizer.encode(f"{line.role}\n").ids]
    body = tokenizer.encode(line.text).ids
    if line.hint is not None:
        body = [*body, *tokenizer.encode(HINTED.format(hint=line.hint)).ids]
    body = [*body, STOP_ID]
    tail = tokenizer.encode("\n").ids
    trained = body if line.role == "assistant" else [_IGNORED] * len(body)
    ignored_head, ignored_tail = [_IGNORED] * len(head), [_IGNORED] * len(tail)
    return Example([*head, *body, *tail], [*ignored_head, *trained, *ignored_tail])


def _batches(draw: Callable[[Random], Example], stage: Stage) -> Iterator[list[Example]]:
    """Yield batches of similar length without end, each at most `batch_tokens` when padded."""
    rng = Random(stage.seed)
    while True:
        pool = [draw(rng) for _ in range(_POOL_DIALOGUES)]
        pool.sort(key=lambda example: len(example.ids))
        batches: list[list[Example]] = []
        for example in pool:
            size = len(batches[-1]) + 1 if batches else math.inf
            if size > stage.batch_dialogues or size * len(example.ids) > stage.batch_tokens:
                batches.append([])
            batches[-1].append(example)
        rng.shuffle(batches)
        yield from batches


def batch_loss(model: Qwen3ForCausalLM, batch: Sequence[Example]) -> torch.Tensor:
    """Return the mean negative logprob of the trained tokens, a scalar in nats.

    Padding stands on the right, where causal attention keeps it from every real token. Logits are
    made at trained positions only.
    """
    longest = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)  # [B, T]
    labels = torch.full((len(batch), longest), _IGNORED)  # [B, T]
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        labels[row, : len(example.labels)] = torch.tensor(example.labels)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, D]
    targets = labels[:, 1:]
    trained = targets != _IGNORED
    logits = model.lm_head(hidden[:, :-1][trained])  # [N, V]
    return F.cross_entropy(logits, targets[trained])


def _is_layer_matrix(weight: torch.Tensor) -> bool:
    """Say whether a weight is a matrix of a layer; the embedding, [V, D], is not."""
    return weight.ndim == 2 and weight.shape[0] != VOCABULARY


def train(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    stage: Stage,
    progress: Callable[[int, float], None],
    draw: Callable[[Random], Example] | None = None,
) -> None:
    """Train the model in place; `progress` gets every step and its loss in nats per token.

    Args:
        draw: makes a dialogue; without it they are the stage's.

    The layers' matrices are trained with Muon, with which the loss fell faster than with Adam
    alone in a trial of 600 steps; embedding and norms with Adam.
    """
    model.train()
    layers = [weight for weight in model.parameters() if _is_layer_matrix(weight)]
    others = [weight for weight in model.parameters() if not _is_layer_matrix(weight)]
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01)
    muon = torch.optim.Muon(layers, momentum=0.95, weight_decay=0.01)

    def dialogue(rng: Random) -> Example:
        lines = training_dialogue(rng, stage.priors, stage.dressed, stage.worded)
        return encode_dialogue(tokenizer, lines)

    batches = _batches(draw or dialogue, stage)
    for step in range(stage.steps):
        adam.param_groups[0]["lr"] = stage.rate(step)
        muon.param_groups[0]["lr"] = _MUON_FACTOR * stage.rate(step)
        loss = batch_loss(model, next(batches))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step()
        progress(step, loss.item())
    model.eval()
