"""A model's tokenizer and chat template, read from its folder.

Rule: torch is not imported for it, as `AutoTokenizer` would: seconds and half a gigabyte for a
gateway whose model is elsewhere. The model was trained with its `tokenizer.json`; a folder without
one is left to `AutoTokenizer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from renderers.base import load_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tinker_claw.render.eyes import read_json


def load(model: str) -> Any:
    """Load the tokenizer of a local folder or hub id.

    Raises:
        OSError, ValueError, ...: there is none, or it cannot be read.
    """
    folder = Path(model)
    config = read_json(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").exists() or "auto_map" in config:
        return load_tokenizer(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, clean_up_tokenization_spaces=False
    )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    added_tokens = backend.get_added_tokens_decoder().values()
    if backend.normalizer is not None and any(token.normalized for token in added_tokens):
        # If found in normalised text, a token could have other spellings than its own.
        tokenizer._tokenizer = _as_written(backend)  # pyright: ignore[reportPrivateUsage]
    return tokenizer


def _as_written(backend: Tokenizer) -> Tokenizer:
    """Return the tokenizer with added tokens that are found in the text as it is written."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token | {"normalized": False} for token in state["added_tokens"]]
    return Tokenizer.from_str(json.dumps(state))
