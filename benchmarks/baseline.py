"""What a user would write without this project: peft, padded batches, full logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tinker_claw.types import Datum


class Plain:
    """A peft model with a padded PPO step, and `generate`."""

    def __init__(self, folder: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder)
        shape = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear")
        self.model: Any = get_peft_model(base, shape)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._adam = torch.optim.Adam(trained, lr=1e-4)

    def step(self, datums: Sequence[Datum]) -> None:
        """One clipped-ratio step over one padded batch."""
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
        logits = self.model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        ratio = (chosen - behaviour[:, 1:]).clamp(-10, 10).exp()
        gain = torch.minimum(ratio * advantages[:, 1:], ratio.clamp(0.8, 1.28) * advantages[:, 1:])
        (-gain.sum()).backward()
        self._adam.step()
        self._adam.zero_grad()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Sample every prompt, one after the other."""
        for prompt in prompts:
            self._generate(torch.tensor([list(prompt)]), None, new_tokens)

    def generate_batch(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Sample all prompts in one left-padded batch, which must be complete to begin."""
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        self._generate(tokens, mask, new_tokens)

    def _generate(self, tokens: Any, mask: Any, new_tokens: int) -> None:
        self.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens) if mask is None else mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
