"""The README says nothing that the program does not know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import gateway as benchmark
from local_gpu.tinker import __main__ as serve
from tests import install_vllm
from tests.openclaw import readme_block
from tinker_claw.backends import local
from tinker_claw.cli import doctor, explain, export, forget, log, main, openclaw, status
from tinker_claw.config import load as config
from tinker_claw.config.load import load
from tinker_claw.methods import METHODS
from tinker_claw.methods.base import Method
from tinker_claw.telemetry import Telemetry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
METHODS_PAGE = (ROOT / "docs" / "methods.md").read_text()
ENDURANCE = (ROOT / "docs" / "endurance.md").read_text()


def our_side() -> str:
    """The README without the columns that speak of other programs."""
    before, rest = README.split("### Coming from OpenClaw-RL")
    table, after = rest.split("## Watching it")
    ours = [line.split("|")[2] for line in table.splitlines() if line.count("|") >= 3]
    return "\n".join([before, *ours, after])


def test_every_flag_in_the_readme_exists() -> None:
    parsers = (config, status, doctor, openclaw, log, explain, serve, forget)
    parsers += (export, benchmark)
    helps = [module.parser().format_help() for module in parsers]
    known = set(re.findall(r"--[a-z][a-z-]+", "".join(helps)))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", our_side()))
    assert named - known == set()
    assert {"--method", "--backend", "--judge-url", "--w-rl"} <= named


@pytest.mark.parametrize(
    "text",
    [README, CONTRIBUTING, METHODS_PAGE, ENDURANCE],
    ids=["README", "CONTRIBUTING", "methods", "endurance"],
)
def test_every_file_that_is_named_exists(text: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", text)
    paths = re.findall(r"`((?:tinker_claw|local_gpu|configs|tests|examples|docs)/[\w./-]*)`", text)
    for name in [*(link for link in links if "://" not in link), *paths]:
        assert (ROOT / name).exists(), name


def test_commands_of_the_readme_parse() -> None:
    commands = re.findall(r"^ {4,}python run\.py (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 3
    own = {"doctor": doctor.parser, "openclaw-config": openclaw.parser}
    for command in commands:
        words = command.split()
        if words[0] in main.COMMANDS:
            _, words = own[words[0]]().parse_known_args(words[1:])
        load(words)


def test_commands_of_the_endurance_page_exist() -> None:
    named = re.findall(r"^ {4,}pytest (tests/\w+\.py)(.*)$", ENDURANCE, re.MULTILINE)
    assert len(named) == 2
    for file, flags in named:
        test = re.search(r"-k (\w+)", flags)
        assert test is None or test[1] in (ROOT / file).read_text(), flags
    for module in re.findall(r"python -m tests\.(\w+)", ENDURANCE):
        assert (ROOT / "tests" / f"{module}.py").exists()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (demo|test|check|bench)\b", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_provider_block_points_at_the_default_port() -> None:
    provider = readme_block()["models"]["providers"]["tinker-claw"]
    gateway = load([]).gateway
    assert provider["baseUrl"] == f"http://{gateway.host}:{gateway.port}/v1"
    assert provider["models"][0]["id"] == load([]).run.model_name


def test_metrics_that_are_named_exist() -> None:
    figures = Telemetry(None).exposition().decode()
    for name in re.findall(r"tinker_claw_[a-z_]+_(?:total|seconds)", README):
        assert name.removesuffix("_total") in figures


def test_one_release_of_vllm_is_named_everywhere() -> None:
    named = re.findall(r"vllm==([\d.]+)", README + local.GET_VLLM)
    assert named == [install_vllm.VERSION] * 2


def told_of(method: Method) -> list[str]:
    """A method's row in the table of methods."""
    losses = ["a clipped-ratio (PPO) pass"] * bool(method.reward)
    losses += ["a distillation pass"] * bool(method.distill)
    costs = [f"{method.questions} question{'s' * (method.questions > 1)} to the judge"]
    costs.append(f"{method.admitted:g} sample{'s' * (method.admitted != 1)} a judged turn")
    words = "nothing: there is none"
    if method.teaching is not None:
        words = f"`{method.teaching.words.strip().format(hint='…')}`"
        costs += [f"{method.taught:.0%} of them taught".replace("%", " %")]
        costs += [f"{method.teaching.tokens} tokens told"]
    needs = ", ".join(sorted(method.needs))
    return [method.name, method.learns_from, *losses, words, needs, ", ".join(costs)]


def test_the_table_of_methods_is_the_registry() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in METHODS_PAGE.splitlines()
        if line.startswith("| `")
    ][1:]
    assert [row[0].split("`")[1] for row in rows] == list(METHODS)
    for row, method in zip(rows, METHODS.values(), strict=True):
        name, learns, *losses, words, needs, costs = told_of(method)
        assert [row[1], *row[3:]] == [learns, words, needs, costs], name
        assert all(loss in row[2] for loss in losses), name
        assert ("distillation" in row[2], "PPO" in row[2]) == (
            method.distill > 0,
            method.reward > 0,
        ), name
        assert f"| `{name}`" in README, name


def test_demo_settings_are_settings() -> None:
    settings = load(["--config", str(ROOT / "configs" / "demo.toml")])
    assert settings.run.model_name == "demo"
    assert settings.run.backend == "local"
    assert settings.training.batch_size == 16
    assert json.loads(settings.model_dump_json())["training"]["lora_rank"] == 16
