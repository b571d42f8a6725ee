"""The running system: its parts, wired, started, served and stopped in order."""
