"""The command line: flags in, exit status out.

Rule: torch is imported after the flags are checked, so that --help and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tinker_claw.connections import Server, listen
from tinker_claw.errors import ClawError, ConfigError
from tinker_claw.files import for_owner_only
from tinker_claw.shipped import MODELS, install

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_HOST = "127.0.0.1"
"""It asks for no key, so it serves this machine alone."""
_DRAIN_S = 2
"""Seconds that answers in flight may take when the server ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes. An error is one sentence on standard error."""
    for_owner_only()
    command = argparse.ArgumentParser(
        prog="python -m local_gpu.tinker",
        description="Stand in for Tinker's service, on this machine's CPU, for its user alone. Set "
        "TINKER_BASE_URL to the address that is printed, and TINKER_API_KEY to any key that starts "
        "with tml-.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = command.add_argument
    flag("--model", default="demo", help="demo, a folder, or a Hugging Face id")
    flag("--name", help="what clients call it; --model without")
    flag("--root", type=Path, default=Path("runs/tinker"), help="folder of the checkpoints")
    flag("--port", type=int, default=8000, help=f"port on {_HOST}; 0 takes a free one")
    flags = command.parse_args(arguments)
    try:
        if missing := [name for name in ("torch", "peft") if find_spec(name) is None]:
            raise ConfigError(f"this needs {', '.join(missing)}: {install('local')}")
        with listen(_HOST, flags.port) as listening:
            asyncio.run(_serve(flags, listening))
    except ClawError as error:
        sys.stderr.write(f"local_gpu.tinker: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:  # while loading; afterwards Ctrl-C is a signal that `_serve` handles
        os._exit(EXIT_INTERRUPTED)  # a normal exit would wait for the thread that loads
    return 0


async def _serve(flags: argparse.Namespace, listening: socket.socket) -> None:
    from local_gpu.backend import LocalBackend
    from local_gpu.config import LocalConfig
    from local_gpu.tinker.app import create_app
    from local_gpu.tinker.checkpoints import locked
    from local_gpu.tinker.service import Service

    name, source = flags.name or flags.model, str(MODELS.get(flags.model, flags.model))
    config = LocalConfig(model=source, name=name, root=flags.root, device="cpu")
    with locked(flags.root) as store:
        backend = await LocalBackend.start(config, store.folder)
        service = Service(config, store, backend)
        server = Server(create_app(service), timeout_graceful_shutdown=_DRAIN_S)

        def stop() -> None:
            if server.should_exit:
                os._exit(EXIT_INTERRUPTED)
            server.should_exit = True
            service.futures.cancel()  # clients that poll for a result get an error

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        url = f"http://{_HOST}:{listening.getsockname()[1]}"
        print(
            f"serving {name} at {url}   on the client: TINKER_BASE_URL={url} "
            "TINKER_API_KEY=any key that starts with tml-",
            flush=True,
        )
        await server.serve(sockets=[listening])
        await backend.aclose()


if __name__ == "__main__":
    sys.exit(main())
