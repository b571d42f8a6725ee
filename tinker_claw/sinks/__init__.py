"""Sinks: trackers that receive the figures of steps."""
