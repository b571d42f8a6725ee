"""tinker-claw: a gateway that lets a personal agent learn from being used.

Importing this package never imports torch: a laptop that trains on a remote service installs none.
"""

__version__ = "0.1.0"
