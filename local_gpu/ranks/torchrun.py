"""Start the ranks of this machine, alone or by torchrun, and end them with their parent.

As a program it is torchrun on a leash, on the machine of the control process:

    python -m local_gpu.ranks.torchrun TORCHRUN'S ARGUMENTS      standard input: a pair of sockets

Rule: when the control process lets go, or is gone, torchrun ends with all of its ranks at once,
whatever they are doing: even while it waits for other machines, and even a stopped rank.

`Ranks` are those of this machine: one as a child of this process, or torchrun with its children.
Rule: they live no longer than this object. All of them hold the other end of its pair of sockets:
when that hangs up, by `stop` or by the end of this process, every one of them ends at once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

LEASH = "TINKER_CLAW_LEASH"
"""Variable that is set where standard input is the control process's pair of sockets: on its
machine only."""


def when_let_go(call: Callable[[], object]) -> None:
    """Call it, in a thread of its own, once the other end of standard input has hung up."""

    def wait() -> None:
        poll = select.poll()
        poll.register(0, 0)  # a hang-up is reported without being asked for
        poll.poll()
        call()

    threading.Thread(target=wait, daemon=True).start()


def _end_all() -> None:
    """End the children of torchrun. Each rank leads a session of its own, so there is no group to
    kill."""
    ranks = _children()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    for rank in ranks:  # until then it has its GPU's memory
        with suppress(ChildProcessError):
            os.waitpid(rank, 0)
    os._exit(1)


def _children() -> list[int]:
    """Ids of the child processes of torchrun; [] where the system does not list them."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(number) for file in lists for number in file.read_text().split()]


if __name__ == "__main__":
    from torch.distributed.run import main

    when_let_go(_end_all)
    main()


_TAIL_BYTES = 3000
_KILLED_S = 10.0
_WRITE_S = 60


class Ranks:
    """The ranks of this machine."""

    def __init__(
        self, module: str, *, ranks: int, extra: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """Start them.

        Args:
            module: what each of them runs, as `python -m` does.
            ranks: how many on this machine; one without `extra` needs no torchrun.
            extra: further arguments of torchrun; () is this machine alone.
            env: besides this process's own.
            log: file that all of them append to.
        """
        ours, theirs = socket.socketpair()
        # A hung rank does not read, and must not block the writer.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _WRITE_S, 0))
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._from = log.stat().st_size if log.exists() else 0
        alone = ranks == 1 and not extra
        launcher = () if alone else (__name__, *_torchrun(ranks, extra), "-m")
        # A cluster's own defaults for torchrun, which are not about these ranks.
        inherited = {name: value for name, value in os.environ.items() if name[:4] != "PET_"}
        inherited |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} if alone else {}
        with ours, theirs, log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *launcher, module],
                stdin=theirs.fileno(),
                stdout=out,
                stderr=out,
                env={**inherited, **env, LEASH: "stdin"},
                start_new_session=True,  # a terminal's Ctrl-C goes to this process only
            )
            self.link = Connection(os.dup(ours.fileno()))

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Wait that long for the ranks to end by themselves."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self) -> None:
        """End the ranks that still run. Bounded."""
        # A reader in another thread holds the link open: shut down the socket itself.
        with suppress(OSError), socket.socket(fileno=os.dup(self.link.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
        self.wait(_KILLED_S)
        if not self.ended():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def tail(self) -> str:
        """Return the end of the ranks' output."""
        with self._log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = max(self._from, file.tell() - _TAIL_BYTES)
            file.seek(start)
            return file.read().decode(errors="replace").strip()


def _torchrun(ranks: int, extra: Sequence[str]) -> list[str]:
    """Arguments of torchrun.

    Only the static rendezvous, and so not --standalone: all others unpickle what they find in a
    store that listens on the network.
    """
    if not extra:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            extra = (
                "--nnodes=1",
                "--master-addr=127.0.0.1",
                f"--master-port={probe.getsockname()[1]}",
            )
    # Only the control process restarts ranks; and torchrun would leave an empty folder each time.
    return [
        *(f"--nproc-per-node={ranks}", "--max-restarts=0", f"--log-dir={os.devnull}"),
        *("--node-rank=0", *extra),
    ]
