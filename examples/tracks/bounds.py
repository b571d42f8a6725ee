"""Resource bounds of a sandbox, and the watch over them.

Rule: bounds are on the sum over everything in the sandbox. A limit of each process (`ulimit`) only
slows growth between two checks, and root has no limit of processes.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROCESSES = 64
"""Most processes; threads count, too."""
MEMORY = 512 << 20
"""Most bytes in processes, in /tmp and in /dev/shm, together."""
DISK = 256 << 20
"""Most bytes of the folder, and of deleted files that are still open."""
FILES = 10_000
"""Most files and folders, in the folder and in /tmp and /dev/shm."""
LOOK_S = 0.05
"""Seconds between two checks."""
_MEMORIES = ("tmp", "dev/shm")
_FIELDS = re.compile(r"^(Threads|RssAnon|RssShmem|VmSwap):\s+(\d+)", re.MULTILINE)
_OWN = re.compile(r"^Pss_Anon:\s+(\d+)", re.MULTILINE)


@dataclass(slots=True)
class Taken:
    """Resources that a sandbox uses."""

    processes: int = 0
    memory: int = 0
    disk: int = 0
    files: int = 0

    def too_much(self) -> str | None:
        """Name of the bound that is exceeded, or None."""
        if self.processes > PROCESSES:
            return f"more than {PROCESSES} processes and threads"
        if self.memory > MEMORY:
            return f"more than {MEMORY >> 20} MB of memory"
        if self.disk > DISK:
            return f"more than {DISK >> 20} MB of disk"
        if self.files > FILES:
            return f"more than {FILES} files"
        return None


def watch(root: int, folder: Path, over: threading.Event) -> str | None:
    """Watch a sandbox until it exceeds a bound, and return which; None: it ended before.

    `root` is the number of its first process. Call it in a thread: in a busy event loop its checks
    would be late.
    """
    kept, walk_at = Taken(), 0.0
    while not over.wait(LOOK_S):
        used = _in_processes(root, folder)
        if (now := time.monotonic()) >= walk_at:
            kept = _in_folder(folder)
            walk_at = time.monotonic() + 4 * (time.monotonic() - now)
        used.disk += kept.disk
        used.files += kept.files
        if (why := used.too_much()) is not None:
            return why
    return None


def _in_processes(root: int, folder: Path) -> Taken:
    """Resources used by a process and all below it. A file that is mapped and also open counts
    twice."""
    tree = _PROCESSES.below(root)
    used = Taken()
    own = 0
    for number in tree:
        with suppress(OSError):  # it has ended
            status = Path(f"/proc/{number}/status").read_text()
            sizes = {name: int(value) for name, value in _FIELDS.findall(status)}
            used.processes += sizes.pop("Threads")
            own += sizes.pop("RssAnon", 0) << 10
            used.memory += sum(sizes.values()) << 10
    if own + used.memory > MEMORY:  # pages that forks share are counted once, which takes longer
        own = sum(map(_own, tree))
    used.memory += own
    _add_deleted(used, tree, folder)
    _add_tmpfs(used, root)
    return used


def _own(number: int) -> int:
    with suppress(OSError):
        match = _OWN.search(Path(f"/proc/{number}/smaps_rollup").read_text())
        return 0 if match is None else int(match[1]) << 10
    return 0


def _add_deleted(used: Taken, tree: Iterable[int], folder: Path) -> None:
    """Add open files without a name: those on the disk, and those in memory (memfd_create)."""
    disk = folder.stat().st_dev
    seen = set[tuple[int, int]]()
    for number in tree:
        with suppress(OSError), os.scandir(f"/proc/{number}/fd") as entries:
            for entry in entries:
                file = os.stat(entry.path)
                place = (file.st_dev, file.st_ino)
                if file.st_nlink or not stat.S_ISREG(file.st_mode) or place in seen:
                    continue
                seen.add(place)
                if file.st_dev == disk:
                    used.disk += file.st_blocks << 9
                else:
                    used.memory += file.st_blocks << 9


def _add_tmpfs(used: Taken, root: int) -> None:
    with suppress(OSError):  # it has ended, or is not yet there
        inside = f"/proc/{root}/root"
        if os.stat(inside).st_dev == os.stat("/").st_dev:
            return  # it has not left this machine's files yet
        for where in _MEMORIES:
            filesystem = os.statvfs(f"{inside}/{where}")
            used.memory += (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize
            used.files += filesystem.f_files - filesystem.f_ffree


def _in_folder(folder: Path) -> Taken:
    """Resources used by a folder. One that cannot be read counts as having too many files."""
    used = Taken()
    folders = [str(folder)]
    while folders and used.too_much() is None:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    used.files += 1
                    with suppress(FileNotFoundError):
                        used.disk += entry.stat(follow_symlinks=False).st_blocks << 9
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was there a moment ago
        except OSError:
            used.files = FILES + 1
    return used


class _Processes:
    """Parents of all processes, read once for all sandboxes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._children: dict[int, list[int]] = {}

    def below(self, root: int) -> list[int]:
        """A process and all its descendants."""
        with self._lock:
            if time.monotonic() > self._read_at + LOOK_S / 2:
                self._children = _children()
                self._read_at = time.monotonic()
            children = self._children
        tree = [root]
        for number in tree:
            tree += children.get(number, ())
        return tree


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                line = Path(f"/proc/{name}/stat").read_bytes()
                children.setdefault(int(line.rpartition(b")")[2].split()[1]), []).append(int(name))
    return children


_PROCESSES = _Processes()

UNSEEN = {  # mount, fsopen, shmget, semget, msgget
    "x86_64": (0xC000003E, (165, 430, 29, 64, 68)),
    "aarch64": (0xC00000B7, (40, 430, 194, 190, 186)),
}


def rules() -> int:
    """Open a seccomp program, to be read once. It refuses calls that get memory which no process is
    charged for: System V's, and file systems in a namespace of one's own."""
    architecture, refused = UNSEEN[platform.machine()]
    lines = [
        (0x20, 0, 0, 4),  # the architecture
        (0x15, 0, len(refused) + 3, architecture),  # any other is refused
        (0x20, 0, 0, 0),  # the number of the system call
        (0x35, len(refused) + 1, 0, 0x40000000),  # those of x32 are refused
        *((0x15, len(refused) - at, 0, number) for at, number in enumerate(refused)),
        (0x06, 0, 0, 0x7FFF0000),  # allow
        (0x06, 0, 0, 0x00050001),  # EPERM; a jump counts from the next line, and all lead here
    ]
    read, write = os.pipe()
    os.write(write, b"".join(struct.pack("HBBI", *line) for line in lines))
    os.close(write)
    return read
