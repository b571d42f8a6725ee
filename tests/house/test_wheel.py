"""A wheel, installed by itself, contains the files beside the code, and works.

Rule: one wheel is built and installed for all; each test has an empty folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from tests.support.lives import ROOT
from tests.support.terminals import on_a_terminal
from tinker_claw import shipped
from tinker_claw.config.load import load
from tinker_claw.errors import ConfigError

_TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]


def test_whatever_is_shipped_is_put_where_it_is_looked_for() -> None:
    packed = _TABLE["wheel"]["force-include"]
    for path, target in packed.items():
        assert target == f"tinker_claw/shipped/{path}"
        assert shipped.shipped(path) == ROOT / path
    files = (shipped.PRICES, shipped.CANARIES, shipped.DEMO_CANARIES, shipped.DEMO_JUDGE)
    for file in (*files, *shipped.MODELS.values()):
        assert any(file.is_relative_to(ROOT / path) for path in packed), file


def test_a_shipped_file_of_settings_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(["--config", "1x80GB"]).local.gpus == 1
    for named in ("demo", "demo.toml", "configs/demo.toml"):
        assert load(["--config", named]).run.model_name == "demo"
    assert {"1x80GB", "demo", "8x80GB"} <= set(shipped.shipped_configs())
    (tmp_path / "demo.toml").write_text("[run]\nmodel_name = 'mine'\n")
    assert load(["--config", "demo.toml"]).run.model_name == "mine", "what is here goes first"
    with pytest.raises(ConfigError, match=r"cannot be read .* go by their names alone: 1x24GB-4"):
        load(["--config", "3x80GB"])


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with our wheel and this environment's packages, and nothing of
    the checkout."""
    return _installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_a_wheel_has_all_settings_and_pages_and_nothing_of_the_checkout(python: Path) -> None:
    (wheel,) = python.parents[2].glob("*.whl")
    with ZipFile(wheel) as packed:
        names = set(packed.namelist())
    configs = (f.relative_to(ROOT) for f in (ROOT / "configs").rglob("*.toml"))
    assert {f"tinker_claw/shipped/{name}" for name in configs} <= names
    pages = {str(f.relative_to(ROOT)) for f in (ROOT / "tinker_claw/page").rglob("*.html*")}
    assert pages | {"tinker_claw/py.typed", "local_gpu/py.typed"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tinker_claw", "local_gpu"}
    assert not [name for name in names if name.endswith(".pyc")]
    assert wheel.stat().st_size < 8_000_000


@pytest.mark.slow
def test_from_an_empty_folder_a_wheel_shows_the_demo_learning_in_a_browser(
    python: Path, tmp_path: Path
) -> None:
    """On a terminal, where the page stays open at the end."""
    sizes = ("--steps", "1", "--sessions", "1", "--eval-prompts", "8")
    demo = [python.with_name("tinker-claw"), "demo", *sizes]
    with on_a_terminal(demo, tmp_path, _without_the_checkout()) as seen:
        seen.until(r"Watch it learn, in a browser: (http://127\.0\.0\.1:\d+/ui)")
        url = seen.match[1]
        assert re.search(r"v\d+, \d+ steps? from the base", httpx.get(url).text)
        seen.until(r"Its page stays open until Ctrl-C: " + re.escape(url))
        assert re.search(r"v[1-9]\d*, [1-9]\d* steps? from the base", httpx.get(url).text)
        assert (versions := httpx.get(f"{url}/versions")).status_code == 200
        assert "v1" in versions.text
        seen.types("\x03")
        assert seen.ended() == 0
    (out,) = (tmp_path / "runs").iterdir()
    assert {"report.json", "curve.png", "server.log"} <= {file.name for file in out.iterdir()}


@pytest.mark.slow
def test_a_wheel_finds_its_files_and_names_itself_for_more(python: Path) -> None:
    inside = _said(python, "-c", "from tinker_claw import shipped; print(shipped.MODEL_DIR)")
    assert Path(inside.strip()).is_relative_to(python.parents[1])
    _said(python, "-c", "from tinker_claw.billing.prices import load; load()")
    said = _said(python, "-c", "from tinker_claw.shipped import install; print(install('local'))")
    (wheel,) = python.parents[2].glob("*.whl")
    assert said == f"pip install '{wheel}[local]'\n"


def _installed(folder: Path) -> Path:
    """Python of a new environment with our wheel and this environment's packages."""
    here, python = Path(sys.executable), folder / "venv" / "bin" / "python"
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _said(here, "-m", "pip", *build, str(ROOT))
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    install = ("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    _said(here, "-m", "pip", "--python", str(python), *install)
    packages = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
    (packages / "those-beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _said(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, *arguments],
        cwd="/",
        env=_without_the_checkout(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _without_the_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
