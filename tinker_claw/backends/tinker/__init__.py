"""The Tinker service, and every server that speaks its API, through the official SDK.

- access: key, address and models, checked before the first token
- session: one session with the service, with deadlines; a new one when it is lost
- failures: foreign exceptions into ours, each with a sentence
- convert: our compact records into the SDK's shifted arrays, and back
- probe: what this server can do
- storage: checkpoints at the service: names, downloads, deletions
- sampler, trainer: the two Protocols

Rule: every wait has a deadline of ours, and nothing here blocks the event loop. What the SDK
retries is not retried again.
"""

from tinker_claw.backends.tinker_sdk import without_torch

with without_torch():
    from tinker_claw.backends.tinker.trainer import ServiceLimits, TinkerTrainer, offered

__all__ = ["ServiceLimits", "TinkerTrainer", "offered"]
