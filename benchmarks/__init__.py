"""Benchmarks: ours beside what a user would otherwise run, in one process, as ratios."""
