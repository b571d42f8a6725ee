"""Make a vocabulary of Qwen3's size, for machines where Qwen3's own cannot be fetched.

Byte-level BPE with Qwen3's splitting rule, its added tokens and its number of ids, trained on the
Python sources and documents that are on this machine. The cost of encoding depends on the size of
the tables and the length of the tokens, which are like Qwen3's; the ids differ.

Rule: made once per recipe and kept in the user's cache folder, never in the repository.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as split
from transformers import PreTrainedTokenizerFast

FULL = 151_643
"""Size of Qwen3's vocabulary without its added tokens."""
ADDED = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_NOT_SPECIAL = ADDED[14:]
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RECIPE = "2"
"""Number of the recipe; another one rebuilds the vocabulary."""
_CORPUS_BYTES = 60_000_000
_PIECE = 100_000
"""Characters handed to the trainer at once."""


def load(size: int = FULL, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the tokenizer, made if it is missing; `size` without the added
    tokens."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(f"{_RECIPE} {size} {python} {_CORPUS_BYTES}".encode()).hexdigest()[:12]
    folder = cache() / f"vocabulary-{key}"
    if not folder.exists():
        say(f"training a vocabulary of {size + len(ADDED):,} ids, once (about a minute)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as making:
            _train(size, Path(making) / "done")
            # Whoever else makes it at the same time makes the same.
            if not folder.exists():
                (Path(making) / "done").rename(folder)
    return folder


def cache() -> Path:
    """Folder where benchmarks keep what takes long to make."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tinker-claw-benchmarks"


def _train(size: int, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.Sequence(
        [
            split.Split(Regex(_PATTERN), behavior="isolated"),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=split.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=32,
    )
    tokenizer.train_from_iterator(_pieces(_corpus_bytes(size)), trainer)
    tokenizer.add_tokens(
        [AddedToken(t, special=t not in _NOT_SPECIAL, normalized=False) for t in ADDED]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=131_072,
    )
    wrapped.save_pretrained(folder)


def _corpus_bytes(size: int) -> int:
    return min(_CORPUS_BYTES, 400 * size)


def _pieces(limit: int) -> Iterator[str]:
    """Yield text of this machine, at most `limit` bytes, half of it prose if there is enough."""
    read = 0
    for file in _files():
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        for at in range(0, len(text), _PIECE):
            yield text[at : at + _PIECE]
        read += len(text)
        if read > limit:
            return


def _files() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    roots = [Path(paths[name]) for name in ("stdlib", "purelib")]
    for endings in ((".md", ".rst", ".txt"), (".py",)):
        for root in roots:
            yield from (f for f in sorted(root.rglob("*")) if f.suffix in endings and f.is_file())
