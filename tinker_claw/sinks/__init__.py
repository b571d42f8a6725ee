"""Sinks: trackers that receive the figures of steps, and collectors that receive spans."""
