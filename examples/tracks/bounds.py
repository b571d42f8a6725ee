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
    """Resources used by all processes of a sandbox; none where it has ended, or is not set up yet.
    A file that is mapped and also open counts twice."""
    used, own, inside = Taken(), 0, Path(f"/proc/{root}/root")
    with suppress(OSError):
        if inside.stat().st_dev == os.stat("/").st_dev:
            return used  # it has not left this machine's files yet
        # its own view of its processes
        tree = [path for path in (inside / "proc").iterdir() if path.name.isdecimal()]
        for process in tree:
            with suppress(OSError):  # it has ended
                status = (process / "status").read_text()
                sizes = {name: int(value) for name, value in _FIELDS.findall(status)}
                used.processes += sizes.pop("Threads")
                own += sizes.pop("RssAnon", 0) << 10
                used.memory += sum(sizes.values()) << 10
        # Pages that forks share are counted once, which takes longer.
        used.memory += own if own + used.memory <= MEMORY else sum(map(_own, tree))
        _add_deleted(used, tree, folder)
        for where in _MEMORIES:
            filesystem = os.statvfs(inside / where)
            used.memory += (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize
            used.files += filesystem.f_files - filesystem.f_ffree
    return used


def _own(process: Path) -> int:
    with suppress(OSError):
        match = _OWN.search((process / "smaps_rollup").read_text())
        return 0 if match is None else int(match[1]) << 10
    return 0


def _add_deleted(used: Taken, tree: Iterable[Path], folder: Path) -> None:
    """Add open files without a name: those on the disk, and those in memory (memfd_create)."""
    disk = folder.stat().st_dev
    seen = set[tuple[int, int]]()
    for process in tree:
        with suppress(OSError), os.scandir(process / "fd") as entries:
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
