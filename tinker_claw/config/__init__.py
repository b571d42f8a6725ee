"""Settings: one frozen tree, read from command line, environment and file."""

from tinker_claw.config.access import DEFAULT_USER, User, is_loopback
from tinker_claw.config.load import Flags, brief_help, load, load_known, others_help, parser
from tinker_claw.config.local import Local
from tinker_claw.config.settings import Gateway, Judge, Keeping, Run, Settings, Training

__all__ = [
    "DEFAULT_USER",
    "Flags",
    "Gateway",
    "Judge",
    "Keeping",
    "Local",
    "Run",
    "Settings",
    "Training",
    "User",
    "brief_help",
    "is_loopback",
    "load",
    "load_known",
    "others_help",
    "parser",
]
