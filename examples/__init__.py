"""Example programs that use the product as its users do: from outside, over HTTP."""

import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository, or the part of it that a wheel holds: run.py and configs/ are here."""


def as_ctrl_c() -> None:
    """Let SIGTERM, and a terminal that is closed, act as Ctrl-C: what a program started ends
    first."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signal.raise_signal(signal.SIGINT))
