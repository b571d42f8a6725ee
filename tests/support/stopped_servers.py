"""An inference server in a process of its own, which can be stopped and continued.

Like one that hangs, a stopped one keeps its connections open and sends nothing.

    python -m tests.support.stopped_servers tiny|demo          ends when its standard input does
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from local_gpu.model.load import open_base
from tests.support.inference_servers import InferenceServer
from tests.support.pools import tiny_base
from tests.support.processes import ROOT
from tinker_claw.shipped import MODEL_DIR

SLOW_S = 0.05
"""Seconds before each token, so that it can be stopped in a reply."""


class Stoppable:
    """One server in its process."""

    def __init__(self, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stopped_servers", model],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout
        self.url: str = json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def stoppable(model: str) -> Iterator[Stoppable]:
    server = Stoppable(model)
    try:
        yield server
    finally:
        server.end()


def main(model: str) -> None:
    torch.set_num_threads(1)
    if model == "tiny":
        server = InferenceServer(tiny_base())
    else:
        base = open_base(str(MODEL_DIR), device="cpu", dtype="float32", threads=1)
        server = InferenceServer(base, model="demo-base", context=4096)
    server.faults.slow_s = SLOW_S
    server.start()
    print(json.dumps(server.url), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
