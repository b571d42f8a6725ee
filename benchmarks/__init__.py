"""Benchmarks: this project and what a user would otherwise run, in one process, compared as
ratios."""
