"""`tinker-claw demo`: a simulated user corrects the shipped tiny model through the real product.

Rule: the program is examples/demo, which lies in the checkout or in the wheel; here is the way in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from tinker_claw.errors import ConfigError
from tinker_claw.shipped import install, shipped

_NEEDS = ("torch", "peft", "safetensors", "matplotlib")


def run(words: Sequence[str]) -> int:
    """Play it with these flags of its own; returns the exit status.

    Raises:
        ConfigError: what trains or draws is not installed.
        SystemExit: of --help, and of flags that do not exist.
    """
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise ConfigError(f"the demo needs {', '.join(missing)}: {install('local,demo')}")
    sys.path.insert(0, str(shipped("examples").parent))
    # By name: it stands above the product, which it starts as a child.
    return import_module("examples.demo.__main__").main(words)
