"""Where a run begins: the newest committed state of its ledger, or version 0."""

from __future__ import annotations

from tinker_claw.errors import BackendError, OutageError
from tinker_claw.ledger import Ledger
from tinker_claw.policy import Policy, Trainer
from tinker_claw.telemetry import log


async def restore(ledger: Ledger, trainer: Trainer) -> Policy:
    """Void what was never committed, load the newest saved state, and open its sampler.

    Steps committed after the last save (`--save-interval` above 1) are void as well: their weights
    are gone, so their samples are queued again and a new version takes the saved state up.

    Raises:
        BackendError: the state cannot be loaded, or no sampler made of it.
    """
    if unfinished := ledger.steps.void_unfinished():
        log.warning("steps.void", step_ids=unfinished, reason="never committed")
    saved = ledger.steps.newest_saved_version()
    if saved is None or saved.state_ref is None:
        state_ref = await trainer.save_state("start")
        sampler = await trainer.publish()
        version = ledger.steps.add_first_version(state_ref=state_ref, sampler_ref=sampler.ref)
        return Policy(version, sampler)
    await trainer.load_state(saved.state_ref)
    lost, published_anew = ledger.steps.unsaved(saved), False
    try:
        sampler = await trainer.open(saved.sampler_ref)
    except OutageError:
        raise
    except BackendError as error:
        # The state is there, and the same weights can be published again.
        log.warning("sampler.gone", version=saved.id, error=str(error))
        sampler, published_anew = await trainer.publish(), True
    if lost or published_anew:  # nothing is written before all of it is there
        restored, saved = saved.id, ledger.steps.restart_from(saved, sampler_ref=sampler.ref)
        if lost:
            log.warning("steps.void", step_ids=lost, reason="not saved", restored_version=restored)
    log.info("resumed", version=saved.id, step=saved.step, waiting=ledger.samples.waiting())
    return Policy(saved, sampler)


async def restore_pin(ledger: Ledger, trainer: Trainer) -> Policy | None:
    """The version that was pinned, opened; None: none was, or its weights are gone.

    Raises:
        OutageError: the service is away.
    """
    number = ledger.pin.version
    version = ledger.steps.version(number) if number is not None else None
    if version is None:
        return None
    try:
        return Policy(version, await trainer.open(version.sampler_ref))
    except OutageError:
        raise
    except BackendError as error:
        log.warning("pin.gone", version=version.id, error=str(error))
        return None
