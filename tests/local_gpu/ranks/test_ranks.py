"""Several processes learn as one, and none of them outlives the control process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from local_gpu.learn.learning import LearningCore
from local_gpu.ranks.remote import RankedLearning
from tests.support.backends import start_local, tiny_model
from tests.support.ranks import (
    ADAM,
    PASSES,
    Echo,
    apart,
    config,
    echoes,
    kill,
    learn_the_same,
    moments,
    one_process,
    rank_pids,
    same_report,
    score_the_same,
    weights,
    write_warm,
)
from tests.support.waits import gone
from tinker_claw.errors import (
    BackendError,
    ConfigError,
    ContextLengthError,
    OutageError,
    StepError,
)
from tinker_claw.types import Adam, SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    write_warm(folder, folder / "warm")
    return folder


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedLearning]:
    """Three ranks; tests of the trainer and of shards use two."""
    root = tmp_path_factory.mktemp("ranks")
    learning = RankedLearning(config(root, 3, model=str(model), micro_batch_tokens=90))
    yield learning
    learning.close()


def test_ranks_learn_as_one_process_does(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    learn_the_same(one, many, tmp_path)


def test_ranks_score_as_one_process_does(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    score_the_same(one, many, tmp_path)


def test_a_state_goes_from_ranks_to_one_process_and_back(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    many.step(PASSES, ADAM)
    many.write_state(tmp_path / "by ranks")
    one.read_state(tmp_path / "by ranks")
    assert apart(moments(one, tmp_path / "copy"), moments(many, tmp_path / "again")) == 0
    one.step(PASSES, ADAM)
    many.step(PASSES, ADAM)
    one.write_state(tmp_path / "by one")
    expected = weights(many, tmp_path / "expected")
    many.read_state(tmp_path / "by one")
    assert apart(weights(many, tmp_path / "w"), expected) < 1e-5
    many.step(PASSES, ADAM)
    one.step(PASSES, ADAM)
    assert apart(weights(many, tmp_path / "y"), weights(one, tmp_path / "z")) < 1e-5


async def test_the_trainer_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    """It publishes, serves and saves as always; new ranks continue from the saved state."""
    trainer = await start_local(tmp_path, ranks=2)
    try:
        await trainer.train_step(PASSES, ADAM)
        ref = await trainer.save_state("good")
        sampler = await trainer.publish()
        (drawn,) = await sampler.sample((5, 6, 7), SamplingParams(max_tokens=4))
        scored = await sampler.logprobs((5, 6, 7, *drawn.tokens), start=3)
        assert drawn.logprobs == pytest.approx(scored.logprobs, abs=1e-4)
        pids = rank_pids(tmp_path / "run")
        os.kill(pids[1], signal.SIGSTOP)  # no step ends before it dies
        killer = threading.Timer(0.3, kill, [pids[1]])
        killer.start()
        with pytest.raises(BackendError, match=r"Rank 1 .* killed by SIGKILL\. They start"):
            await trainer.train_step(PASSES, ADAM)
        killer.join()
        assert gone(pids)
        with pytest.raises(BackendError, match="load a state first"):
            await trainer.save_state("of what?")
        await trainer.load_state(ref)
        one = one_process(tmp_path / "model", tmp_path / "root")
        one.read_state(tmp_path / "run" / "states" / ref)
        same_report(await trainer.train_step(PASSES, ADAM), one.step(PASSES, ADAM))
        await trainer.export_adapter(tmp_path / "mine")
        one.export_adapter(tmp_path / "other")
        file = "adapter_model.safetensors"
        mine, other = (load_file(tmp_path / name / file) for name in ("mine", "other"))
        assert apart(mine, other) < 1e-5
        pids = rank_pids(tmp_path / "run")
    finally:
        await trainer.aclose()
    assert gone(pids)


def test_errors_arrive_as_they_were_raised_and_lost_weights_are_not_used(tmp_path: Path) -> None:
    with echoes(tmp_path, micro_batch_tokens=600) as echo:
        told = (tmp_path / "logs" / "ranks.log").read_text()
        assert "an echo of rank 0" in told, "what they say is there while they run"
        assert "an echo of rank 1" in told
        first = echo.step((), Adam(1.0))
        assert (first.losses, first.grad_norm, first.tokens) == ((3.0,), 1.0, 600)
        pids = echo.score(None, ())
        with pytest.raises(StepError, match=r"^rank 1 says no$"):
            echo.step((), Adam(7.0))
        with pytest.raises(FileNotFoundError) as missing:
            echo.write_adapter(tmp_path / "x")
        assert (missing.value.errno, missing.value.filename) == (2, str(tmp_path / "x"))
        echo.read_state(tmp_path, False)
        assert echo.score(None, ()) == pids, "none of these ends them"
        with pytest.raises(BackendError, match=r"\(export_adapter\): left in the middle\. They"):
            echo.export_adapter(tmp_path)
        assert gone(pids)
        with pytest.raises(OutageError, match=r"left in the middle.*load a state first"):
            echo.step((), Adam(1.0))
        echo.read_state(tmp_path)
        again = echo.step((), Adam(1.0))
        assert (again.losses, again.tokens) == ((3.0,), 600)
        with pytest.raises(BackendError, match=r"out of step \(write_probe\)"):
            echo.write_probe(tmp_path, 1.0)


def test_closing_ends_ranks_whatever_they_do(tmp_path: Path) -> None:
    with echoes(tmp_path) as echo:
        pids = echo.score(None, ())
        os.kill(pids[1], signal.SIGSTOP)  # so that it hears nothing
        closer = threading.Timer(0.5, echo.close)
        closer.start()
        with pytest.raises(BackendError, match="closed"):
            echo.write_state(tmp_path)  # which takes minutes
        closer.join()
        assert gone(pids)
        with pytest.raises(BackendError, match="closed"):
            echo.step((), Adam(1.0))


def test_ranks_that_die_while_idle_cost_no_command_but_what_they_held(tmp_path: Path) -> None:
    with echoes(tmp_path) as echo:
        pids = echo.score(None, ())
        echo.step((), Adam(1.0))
        kill(pids[1])
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # all of its threads
        anew = echo.score(None, ())
        assert not {*pids} & {*anew}
        with pytest.raises(OutageError, match="load a state first"):
            echo.step((), Adam(1.0))
        echo.read_state(tmp_path)
        assert echo.score(None, ()) == anew


def test_what_one_rank_cannot_load_is_told_and_none_stays(tmp_path: Path) -> None:
    with (
        pytest.raises(ContextLengthError, match="maximum context length is 3"),
        echoes(tmp_path, model="missing"),
    ):
        pass
    assert not rank_pids(tmp_path)


def test_ranks_that_hang_are_ended_when_their_time_is_over(tmp_path: Path) -> None:
    settings = config(tmp_path, 2, model="echo")
    echo = RankedLearning(settings, build=Echo, hangs_s=2.0)
    pids = rank_pids(tmp_path)
    with pytest.raises(BackendError, match=r"silent for 2 s \(write_state\)"):
        echo.write_state(tmp_path)
    assert gone(pids)
    echo.close()


@pytest.mark.parametrize(("ranks", "sum_of_ranks"), [(1, b"1.0\n"), (2, b"3.0\n")])
def test_no_rank_outlives_the_control_process_or_hears_its_interrupts(
    ranks: int, sum_of_ranks: bytes, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        control = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", str(tmp_path), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
    assert control.stdout is not None
    try:
        pids = [int(pid) for pid in control.stdout.readline().split()]
        assert len(pids) == ranks
        os.killpg(control.pid, signal.SIGINT)  # as a terminal does
        assert control.stdout.readline() == sum_of_ranks
        assert "Traceback" not in (tmp_path / "logs" / "ranks.log").read_text()
    finally:
        control.kill()
        control.wait()
        control.stdout.close()
    assert gone(pids)


def test_settings_that_ranks_cannot_follow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one GPU a rank"):
        RankedLearning(config(tmp_path, 2, model="m", train_gpus=(0,)))
    with pytest.raises(ConfigError, match="say cuda"):
        RankedLearning(config(tmp_path, 2, model="m", device="cuda:1"))
    with pytest.raises(ConfigError, match="GPU 2 is to learn, but torch sees"):
        RankedLearning(config(tmp_path, 1, model="m", device="cuda:2"), build=Echo)
