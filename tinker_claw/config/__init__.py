"""Settings: one frozen tree, read from command line, environment and file."""

from tinker_claw.config.load import load, parser
from tinker_claw.config.settings import Gateway, Judge, Local, Run, Settings, Training

__all__ = ["Gateway", "Judge", "Local", "Run", "Settings", "Training", "load", "parser"]
