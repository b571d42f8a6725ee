"""torchrun on a leash, on the machine of the control process.

    python -m local_gpu.ranks.leash TORCHRUN'S ARGUMENTS      standard input: a pair of sockets

Rule: when the control process lets go, or is gone, torchrun ends with all of its ranks, at once and
whatever they are doing: also while it waits for other machines, and a rank that does not run.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LEASH = "TINKER_CLAW_LEASH"
"""Set where standard input is the control process's pair of sockets: on its machine alone."""


def when_let_go(call: Callable[[], object]) -> None:
    """Call it, in a thread of its own, once the other end of standard input has hung up."""

    def wait() -> None:
        poll = select.poll()
        poll.register(0, 0)  # a hang-up is reported without being asked for
        poll.poll()
        call()

    threading.Thread(target=wait, daemon=True).start()


def _end_all() -> None:
    """Each rank leads a session of its own, so there is no group to kill."""
    ranks = _children()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    for rank in ranks:  # until then it has its GPU's memory
        with suppress(ChildProcessError):
            os.waitpid(rank, 0)
    os._exit(1)


def _children() -> list[int]:
    """What torchrun has started and not waited for; [] where the system does not say."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(number) for file in lists for number in file.read_text().split()]


if __name__ == "__main__":
    from torch.distributed.run import main

    when_let_go(_end_all)
    main()
