"""Bounds on commands: they hold whatever a command tries.

Rule: each bomb ends by itself, too: at most 500 processes, 1 GB, 30 seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.tracks.bounds import DISK, FILES, MEMORY, PROCESSES
from examples.tracks.sandbox import PLACES, run, walls_for
from examples.tracks.terminal import Job
from tests.tracks.scripted import naming

pytestmark = pytest.mark.skipif(walls_for("demo") is None, reason="bubblewrap is not installed")

BEGIN = "import ctypes, mmap, os, signal, threading, time; signal.alarm(25)\n"
WAIT = "time.sleep(20)\n"
FILL = "for n in range(90): open(f'{where}/{n}', 'wb').write(bytes(10 << 20))\n"
MANY = "for n in range(60_000): open(f'{where}/{n}', 'w').close()\n"
LIBC = "libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p\n"
FORK = "processes and threads|Resource temporarily|new thread"  # none but root gets as far as 64
HELD = "512 MB of memory"
FULL = "No space left|512 MB of memory"
BOMBS = {
    "processes": (FORK, f"for _ in range(400):\n if os.fork() == 0: {WAIT}"),
    "processes that fork": (FORK, "for _ in range(8): os.fork()\n"),
    "processes left behind": (
        FORK,
        "for _ in range(220):\n if os.fork() == 0:\n  os.setsid()\n"
        f"  if os.fork() == 0: {WAIT}  os._exit(0)\n",
    ),
    "threads": (
        FORK,
        "threading.stack_size(1 << 16)\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=[20]).start()\n",
    ),
    "memory of one": ("MemoryError|" + HELD, "x = [b'x' * (10 << 20) for _ in range(90)]\n"),
    "memory of four": (HELD, "os.fork(); os.fork()\nx = b'x' * (230 << 20)\n"),
    "memory of forty": (
        HELD,
        f"for _ in range(40):\n if os.fork() == 0: x = b'x' * (22 << 20); {WAIT}",
    ),
    "memory that forks share": (
        HELD,
        "x = mmap.mmap(-1, 900 << 20)\nfor n in range(90): x.write(bytes(10 << 20))\n",
    ),
    "memory without a name": (
        HELD,
        "for n in range(90): os.write(os.memfd_create('m'), bytes(10 << 20))\n",
    ),
    "memory that nobody maps": (
        "exit status 1\n",
        f"{LIBC}for n in range(90):\n"
        " number = libc.shmget(0, 10 << 20, 0o1600); assert number >= 0\n"
        " at = ctypes.c_void_p(libc.shmat(number, None, 0))\n"
        " ctypes.memset(at, 1, 10 << 20); libc.shmdt(at)\n",
    ),
    "/tmp": (FULL, f"where = '/tmp'\n{FILL}"),
    "/dev/shm": (FULL, f"where = '/dev/shm'\n{FILL}"),
    "/dev": ("Read-only", f"where = '/dev'\n{FILL}"),
    "the root": ("Read-only", f"where = '/'\n{FILL}"),
    "a /tmp of its own": (
        FULL,
        f"where = '/tmp'\n{LIBC}mine = os.getuid()\nlibc.unshare(0x10020000)\n"
        "open('/proc/self/uid_map', 'w').write(f'0 {mine} 1')\n"
        f"libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\n{FILL}",
    ),
    "disk": ("256 MB of disk", f"where = '.'\n{FILL}"),
    "disk without a name": (
        "256 MB of disk",
        "x = []\nfor n in range(90):\n"
        " x.append(open('x', 'wb', 0)); os.unlink('x'); x[-1].write(bytes(10 << 20))\n",
    ),
    "files": ("10000 files", f"where = '.'\n{MANY}"),
    "files in /tmp": ("10000 files", f"where = '/tmp'\n{MANY}"),
    "time": ("5 seconds", "os.fork()\nos.close(1); os.close(2)\nwhile True: pass\n"),
}
"""Commands by name, with the message that each ends with."""


@pytest.mark.slow
async def test_twenty_bombs_at_eight_at_once_stay_within_bounds_and_end_with_their_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (len(BOMBS), PLACES) == (20, 8)
    walls = walls_for("demo")

    async def explode(name: str) -> None:
        says, bomb = BOMBS[name]
        job = Job(name, "", {"bomb.py": BEGIN + bomb + WAIT}, {}, walls)
        job = replace(job, limit_s=5.0 if name == "time" else 20.0)
        async with job.attempt() as attempt:
            said = await attempt.call("shell", {"command": "exec python3 bomb.py"})
            assert re.search(says, said), f"{name}: {said}"
            assert not naming(str(attempt.path)), f"{name}: all have ended with it"

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Peak(tmp_path) as peak:
        await asyncio.gather(*map(explode, BOMBS))
    assert os.listdir(tmp_path) == []
    assert peak.processes < 2 * PLACES * PROCESSES, "root forks on between two looks"
    assert peak.memory < PLACES * MEMORY
    assert peak.disk < PLACES * DISK
    assert peak.files < PLACES * FILES


async def test_pages_that_forks_share_count_once(tmp_path: Path) -> None:
    shared = (
        "import os, time\nx = b'x' * (40 << 20)\n"
        "for _ in range(30):\n if os.fork() == 0: break\ntime.sleep(0.5)\n"
    )
    (tmp_path / "shared.py").write_text(shared)
    ended = await run(walls_for("demo"), tmp_path, "exec python3 shared.py")
    assert (ended.status, ended.took) == (0, None)


async def test_a_folder_that_takes_long_to_remove_stops_nobody() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        async with Job("", "", {}, {}, None).attempt() as attempt:
            for number in range(500):
                (attempt.path / str(number)).touch()
            ticks = 0
        assert ticks > 1, "others went on meanwhile"
        ticking.cancel()


class Peak:
    """Peak use of all sandboxes together, measured by a process that does nothing else."""

    def __init__(self, folder: Path) -> None:
        there = multiprocessing.get_context("spawn")
        self._seen = there.Array("q", 4)
        self._over = there.Event()
        self._process = there.Process(
            target=_measure, args=(os.getpid(), str(folder), self._seen, self._over)
        )

    def __enter__(self) -> Peak:
        self._process.start()
        while not self._seen[0]:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._process.join()
        self.processes, self.memory, self.disk, self.files = self._seen
        """Peak numbers of processes (threads count), bytes of memory (anonymous, and files in
        memory), bytes on disk, and files."""


def _measure(whose: int, folder: str, seen: Any, over: Any) -> None:
    shared, walk_at = _shared(), 0.0
    while not over.wait(0.02):
        threads = memory = disk = files = 0
        for number in _below(whose) - _below(os.getpid()) - {os.getpid()}:
            threads += _status(number).get("Threads", 0)
            memory += _own(number)
        if (now := time.monotonic()) > walk_at:
            walk_at = now + 0.1
            for where, folders, names in os.walk(folder):
                for name in [*folders, *names]:
                    with suppress(OSError):
                        disk += os.lstat(f"{where}/{name}").st_blocks << 9
                        files += 1
        now = (threads, memory + _shared() - shared, disk, files)
        for at, value in enumerate(now):
            seen[at] = max(seen[at], value)


def _below(root: int) -> set[int]:
    above = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            above[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = set[int](), {root}
    while new := {one for one, parent in above.items() if parent in new}:
        found |= new
    return found


def _status(number: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{number}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split()[:2] for line in lines]
    return {p[0].rstrip(":"): int(p[1]) for p in pairs if len(p) == 2 and p[1].isdecimal()}


def _own(number: int) -> int:
    """Bytes of a process, and its part of memory that forks share."""
    try:
        lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


def _shared() -> int:
    """Bytes of the machine in files in memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError
