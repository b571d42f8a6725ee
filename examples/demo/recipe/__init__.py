"""The recipe of the shipped models: `python -m examples.demo.recipe` makes them from nothing."""
