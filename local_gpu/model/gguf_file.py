"""Write the model of a GGUF file as a folder that transformers reads.

Rule: the folder is complete or absent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tinker_claw.errors import ConfigError
from tinker_claw.shipped import install


class NotHere(ConfigError):
    """There is no model; the message says why, and what to do."""


def converted(
    file: Path,
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    mend: Callable[[Any, Any], object],
) -> Path:
    """Return the folder, written now if it is missing.

    Args:
        mend: changes the model and its tokenizer before they are written.

    Raises:
        NotHere: it could not be read or written.
    """
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise NotHere(f"{file.name} is read with the package gguf: {install('local,real')}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        draft = Path(work) / "draft"
        try:
            _write(file, draft, dtype, mend)
        except Exception as error:  # each of four libraries has its own
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotHere(
                f"{file} could not be written as {folder} ({why}). See that the disk has room, "
                "and start again; if it stays so, remove the file."
            ) from error
        draft.rename(folder)
    return folder


def _write(file: Path, folder: Path, dtype: str, mend: Callable[[Any, Any], object]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: Any = {"gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **options)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, quantization_config=GgufConfig(dequantize=True), dtype=dtype, **options
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # nothing is quantised any more
    mend(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
