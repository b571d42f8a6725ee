"""Methods: pure functions from judged samples to loss passes."""

from __future__ import annotations

from tinker_claw.methods.base import Method, reward_of
from tinker_claw.methods.binary import Binary
from tinker_claw.methods.combine import Combine
from tinker_claw.methods.needs import require, student_topk
from tinker_claw.methods.opd import Opd
from tinker_claw.methods.passes import BatchItem
from tinker_claw.types import MethodName

__all__ = ["BatchItem", "Method", "build", "require", "reward_of", "student_topk"]

_METHODS: dict[MethodName, type[Method]] = {"binary": Binary, "opd": Opd, "combine": Combine}


def build(name: MethodName) -> Method:
    return _METHODS[name]()
