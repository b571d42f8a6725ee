"""Fixtures that several test files share."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import renderers
import structlog
from hypothesis import HealthCheck, settings
from renderers.base import load_tokenizer

from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Trainer
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR

if TYPE_CHECKING:
    from tests.support.backends import Backend
    from tests.support.contract import Ground
    from tests.support.gateways import World
    from tests.support.real_vllm import Numbers
    from tests.support.tinker import Raw, TinkerServer


# The same examples every time, however slow the machine is; `--hypothesis-profile=explore` draws
# new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")

# Where others have accounts, a gateway makes a key; the test of that says so.
os.environ.setdefault("TINKER_CLAW_GATEWAY__API_KEY", "none")

# The workers of a run share the cores: threads that wait for one another cost more than small sums.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs deaf to Ctrl-C, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


_ENVIRONMENTS = {
    **{"vllm": "vLLM", "cookbook": "tinker-cookbook", "verifiers": "verifiers"},
    "trackers": "wandb",
}
"""Environments by option, marker and make target, with what is installed in each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=20, help="how often the torture test kills the product"
    )
    parser.addoption(
        "--slow",
        metavar="all|none|K/N",
        help="of the tests that take more than ten seconds: all of them, none, or those of part K "
        "of N and no others; none for a whole run, all where files or tests are named",
    )
    parser.addoption(
        "--vllm", type=Path, help="run the tests of a real vLLM, installed there by `make vllm`"
    )
    parser.addoption(
        "--vllm-dtype",
        choices=("float32", "bfloat16"),
        help="what it and the trainer compute in; float32 unless there is a GPU",
    )
    parser.addoption(
        "--cookbook", type=Path, help="run tinker-cookbook, installed there by `make cookbook`"
    )
    parser.addoption(
        "--verifiers", type=Path, help="run verifiers, installed there by `make verifiers`"
    )
    parser.addoption(
        "--trackers",
        type=lambda given: Path(given).absolute(),
        help="read what wandb was told, installed there by `make trackers`",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, what in _ENVIRONMENTS.items():
        environment: Path | None = config.getoption(name)
        if environment is not None and not (environment / "bin" / "python").exists():
            raise pytest.UsageError(
                f"There is no {what} in {environment}: make {name} installs it."
            )
    if config.option.slow is None:  # set here, so that xdist's workers are told
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.slow = "all" if named else "none"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select tests with an environment of their own only if asked for, and sort slow ones."""
    for name in _ENVIRONMENTS:
        if config.getoption(name) is None:
            _keep(config, items, [item.get_closest_marker(name) is None for item in items])
    asked: str = config.getoption("slow")
    if asked == "all":
        return
    slow = [item.get_closest_marker("slow") is not None for item in items]
    if asked == "none":
        _keep(config, items, [not is_slow for is_slow in slow])
        return
    part, _, parts = asked.partition("/")
    if not (part.isdigit() and parts.isdigit() and 0 < int(part) <= int(parts)):
        raise pytest.UsageError(f"--slow is all, none, or a part like 2/4, not {asked!r}")
    # Every fourth, say: tests of a file take alike, and whole files a second or ten minutes.
    turns = itertools.cycle([number == int(part) for number in range(1, int(parts) + 1)])
    _keep(config, items, [is_slow and next(turns) for is_slow in slow])


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[bool]) -> None:
    config.hook.pytest_deselected(
        items=[item for item, keep in zip(items, kept, strict=True) if not keep]
    )
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `backend`, or for a trainer on one, on every backend."""
    if "backend" in metafunc.fixturenames:
        from tests.support.backends import BACKENDS  # torch; most tests need none

        metafunc.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Ledger of a run that has its first version."""
    ledger = Ledger(tmp_path)
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    yield ledger
    ledger.close()


@pytest.fixture
async def trainer(backend: Backend, tmp_path: Path) -> AsyncIterator[Trainer]:
    trainer = await backend.start(tmp_path)
    yield trainer
    await trainer.aclose()


@pytest.fixture
async def ground(backend: Backend, trainer: Trainer) -> Ground:
    from tests.support.contract import Ground

    return await Ground.prepare(backend, trainer)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """Qwen3's chat format over the shipped tokenizer."""
    return Renderer.load(str(MODEL_DIR), "qwen3")


@pytest.fixture(scope="session")
def thinker() -> Renderer:
    """As `renderer`, of a model that thinks unless it is told not to, as Qwen3-8B."""
    tokenizer = load_tokenizer(str(MODEL_DIR))
    tokenizer.chat_template = "{{ enable_thinking }}"
    return Renderer(tokenizer, renderers.config_from_name("qwen3"))


@pytest.fixture
async def world(
    tmp_path: Path, renderer: Renderer, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    """A gateway with the settings that the test is `served` with, else the module's SETTINGS."""
    from tests.support.gateways import gateway

    mark = request.node.get_closest_marker("served")
    settings = mark.kwargs if mark else getattr(request.module, "SETTINGS", {})
    async with gateway(tmp_path, renderer, **settings) as world:
        yield world


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Restore the umask: a command called in this process closes its files to others for good."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def usual_log() -> Iterator[None]:
    """Restore the log: a command called in this process lets it write to its own stream."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def close_servers() -> Iterator[None]:
    """Stop the stand-ins that a test has started, after its trainers are closed."""
    yield
    if "tests.support.tinker" in sys.modules:
        sys.modules["tests.support.tinker"].stop_all()


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that the real vLLM serves."""
    from tests.support.backends import tiny_model
    from tests.support.real_vllm import HEAD_DIM

    return tiny_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def numbers(request: pytest.FixtureRequest) -> Numbers:
    """Number formats of the real vLLM and of the trainer beside it."""
    from tests.support.real_vllm import Numbers

    return Numbers.of(request.config.getoption("--vllm-dtype"))


@pytest.fixture(scope="session")
def vllm_url(request: pytest.FixtureRequest, vllm_model: Path, numbers: Numbers) -> Iterator[str]:
    """Address of a real vLLM."""
    from tests.support.real_vllm import serving

    environment, log = request.config.getoption("vllm").absolute(), vllm_model.with_name("vllm.log")
    with serving(environment, vllm_model, log, dtype=numbers.dtype) as url:
        yield url


@pytest.fixture
def raw(server: TinkerServer) -> Iterator[Raw]:
    """Speaks JSON to the Tinker server that a module has started as `server`."""
    from tests.support.tinker import Raw

    client = Raw(server.url)
    yield client
    client.http.close()
