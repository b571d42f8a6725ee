"""Serve a model as an OpenAI-compatible server on this machine, with the package xllamacpp.

    .venv-judge/bin/python examples/judge_check/serve.py runs/models/MODEL.gguf --port 8088

It prints its address when it can answer. Rule: this file needs nothing of the project, as xllamacpp
has an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

CONTEXT_TOKENS = 12_288
"""Room for the examples, three texts of 6,000 characters, and an answer."""
KEPT_MIB = 300
"""Memory for prompts that are kept, so that questions which begin alike are read once."""


def serve(model: str, port: int, *, with_parent: bool) -> None:
    """Serve until the process is told to end, or with its parent. Port 0: any free one."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    started_by = os.getppid()
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_ctx, params.n_parallel, params.cache_ram_mib = CONTEXT_TOKENS, 1, KEPT_MIB
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.ui = params.warmup = False
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while not with_parent or os.getppid() == started_by:
        time.sleep(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--port", type=int, default=8088)
    parser.add_argument("--with-parent", action="store_true", help="end when it has ended")
    options = parser.parse_args()
    serve(options.model, options.port, with_parent=options.with_parent)
