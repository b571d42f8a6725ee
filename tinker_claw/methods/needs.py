"""What a method needs of a backend, checked before anything is served."""

from __future__ import annotations

from tinker_claw.config import Training
from tinker_claw.errors import ConfigError
from tinker_claw.methods.base import Method
from tinker_claw.types import Capabilities


def student_topk(method: Method, cfg: Training) -> int:
    """How many candidates per token the sampler has to capture."""
    return cfg.opd_topk if method.wants_hints and cfg.opd_mode == "topk" else 0


def require(method: Method, cfg: Training, has: Capabilities) -> None:
    """Compare needs with capabilities.

    Raises:
        ConfigError: names what is missing, and the setting that works without it.
    """
    if "ppo" not in has.losses:
        raise ConfigError(f"the backend of {has.model} has no ppo loss, which every method needs")
    if not student_topk(method, cfg):
        return
    missing = [
        name
        for name, there in (
            ("cross_entropy", "cross_entropy" in has.losses),
            ("[N, K] targets", has.two_d_targets),
            ("top-k logprobs while sampling", has.student_topk),
            ("logprobs of given ids", has.target_logprobs),
        )
        if not there
    ]
    if missing:
        raise ConfigError(
            f"top-k distillation needs {', '.join(missing)}, which the backend of {has.model} "
            "lacks; --opd-mode token works without"
        )
