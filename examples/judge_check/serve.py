"""Serve a model as an OpenAI-compatible server on this machine, with the package xllamacpp.

It prints its address when it can answer, and ends with the process that started it. Rule: this file
needs nothing of the project, as xllamacpp has an environment of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time

CONTEXT_TOKENS = 12_288
"""Room for the examples, three texts of 6,000 characters, and an answer."""
KEPT_MIB = 300
"""Memory for prompts that are kept, so that questions which begin alike are read once."""


def serve(model: str) -> None:
    """Serve a GGUF file on a free port until the process is told to end, or with its parent."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    started_by = os.getppid()
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.cache_ram_mib = CONTEXT_TOKENS, 1, KEPT_MIB
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.ui = params.warmup = False
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() == started_by:
        time.sleep(1)


if __name__ == "__main__":
    serve(sys.argv[1])
