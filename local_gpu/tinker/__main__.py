"""The command line: flags in, exit status out.

Rule: torch is imported after the flags are known to be right, so that --help and a wrong flag
answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.files import close_to_others, for_owner_only

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_SERVER_FLAGS = ("host", "port")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop. An error is one sentence on standard error."""
    for_owner_only()
    flags = vars(parser().parse_args(arguments))
    host, port = (flags.pop(name) for name in _SERVER_FLAGS)
    try:
        _run(host, port, flags)
    except ClawError as error:
        sys.stderr.write(f"local_gpu.tinker: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:  # while loading; afterwards Ctrl-C is a signal that `serve` handles
        return EXIT_INTERRUPTED
    return 0


def _run(host: str, port: int, flags: dict[str, Any]) -> None:
    if missing := [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]:
        raise ConfigError(
            f"this needs {', '.join(missing)}; in the project's folder: "
            "pip install -c constraints.txt -e '.[local]'"
        )
    from local_gpu.tinker.config import WireConfig, check_exposure, source_of

    config = WireConfig(**flags)
    check_exposure(host, config.api_key)
    source = source_of(config.model)
    from local_gpu.tinker.server import listen, serve, url_of

    closed, _ = close_to_others(config.root, all_of_it=True)
    if closed:
        _say(f"{len(closed)} files of {config.root} were open to others; they are closed now")
    with listen(host, port) as listening:
        _say(f"loading {config.offered} from {source}; a large model takes minutes ...")
        from local_gpu.tinker.app import create_app
        from local_gpu.tinker.service import build

        shop = build(config)
        _say(
            f"loaded {config.offered} on {shop.base.device}: context {shop.size.context_tokens} "
            f"tokens, checkpoints in {config.root}"
        )
        for note in shop.base.notes:
            _say(note)
        key = "any key that starts with tml-" if config.api_key is None else "your --api-key"

        def started() -> None:
            print(
                f"serving {config.offered} at {url_of(listening)}   on the client: "
                f"TINKER_BASE_URL={url_of(listening)} TINKER_API_KEY={key}",
                flush=True,
            )

        asyncio.run(serve(create_app(shop), listening, started))


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m local_gpu.tinker",
        description="Serve Tinker's HTTP API from your own GPU (or CPU). Any Tinker script then "
        "runs here: set TINKER_BASE_URL to the address that is printed, and TINKER_API_KEY to the "
        "key.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = top.add_argument
    model = top.add_argument_group("model")
    model.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face id")
    model.add_argument(
        "--name",
        help="what clients call it (SamplingClient.get_tokenizer loads that name); --model without",
    )
    model.add_argument("--alpha", type=int, default=32, help="of every LoRA adapter")
    add("--root", type=Path, default=Path("runs/wire"), help="folder of the checkpoints")
    add("--host", default="127.0.0.1", help="address to listen on; others need --api-key")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--api-key", help="starts with tml-; without it any key is taken, on loopback only")
    machine = top.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    machine.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    machine.add_argument(
        "--checkpointing",
        choices=["auto", "on", "off"],
        default="auto",
        help="of activations: less memory, a third more work; auto is on for CUDA",
    )
    machine.add_argument(
        "--context-tokens", type=int, help="prompt and reply together; without it the model's own"
    )
    machine.add_argument(
        "--kv-cache-tokens", type=int, help="per open sampler; without it one and a half contexts"
    )
    machine.add_argument(
        "--open-samplers",
        type=int,
        default=4,
        help="adapters that are ready at once, each with a cache; who needs another one waits",
    )
    machine.add_argument("--max-batch-tokens", type=int, default=512, help="of one sampling pass")
    machine.add_argument("--threads", type=int, help="of torch; without it torch's own choice")
    return top


if __name__ == "__main__":
    sys.exit(main())
