"""The demo's flags, as one frozen record.

Rule: a default is written here and nowhere else. How the product itself learns is set in
`configs/demo.toml`, not here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples import ROOT
from examples.demo.server import Launch
from examples.demo.user import USERS
from tinker_claw.errors import ConfigError
from tinker_claw.methods import names

SCORE_EVERY = 4
"""Optimizer steps between two scores."""
_FAST = {"steps": 8, "sessions": 36, "eval_prompts": 64}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one run of the demo."""

    out: Path
    method: str = "combine"
    user: str = "plain"
    """Name of the user who talks, from `USERS`."""
    seed: int = 0
    """Seed of the problems, of the user's words, and of the adapter's first weights."""
    steps: int = 16
    sessions: int = 72
    """Number of sessions. The run ends when both this many sessions and this many optimizer steps
    are reached; or when nothing is learned any more, or learning is paused."""
    eval_prompts: int = 128
    config: Path = ROOT / "configs" / "demo.toml"
    port: int | None = None
    """Port of the gateway; None: a free one."""

    @property
    def launch(self) -> Launch:
        """Launch of the demo's server, with flags as a user would write them."""
        settings = {"config": self.config, "method": self.method, "seed": self.seed}
        flags = tuple(f"--{name}={value}" for name, value in settings.items())
        return Launch(self.out, flags, port=self.port)

    @property
    def milestones(self) -> tuple[int, int, int]:
        """Numbers of steps that the table shows."""
        return (0, self.steps // 2, self.steps)

    def scores(self, version: int) -> bool:
        """Return whether a version is scored for its number of steps."""
        return version % SCORE_EVERY == 0 or version in self.milestones


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line.

    Raises:
        SystemExit: argparse's, for --help and for flags that do not exist or make no sense.
    """
    try:
        parser = _parser()
    except ConfigError as error:
        raise SystemExit(f"tinker-claw demo: {error}") from error
    flags = vars(parser.parse_args(arguments))
    sizes: dict[str, Any] = _FAST if flags.pop("fast") else {}
    out = flags.pop("out") or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if "config" in flags:
        flags["config"] = flags["config"].resolve()  # the server has another working folder
    options = Options(out=out.resolve(), **{**sizes, **flags})
    if (options.out / "run").exists():
        parser.error(f"--out {options.out} already holds a run: choose another folder")
    if not options.config.is_file():
        parser.error(f"--config {options.config}: there is no such file")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinker-claw demo",
        description="A simulated user corrects a tiny model through the real product, until it "
        "replies the way they like. Needs no GPU and no network.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--method", choices=names(), help="how turns become training (default combine)")
    users = "; ".join(f"{name} {user.about}" for name, user in USERS.items())
    descriptions = users.replace("%", "%%")
    add("--user", choices=tuple(USERS), help=f"who talks (default plain): {descriptions}")
    add("--seed", type=int, help="seed of the problems, the user and the adapter (default 0)")
    add("--steps", type=positive, help="optimizer steps to reach (default 16)")
    add("--sessions", type=positive, help="sessions to reach, as well (default 72)")
    add("--eval-prompts", type=positive, help="fresh first messages per score (default 128)")
    add("--fast", action="store_true", default=False, help="8 steps, 36 sessions, 64 prompts")
    add("--port", type=positive, help="of the gateway and its page (default: a free one)")
    add("--config", type=Path, help="the product's settings (default configs/demo.toml)")
    add("--out", type=Path, default=None, help="results (default runs/demo-<time>)")
    return parser


def positive(text: str) -> int:
    """Parse a flag's number, of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
