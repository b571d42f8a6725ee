"""Several processes learn as one, and none of them outlives the control process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backends import start_local, tiny_model
from local_reference import rl_datum
from rank_checks import (
    ADAM,
    PASSES,
    apart,
    learn_the_same,
    moments,
    one_process,
    same_report,
    score_the_same,
    weights,
    write_warm,
)
from rank_runs import HERE, PATIENCE_S, config, echoes, gone, kill, listens, rank_pids
from safetensors.torch import load_file

from local_gpu.halves import POLICY
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.world import Alone
from local_gpu.ranks.remote import RankedLearning
from tests.ports import free_port
from tinker_claw.errors import (
    BackendError,
    ClawError,
    ConfigError,
    ContextLengthError,
    OutageError,
    StepError,
)
from tinker_claw.types import Adam, Datum, LossPass, SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    write_warm(folder, folder / "warm")
    return folder


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedLearning]:
    """Three ranks; tests of two machines, of the trainer and of shards use two."""
    root = tmp_path_factory.mktemp("ranks")
    learning = RankedLearning(config(root, 3, model=str(model), micro_batch_tokens=90))
    yield learning
    learning.close()


@pytest.fixture
def many(ranks: RankedLearning, model: Path) -> RankedLearning:
    ranks.read_state(model / "warm")
    return ranks


@pytest.fixture
def one(model: Path, tmp_path: Path) -> LearningCore:
    learning = one_process(model, tmp_path / "root")
    learning.read_state(model / "warm")
    return learning


def test_ranks_learn_as_one_process_does(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    learn_the_same(one, many, tmp_path)


def test_a_batch_smaller_than_the_ranks_is_learnt(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    single = (LossPass("ppo", (rl_datum(40, 9, 3),)),)
    same_report(many.step(single, ADAM), one.step(single, ADAM))
    assert apart(weights(many, tmp_path / "a"), weights(one, tmp_path / "b")) < 1e-5


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


def test_a_failure_on_one_rank_voids_the_step_on_all(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    bad = rl_datum(70, 30, 5)
    bad = Datum(bad.tokens, bad.start, bad.logprobs, (float("nan"),) * len(bad.advantages))
    datums = (*PASSES[0].datums, bad)
    before = weights(many, tmp_path / "before")
    with pytest.raises(StepError, match="loss is nan"):
        many.step((LossPass("ppo", datums),), ADAM)
    assert apart(weights(many, tmp_path / "after"), before) == 0
    same_report(many.step(PASSES, ADAM), one.step(PASSES, ADAM))


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
        with pytest.raises(BackendError, match=r"died|lost one another"):
            await trainer.train_step(PASSES, ADAM)
        killer.join()
        assert gone(list(pids.values()))
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
    assert gone(list(pids.values()))


def test_two_machines_learn_as_one_process_does_and_unpickle_nothing(
    one: LearningCore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpickled = tmp_path / "unpickled"
    unpickled.mkdir()
    monkeypatch.setenv("UNPICKLED", str(unpickled))
    watching = (f"{HERE}/data/unpickling", *filter(None, [os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(watching))
    meet = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    second = [sys.executable, "-m", "torch.distributed.run", *meet, "--node-rank=1"]
    with (tmp_path / "second.log").open("wb") as log:
        process = subprocess.Popen(
            [*second, "--nproc-per-node=1", "-m", "local_gpu.ranks"], stdout=log, stderr=log
        )
    try:
        many = RankedLearning(config(tmp_path, 1, model=str(model), torchrun=meet))
        try:
            many.read_state(model / "warm")
            learn_the_same(one, many, tmp_path)
        finally:
            many.close()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    assert [path.read_text() for path in unpickled.iterdir()] == []


def test_errors_arrive_as_they_were_raised_and_lost_weights_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")  # a cluster's, which is not about our ranks
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with echoes(tmp_path, micro_batch_tokens=600) as echo:
        told = (tmp_path / "logs" / "ranks.log").read_text()
        assert "an echo of rank 0" in told, "what they say is there while they run"
        assert "an echo of rank 1" in told
        first = echo.step((), Adam(1.0))
        assert (first.losses, first.grad_norm, first.tokens) == ((3.0,), 1.0, 600)
        with pytest.raises(StepError, match=r"^rank 1 says no$"):
            echo.step((), Adam(7.0))
        with pytest.raises(FileNotFoundError) as missing:
            echo.write_adapter(tmp_path / "x")
        assert (missing.value.errno, missing.value.filename) == (2, str(tmp_path / "x"))
        pids = echo.score(None, ())
        with pytest.raises(BackendError, match=r"Rank 1 .*: left in the middle\."):
            echo.export_adapter(tmp_path)
        assert gone(pids)
        with pytest.raises(BackendError, match="load a state first"):
            echo.step((), Adam(1.0))
        echo.read_state(tmp_path)
        again = echo.step((), Adam(1.0))
        assert (again.losses, again.tokens) == ((3.0,), 600)
        pids = echo.score(None, ())
        os.kill(pids[1], signal.SIGSTOP)  # so that it hears nothing
        closer = threading.Timer(0.5, echo.close)
        closer.start()
        with pytest.raises(BackendError):
            echo.write_state(tmp_path)  # which takes minutes
        closer.join()
        assert gone(pids)
        with pytest.raises(BackendError, match="closed"):
            echo.step((), Adam(1.0))
    assert not [*tmp_path.glob("torchelastic_*")], "torchrun leaves nothing behind"


def test_weights_without_moments_too_are_loaded_by_new_processes_after_a_failed_step(
    tmp_path: Path,
) -> None:
    with echoes(tmp_path) as echo:
        pids = echo.score(None, ())
        echo.read_adapter(tmp_path, POLICY)
        assert echo.score(None, ()) == pids
        with pytest.raises(StepError):
            echo.step((), Adam(7.0))
        echo.read_adapter(tmp_path, POLICY)
        assert not {*pids} & {*echo.score(None, ())}


def test_ranks_that_die_while_idle_cost_no_command_but_what_they_held(tmp_path: Path) -> None:
    with echoes(tmp_path) as echo:
        pids = echo.score(None, ())
        echo.step((), Adam(1.0))
        assert echo._ranks is not None
        kill(pids[1])
        assert _becomes(echo._ranks.ended)
        anew = echo.score(None, ())
        assert not {*pids} & {*anew}
        with pytest.raises(OutageError, match="load a state first"):
            echo.step((), Adam(1.0))
        echo.read_state(tmp_path)
        assert echo.score(None, ()) == anew, "they took no step that failed"


@pytest.mark.parametrize(
    ("model", "error", "told"),
    [
        ("missing", ContextLengthError, "maximum context length is 3"),
        ("different", ConfigError, "have loaded different models"),
    ],
)
def test_what_one_rank_cannot_load_is_told_and_none_stays(
    model: str, error: type[ClawError], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told), echoes(tmp_path, model=model):
        pass
    assert not rank_pids(tmp_path)


def test_ranks_that_hang_are_ended_when_their_time_is_over(tmp_path: Path) -> None:
    with echoes(tmp_path) as echo:
        pids = echo.score(None, ())
        echo._hangs_s = 1.0  # not before: what does not hang may be slow
        with pytest.raises(BackendError, match=r"silent for 1 s \(write_state\)"):
            echo.write_state(tmp_path)
        assert gone(pids)


@pytest.mark.parametrize(("ranks", "sum_of_ranks"), [(1, b"1.0\n"), (2, b"3.0\n")])
def test_no_rank_outlives_the_control_process_or_hears_its_interrupts(
    ranks: int, sum_of_ranks: bytes, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        control = subprocess.Popen(
            [sys.executable, f"{HERE}/rank_runs.py", str(tmp_path), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
    assert control.stdout is not None
    try:
        pids = [int(pid) for pid in control.stdout.readline().split()]
        assert len(pids) == ranks + 1
        assert (pids[-1] == control.pid) == (ranks == 1), "torchrun is for several"
        os.killpg(control.pid, signal.SIGINT)  # as a terminal does
        assert control.stdout.readline() == sum_of_ranks
        assert "Traceback" not in (tmp_path / "logs" / "ranks.log").read_text()
    finally:
        control.kill()
        control.wait()
        control.stdout.close()
    assert gone(pids)


def test_nothing_waits_for_other_machines_once_the_control_process_is_gone(tmp_path: Path) -> None:
    """The port where they meet would be taken until torchrun gives up, minutes later."""
    port = free_port()
    meet = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    with (tmp_path / "log").open("wb") as log:
        control = subprocess.Popen(
            [sys.executable, f"{HERE}/rank_runs.py", str(tmp_path), "2", *meet],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        assert _becomes(lambda: listens(port))
        with pytest.raises(BackendError, match=r"ranks died \(loading.*(?s:.*)EADDRINUSE") as taken:
            RankedLearning(config(tmp_path / "second", 1, model="m", torchrun=meet))
        assert "They start anew" not in str(taken.value), "it never began"
    finally:
        control.kill()
        control.wait()
    assert _becomes(lambda: not listens(port))


def _becomes(true: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    until = time.monotonic() + seconds
    while not (so := true()) and time.monotonic() < until:
        time.sleep(0.05)
    return so


def test_settings_that_ranks_cannot_follow_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="one GPU a rank"):
        RankedLearning(config(tmp_path, 2, model="m", train_gpus=(0,)))
    with pytest.raises(ConfigError, match="say cuda"):
        RankedLearning(config(tmp_path, 2, model="m", device="cuda:1"))
    with pytest.raises(ConfigError, match="master-addr"):
        RankedLearning(config(tmp_path, 2, model="m", torchrun=("--rdzv-backend=c10d",)))
    with pytest.raises(ConfigError, match="node-rank=1 is not for this machine"):
        RankedLearning(config(tmp_path, 2, model="m", torchrun=("--node-rank=1",)))
    for flag in ("--max_restarts=3", "--nproc-per-node=8"):
        with pytest.raises(ConfigError, match=f"{flag} is not for this machine"):
            RankedLearning(config(tmp_path, 2, model="m", torchrun=(flag,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(ConfigError, match="shows 2 GPUs; number 2"):
        RankedLearning(config(tmp_path, 1, model="m", train_gpus=(2,)))


def test_a_rank_alone_needs_nobody() -> None:
    alone = Alone()
    assert alone.gather(3) == [3]
    assert (alone.share(4), alone.most(5)) == (4, 5)
