"""The commands: serving, and what a user asks of a run beside it."""
