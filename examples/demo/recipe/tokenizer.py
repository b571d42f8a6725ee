"""The demo's tokenizer: byte-level BPE over 4,096 ids, trained on the demo's own text.

One rule: single digits and single line breaks are tokens of their own. The first lets sums be
learned digit by digit; the second makes a message's ids independent of whether its text is encoded
alone or together with the role line in front of it.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.trainers import BpeTrainer

from examples.demo.recipe.corpus import passage
from examples.demo.recipe.dialogues import HINTED, Priors, training_dialogue

VOCABULARY = 4096
"""Number of ids, special tokens included."""

CONTEXT_TOKENS = 65_536
"""Longest sequence that the model accepts."""

SPECIAL_TOKENS = (
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
PAD_ID, START_ID, STOP_ID = range(3)
"""Ids of the first special tokens: the trainer gives these the first ids, in their order."""


def demo_texts(seed: int) -> Iterator[str]:
    """Yield the demo's training texts: 1,500 passages of general text, 1,500 dialogues."""
    rng = Random(seed)
    for _ in range(1500):
        yield passage(rng, 800, 1600)
    for _ in range(1500):
        for line in training_dialogue(rng, Priors(nat=0.25, ai=0.6), dressed=0.2):
            yield line.text
            if line.hint is not None:
                yield HINTED.format(hint=line.hint)


def train_tokenizer(
    texts: Iterable[str],
    vocabulary: int = VOCABULARY,
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
) -> Tokenizer:
    """Train a tokenizer; the same texts give the same ids."""
    tokenizer = Tokenizer(BPE())
    bytes_of = ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex("\n"), "isolated"), Digits(individual_digits=True), bytes_of]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special_tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) into a folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    template = Path(__file__).with_name("chat_template.jinja")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": template.read_text(encoding="utf-8"),
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
