"""Sessions of the adapter when the service is only partly up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from local_gpu.tinker.futures import Futures
from tests.support.faults import Fault
from tests.support.tinker import KEY, served, start_tinker
from tinker_claw.backends.tinker import session
from tinker_claw.backends.tinker.failures import Deadline
from tinker_claw.backends.tinker.session import Address, ServiceSession
from tinker_claw.errors import BackendError, OutageError


def threads() -> set[str]:
    """Names of the running threads."""
    return {thread.name for thread in threading.enumerate()}


async def test_session_that_is_still_being_made_is_given_up_without_blocking_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "CLOSE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that was stopped
        waiting = ServiceSession(
            Address(f"http://127.0.0.1:{silent.getsockname()[1]}", KEY), "training"
        )
        ask = waiting.ask(lambda service: service.create_sampling_client(base_model="x"), 0.2)
        asked = asyncio.ensure_future(ask)
        await asyncio.sleep(1.0)  # it is inside the SDK, which holds a lock there
        await waiting.aclose()
        assert "tinker-claw-sdk" in threads(), "the SDK waits on, and nobody waits for it"
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError, Deadline):
            await asked


async def test_session_that_is_lost_while_a_state_is_loaded_is_begun_once_more(
    tmp_path: Path,
) -> None:
    trainer = await start_tinker(tmp_path)
    state = await trainer.save_state("s")
    faulty = served(tmp_path).faulty
    faulty.spoil(Fault("retrieve_future", status=404, of="LoadWeights", times=1))
    await trainer.load_state(state)
    faulty.spoil(Fault("load_weights", status=404))
    with pytest.raises(BackendError, match="loading the state") as caught:
        await trainer.load_state(state)
    assert not isinstance(caught.value, OutageError), "a state that is gone stays gone"
    faulty.behave()
    await trainer.aclose()


async def test_key_that_a_plain_question_cannot_show_does_not_end_a_long_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `tinker auth login`, a credential command, or an organisation's short-lived
    tokens."""
    trainer = await start_tinker(tmp_path)
    await trainer.capabilities()
    faulty = served(tmp_path).faulty
    monkeypatch.setattr(session, "QUESTION_S", 0.2)
    faulty.spoil(
        Fault("get_server_capabilities", status=401),
        Fault("retrieve_future", "again", of="SaveWeights", times=60),
    )
    await trainer.save_state("s")
    faulty.behave()
    await trainer.aclose()


async def test_request_that_a_stopping_server_gives_up_is_not_its_senders_fault() -> None:
    async def endless() -> dict[str, str]:
        await asyncio.sleep(60)
        return {}

    futures = Futures()
    futures.start("session:1", endless)
    await asyncio.sleep(0)
    futures.cancel()
    answer = await futures.retrieve("session:1", 5)
    assert isinstance(answer, Mapping)
    assert answer["category"] == "server"
