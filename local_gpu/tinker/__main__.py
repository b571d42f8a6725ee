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

from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.files import close_to_others, for_owner_only
from tinker_claw.shipped import install

if TYPE_CHECKING:
    from local_gpu.tinker.config import WireConfig

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_SERVER_FLAGS = ("host", "port")
_KEYS = {
    "api_key": "TINKER_SERVER_API_KEY",
    "sampler_api_key": "TINKER_SERVER_SAMPLER_API_KEY",
}
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
    from local_gpu.tinker.server import listen

    closed = close_to_others(config.local.root, all_of_it=True)
    if closed:
        _say(f"{len(closed)} files of {config.local.root} were open to others; they are closed now")
    with listen(host, port) as listening:
        asyncio.run(_serve(config, listening))


def _config(flags: dict[str, Any]) -> WireConfig:
    """Make the config of flags, which are named by the fields that they set."""
    from local_gpu.config import LocalConfig
    from local_gpu.tinker.config import WireConfig, source_of

    for name, variable in _KEYS.items():
        flags[name] = _key(f"--{name.replace('_', '-')}", flags[name], variable)
    own = {name: flags.pop(name) for name in ("api_key", "open_samplers")}
    model = flags.pop("model")
    flags["name"] = flags["name"] or model
    for name in ("sampler_urls", "train_gpus"):
        flags[name] = tuple(flags[name])
    flags["ranks"] = len(flags["train_gpus"]) or flags["ranks"]
    if flags["shard"] == "on" and flags["ranks"] == 1:
        raise ConfigError("--shard on splits the base over the ranks that learn: give --ranks 2")
    local = LocalConfig(model=source_of(model), policy=False, **flags)
    return WireConfig(local=local, **own)


def _key(flag: str, given: str | None, variable: str) -> str | None:
    """Value of a flag, or of the file that it names after an @; else the variable.

    Raises:
        ConfigError: the file cannot be read.
    """
    if given is None:
        return os.environ.get(variable) or None
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {given}: the file cannot be read ({error})") from error


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
    model.add_argument("--alpha", type=int, default=32, help="of every LoRA adapter")
    add("--root", type=Path, default=Path("runs/wire"), help="folder of the checkpoints")
    add("--host", default="127.0.0.1", help="address to listen on; others need --api-key")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add(
        "--api-key",
        help="starts with tml-; better @FILE, which holds it, or the variable "
        f"{_KEYS['api_key']}; without any a client may send any key, on loopback only",
    )
    machine = top.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    machine.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    machine.add_argument(
        "--checkpointing",
        choices=["auto", "on", "off"],
        default="auto",
        help="of activations: less memory, a third more work; auto is on for CUDA, and where "
        "memory is short",
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
    machine.add_argument(
        "--base-quantization",
        dest="quantization",
        choices=["none", "4bit"],
        default="none",
        help="of the base's linear layers, where it learns",
    )
    machine.add_argument("--threads", type=int, help="of torch; without it torch's own choice")
    halves = top.add_argument_group("several GPUs, and samplers of their own")
    halves.add_argument("--ranks", type=int, default=1, help="processes that learn together")
    halves.add_argument(
        "--train-gpus", type=int, nargs="+", default=(), help="which GPUs learn, one a rank"
    )
    halves.add_argument(
        "--shard",
        choices=["on", "off"],
        default="off",
        help="split the base over the ranks, where one GPU has too little room for it",
    )
    halves.add_argument(
        "--rank", type=int, default=32, help="of all models, where the base is split over GPUs"
    )
    halves.add_argument(
        "--sampler-urls", nargs="+", default=(), help="vLLM servers, needed on GPUs"
    )
    halves.add_argument(
        "--sampler-api-key",
        help=f"of all --sampler-urls; better @FILE, or the variable {_KEYS['sampler_api_key']}",
    )
    halves.add_argument(
        "--student-topk", type=int, default=0, help="candidates per token that they must give"
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
