"""The command line: flags in, exit status out.

Rule: torch is imported after the flags are checked, so that --help and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_claw.connections import allow_open_files, listen
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.files import close_to_others, for_owner_only
from tinker_claw.shipped import install

if TYPE_CHECKING:
    from local_gpu.tinker.config import WireConfig

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_SERVER_FLAGS = ("host", "port")
_KEY = "TINKER_SERVER_API_KEY"
_SAMPLER_KEY = "TINKER_SERVER_SAMPLER_API_KEY"
"""Environment variables of keys: every account of the machine can read a command line, not
these."""


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
        os._exit(EXIT_INTERRUPTED)  # a normal exit would wait for the thread that loads
    return 0


def _run(host: str, port: int, flags: dict[str, Any]) -> None:
    if missing := [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]:
        raise ConfigError(f"this needs {', '.join(missing)}: {install('local')}")
    from local_gpu.tinker.config import check_exposure

    config = _config(flags)
    check_exposure(host, config.api_key)

    allow_open_files()
    closed = close_to_others(config.local.root, all_of_it=True)
    if closed:
        _say(f"{len(closed)} files of {config.local.root} were open to others; they are closed now")
    with listen(host, port) as listening:
        asyncio.run(_serve(config, listening))


def _config(flags: dict[str, Any]) -> WireConfig:
    """Make the config of flags, which are named by the fields that they set."""
    from local_gpu.config import LocalConfig
    from local_gpu.tinker.config import WireConfig, source_of

    key, model = _key(flags.pop("api_key")), flags.pop("model")
    flags["name"] = flags["name"] or model
    for name in ("sampler_urls", "train_gpus"):
        flags[name] = tuple(flags[name])
    ranks = max(1, len(flags["train_gpus"]))
    if flags["shard"] == "on" and ranks == 1:
        raise ConfigError("--shard on splits the base over GPUs: name several, --train-gpus 0 1")
    local = LocalConfig(
        model=source_of(model),
        policy=False,
        ranks=ranks,
        sampler_api_key=os.environ.get(_SAMPLER_KEY) or None,
        **flags,
    )
    return WireConfig(local=local, api_key=key)


def _key(given: str | None) -> str | None:
    """Value of --api-key, or of the file that it names after an @; else the variable.

    Raises:
        ConfigError: the file cannot be read.
    """
    if given is None:
        return os.environ.get(_KEY) or None
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key {given}: the file cannot be read ({error})") from error


async def _serve(config: WireConfig, listening: socket.socket) -> None:
    from local_gpu.tinker.app import create_app
    from local_gpu.tinker.server import serve, url_of
    from local_gpu.tinker.service import Service

    _say(f"loading {config.offered} from {config.local.model}; a large model takes minutes ...")
    key = "any key that starts with tml-" if config.api_key is None else "your --api-key"

    def started() -> None:
        print(
            f"serving {config.offered} at {url_of(listening)}   on the client: "
            f"TINKER_BASE_URL={url_of(listening)} TINKER_API_KEY={key}",
            flush=True,
        )

    async with Service.running(config, _say) as service:
        context = service.shared.backend.serving.context_tokens
        _say(f"loaded: context {context} tokens, checkpoints in {config.local.root}")
        await serve(create_app(service), listening, started)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    add("--root", type=Path, default=Path("runs/wire"), help="folder of the checkpoints")
    add("--host", default="127.0.0.1", help="address to listen on; others need --api-key")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add(
        "--api-key",
        help="starts with tml-; better @FILE, which holds it, or the variable "
        f"{_KEY}; without any a client may send any key, on loopback only",
    )
    machine = top.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    machine.add_argument(
        "--context-tokens", type=int, help="prompt and reply together; without it the model's own"
    )
    machine.add_argument(
        "--base-quantization",
        dest="quantization",
        choices=["none", "4bit"],
        default="none",
        help="of the base's linear layers, where it learns",
    )
    halves = top.add_argument_group("several GPUs, and samplers of their own")
    halves.add_argument(
        "--train-gpus", type=int, nargs="+", default=(), help="which GPUs learn, one a rank"
    )
    halves.add_argument(
        "--shard",
        choices=["on", "off"],
        default="off",
        help="split the base over these GPUs, where one has too little room for it; all models "
        "then have rank 32",
    )
    halves.add_argument(
        "--sampler-urls",
        nargs="+",
        default=(),
        help=f"vLLM servers, needed on GPUs; their key is in {_SAMPLER_KEY}",
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
