"""The command line: serving, and commands about a run."""
