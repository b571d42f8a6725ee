"""The first five minutes with Tinker: every error is one sentence that says what to do.

Over real HTTP; where a server has to be strange, it is Python's own HTTP server.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import RestClient, TinkerError

from tests.support.backends import CONTEXT
from tests.support.faults import Fault
from tests.support.tinker import KEY, served, settings, start_tinker
from tests.support.tinker_dialects import (
    Flattened,
    Keyed,
    OtherPaths,
    Unnumbered,
)
from tinker_claw.backends.tinker import failures
from tinker_claw.backends.tinker.access import ServedModel, choose, keep
from tinker_claw.backends.tinker.sampler import TinkerSampler
from tinker_claw.backends.tinker.trainer import ServiceLimits, TinkerTrainer, offered
from tinker_claw.backends.tinker_sdk import check_sdk
from tinker_claw.config.settings import Training
from tinker_claw.errors import BackendError, ConfigError, GoneError, OutageError
from tinker_claw.methods import build
from tinker_claw.methods.base import require
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def refusal(key: str | None = KEY, **asked: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        await TinkerTrainer.start(settings(**asked), ServiceLimits(start_timeout_s=20.0), key=key)
    return str(caught.value)


@pytest.mark.parametrize("key", ["sk-proj-1234", "tml-\u2026", "tml-1234\u200b", "tml-1234\n"])
async def test_thing_that_is_no_key_is_refused_before_it_is_sent(key: str) -> None:
    said = await refusal(key=key)
    assert "TINKER_API_KEY holds no Tinker key: those begin with 'tml-', and are plain" in said
    assert key[4:] not in said


async def test_wrong_key_is_named(tmp_path: Path) -> None:
    speaking = Keyed("tml-right-0123456789")
    there = served(tmp_path, root=tmp_path / "served", speaking=speaking)
    said = await refusal(base_url=there.url)
    assert "refuses the key (HTTP 401): check TINKER_API_KEY" in said
    assert KEY not in said
    trainer = await TinkerTrainer.start(settings(base_url=there.url), key="tml-right-0123456789")
    await trainer.aclose()


def test_model_that_can_only_be_sampled_is_told_apart() -> None:
    models = [ServedModel("a", None, trainable=False), ServedModel("b", 100, trainable=True)]
    with pytest.raises(ConfigError, match=r"can be sampled at http://x but not trained.*: b"):
        choose("a", models, "http://x")
    assert choose("b", models, "http://x").context_tokens == 100
    assert choose("c", [], "http://x").name == "c", "a server that lists nothing is believed"


@pytest.mark.parametrize("release", ["0.25.0", None])
def test_another_release_of_the_sdk_or_none_is_one_sentence(
    tmp_path: Path, release: str | None
) -> None:
    check_sdk()
    code = (
        "import importlib.metadata as m, sys; sys.modules['tinker'] = None; usual = m.version\n"
        "def version(name):\n"
        f"    if name == 'tinker' and {release!r} is None: raise m.PackageNotFoundError(name)\n"
        f"    return {release!r} if name == 'tinker' else usual(name)\n"
        "m.version = version\n"
        "from tinker_claw.cli.main import main; raise SystemExit(main(['--port', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"TINKER_API_KEY": KEY},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"the tinker package is {release or 'missing'}, and" in done.stderr
    assert "Traceback" not in done.stderr


def test_credentials_that_ran_out_are_no_lost_session() -> None:
    expired = TinkerError("The api_key JWT has expired.")
    assert failures.fault_of(expired) is failures.Fault.AWAY


async def test_telemetry_of_the_sdk_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the SDK finds the key: a start first asks what the service has."""
    monkeypatch.delenv("TINKER_TELEMETRY", raising=False)
    trainer = await start_tinker(tmp_path)
    await trainer.capabilities()
    await trainer.aclose()
    there = served(tmp_path)
    assert there.faulty.seen["asample"] > 0
    assert there.faulty.seen["telemetry"] == 0
    monkeypatch.delenv("TINKER_TELEMETRY", raising=False)
    keep(KEY)
    await offered(settings(base_url=there.url))
    client = await asyncio.to_thread(lambda: RestClient(base_url=there.url))
    assert client.get_telemetry() is None


@pytest.mark.parametrize("speaking", [lambda app: app, OtherPaths()], ids=["paths", "other paths"])
async def test_oldest_checkpoints_are_deleted_but_never_one_in_use(
    tmp_path: Path, speaking: Any
) -> None:
    server = {"speaking": speaking}
    trainer = await start_tinker(tmp_path, server=server, keep_states=2, keep_samplers=2)
    first = await trainer.save_state("first")
    await trainer.load_state(first)
    states = [await trainer.save_state("more") for _ in range(3)]
    serving = await trainer.publish()
    closed = [await trainer.publish() for _ in range(4)]
    for sampler in closed:
        await sampler.aclose()
    newest = await trainer.publish()
    for path in (first, *states[1:]):
        await trainer.load_state(path)
    with pytest.raises(BackendError, match="no checkpoint"):
        await trainer.load_state(states[0])
    for sampler in (serving, closed[-1], newest):
        await trainer.open(sampler.ref)
    with pytest.raises(BackendError):
        await trainer.open(closed[0].ref)
    await trainer.aclose()


async def test_versions_that_never_answered_push_out_none_to_go_back_to(tmp_path: Path) -> None:
    """As where every step is too large, or samplers are away for hours."""
    trainer = await start_tinker(tmp_path, keep_states=2, keep_samplers=2)
    served, state = await trainer.publish(), await trainer.save_state("served")
    await served.aclose()
    datum = Datum((1, 2, 3, 4), 2, logprobs=(-1.0, -1.0), advantages=(1.0, 1.0))
    for _ in range(3):
        await trainer.train_step([LossPass("importance_sampling", (datum,))], Adam(1e-4))
        refused = await trainer.publish()
        await trainer.save_state("refused")
        await refused.aclose()
        await trainer.load_state(state)
    await trainer.open(served.ref)
    await trainer.load_state(state)
    with pytest.raises(GoneError, match="no longer has"):
        await trainer.open(refused.ref)
    await trainer.aclose()


async def test_service_is_asked_to_keep_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    save = tinker.TrainingClient.save_weights_external

    def saved(client: Any, name: str, ttl_seconds: int | None = None, **more: Any) -> Any:
        asked.append(ttl_seconds)
        return save(client, name, ttl_seconds=ttl_seconds, **more)

    monkeypatch.setattr(tinker.TrainingClient, "save_weights_external", saved)
    trainer = await start_tinker(tmp_path)
    await trainer.export_adapter(tmp_path / "adapter")
    assert asked == [86_400]
    await trainer.aclose()


async def test_version_that_is_being_opened_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await start_tinker(tmp_path, keep_samplers=1)
    old = await trainer.publish()
    await old.aclose()
    connect = TinkerSampler.connect

    async def slowly(sampler: TinkerSampler) -> None:
        monkeypatch.undo()
        await trainer.publish()
        await connect(sampler)

    monkeypatch.setattr(TinkerSampler, "connect", slowly)
    opened = await trainer.open(old.ref)
    await opened.sample((1, 2, 3), SamplingParams(max_tokens=1))
    await trainer.aclose()


async def test_context_is_what_the_service_says_unless_less_is_asked_for(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path)
    assert (await trainer.capabilities()).context_tokens == CONTEXT
    await trainer.aclose()
    _, found = await offered(settings(base_url=served(tmp_path).url), key=KEY)
    assert found.context_tokens == CONTEXT
    smaller = await start_tinker(tmp_path, context_tokens=100)
    assert (await smaller.capabilities()).context_tokens == 100
    await smaller.aclose()


async def test_what_a_server_lacks_is_found_out_and_named(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path)
    full = await trainer.capabilities()
    require(build("combine"), Training(), full)
    await trainer.aclose()

    poor = await start_tinker(tmp_path)
    with_options = Fault("retrieve_future", "fail", of="Sample", times=3)
    served(tmp_path).faulty.spoil(with_options)
    lacks = await poor.capabilities()
    await poor.aclose()
    assert not lacks.student_topk
    assert not lacks.target_logprobs
    assert lacks.losses == full.losses
    with pytest.raises(ConfigError, match=r"top-k logprobs while sampling.*--opd-topk 0"):
        require(build("combine"), Training(), lacks)
    require(build("combine"), Training(opd_topk=0), lacks)

    served(tmp_path).faulty.spoil(Fault("retrieve_future", "fail", of="Forward"))
    poor = await start_tinker(tmp_path)
    with pytest.raises(ConfigError, match="no ppo loss"):
        require(build("binary"), Training(), await poor.capabilities())
    await poor.aclose()


async def test_server_that_flattens_tables_is_good_for_token_mode_only(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path, server={"speaking": Flattened()})
    has = await trainer.capabilities()
    assert has.losses == {"ppo", "importance_sampling", "cross_entropy"}
    assert not has.two_d_targets
    with pytest.raises(ConfigError, match=r"needs \[N, K\] targets.*--opd-topk 0 works"):
        require(build("combine"), Training(), has)
    require(build("combine"), Training(opd_topk=0), has)
    datum = Datum((1, 2, 3, 4), start=2, logprobs=(-1.0, -1.0), advantages=(1.0, 1.0))
    report = await trainer.train_step((LossPass("ppo", (datum,)),), Adam(learning_rate=0.01))
    # Its loss by token is the logprobs, of which the first belongs to the prompt.
    assert report.losses[0] < sum(report.logprobs[0][0]) < 0
    await trainer.aclose()


async def test_server_whose_samples_the_sdk_refuses_is_named_at_the_start(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path, server={"speaking": Unnumbered()})
    with pytest.raises(BackendError, match="a sample of one token failed"):
        await trainer.capabilities()
    await trainer.aclose()


async def test_paths_of_any_shape_are_trained_published_and_opened_again(tmp_path: Path) -> None:
    server = {"speaking": OtherPaths()}
    trainer = await start_tinker(tmp_path, server=server)
    first = await trainer.publish()
    state = await trainer.save_state("one")
    params = SamplingParams(max_tokens=8, seed=3)
    (before,) = await first.sample((1, 2, 3), params)
    advantages = (1.0,) * len(before.tokens)
    told = Datum(
        (1, 2, 3, *before.tokens), start=3, logprobs=before.logprobs, advantages=advantages
    )
    step = (LossPass("importance_sampling", (told,)),)
    await trainer.train_step(step, Adam(learning_rate=0.01))
    second = await trainer.publish()
    assert "/sampler_weights/" not in first.ref + second.ref
    assert "/weights/" not in state
    score = (1, 2, 3, *before.tokens)
    scores = [await one.logprobs(score, start=3) for one in (first, second)]
    assert scores[0] != scores[1]
    await trainer.aclose()

    await asyncio.to_thread(served(tmp_path).restart)
    again = await start_tinker(tmp_path)
    opened = [await again.open(ref) for ref in (first.ref, second.ref)]
    assert [await one.logprobs(score, start=3) for one in opened] == scores
    await again.load_state(state)
    await again.train_step(step, Adam(learning_rate=0.01))
    rolled_back = await again.publish()
    assert (await rolled_back.logprobs(score, start=3)).logprobs == pytest.approx(
        scores[1].logprobs, abs=1e-5
    )
    with pytest.raises(BackendError, match="opening the sampler 'tinker://model_x/v-1'"):
        await again.open("tinker://model_x/v-1")
    with pytest.raises(BackendError, match=r"state 'what is this' at --base-url http://127\.0"):
        await again.load_state("what is this")
    await again.aclose()


async def test_a_server_without_sparse_rows_is_sent_dense_ones(tmp_path: Path) -> None:
    full = await start_tinker(tmp_path)
    await full.capabilities()
    faulty = served(tmp_path).faulty
    assert (faulty.seen["forward_backward"], faulty.seen["asample"]) == (1, 1), "asked once each"
    await full.aclose()

    dense = await start_tinker(tmp_path)
    faulty.spoil(
        Fault("retrieve_future", "fail", of="Forward", times=1),
        Fault("retrieve_future", "fail", of="Sample", times=1),
    )
    able = await dense.capabilities()
    assert (able.two_d_targets, able.student_topk, able.target_logprobs) == (True, True, True)
    require(build("combine"), Training(), able)
    soft = Datum((1, 2, 3, 4), 2, targets=((1, 2), (3, 4)), weights=((0.1, -0.1), (0.2, -0.2)))
    report = await dense.train_step([LossPass("cross_entropy", (soft,))], Adam(1e-4))
    assert len(report.logprobs[0][0]) == 2
    await dense.aclose()


async def test_outage_during_the_probe_is_no_missing_ability(tmp_path: Path) -> None:
    trainer = await start_tinker(tmp_path, sample_timeout_s=10.0)
    served(tmp_path).faulty.spoil(Fault("retrieve_future", "again", of="Forward"))
    with pytest.raises(OutageError, match="probe"):
        await trainer.capabilities()
    served(tmp_path).faulty.behave()
    assert "ppo" in (await trainer.capabilities()).losses
    await trainer.aclose()
