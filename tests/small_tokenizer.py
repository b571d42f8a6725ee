"""A tokenizer for tests: the shipped demo model's, or one trained here in a second."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

SHIPPED = Path(__file__).parent.parent / "local_gpu" / "demo" / "model"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def tokenizer_folder(spare: Path) -> Path:
    """A folder with tokenizer.json; `spare` is used where the model is not shipped."""
    if (SHIPPED / "tokenizer.json").exists():
        return SHIPPED
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text] * 3, trainer)
    tokenizer.save(str(spare / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (spare / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return spare
