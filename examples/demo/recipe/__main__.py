"""Make a shipped model from nothing: `python -m examples.demo.recipe demo --out DIR`."""

import argparse
from functools import partial
from pathlib import Path

import torch

from examples.demo.recipe import demo, screen, tracks
from tinker_claw.shipped import MODELS

_BUILDS = {"demo": demo.build, "demo-tracks": tracks.build, "demo-screen": screen.build}


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.recipe",
        description="Make one of the shipped tiny models from nothing, in minutes on a free core.",
    )
    parser.add_argument("model", choices=_BUILDS)
    parser.add_argument("--out", type=Path, help="folder to write to (default: the shipped one)")
    options = parser.parse_args()
    out = options.out or MODELS[options.model]
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    _BUILDS[options.model](out, partial(print, flush=True))


if __name__ == "__main__":
    main()
