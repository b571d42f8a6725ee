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
    found = PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, clean_up_tokenization_spaces=False
    )
    backend = found.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    known = backend.get_added_tokens_decoder().values()
    if backend.normalizer is not None and any(token.normalized for token in known):
        # If found in normalised text, a token could have other spellings than its own.
        found._tokenizer = _as_written(backend)  # pyright: ignore[reportPrivateUsage]
    return found


def _as_written(backend: Tokenizer) -> Tokenizer:
    """Return the tokenizer with added tokens that are found in the text as it is written."""
    told = json.loads(backend.to_str())
    told["added_tokens"] = [token | {"normalized": False} for token in told["added_tokens"]]
    return Tokenizer.from_str(json.dumps(told))
