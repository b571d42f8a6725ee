"""README, CONTRIBUTING and the pages of docs/ say nothing that the program does not know."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from examples.tracks.environments import ENVIRONMENTS
from local_gpu.tinker import __main__ as tinker_server
from tests.house.test_floors import FLOORS
from tests.lab import install_vllm
from tinker_claw.backends import vllm
from tinker_claw.billing.estimate import LONG_TOKENS, PROMPT_TOKENS, forecast, message
from tinker_claw.billing.prices import price_in_force
from tinker_claw.cli import main
from tinker_claw.config.load import load
from tinker_claw.formats import FORMATS
from tinker_claw.formats.body import Fields
from tinker_claw.learner.gate import BOUND
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.methods import METHODS
from tinker_claw.methods.base import Method
from tinker_claw.sinks.base import built_in, package_of
from tinker_claw.telemetry import Telemetry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
README = PAGES["README.md"]
EVERYTHING = "\n".join(PAGES.values())

every_page = pytest.mark.parametrize("page", PAGES)


def commands(text: str, start: str) -> list[str]:
    """Commands in blocks of code that begin with `start`, without comments."""
    lines = re.findall(rf"^ {{4,}}(?:\$ )?{start} ?(.*?)(?:\s+#.*)?$", text, re.MULTILINE)
    return [line.strip() for line in lines]


def rows(text: str) -> list[list[str]]:
    """Cells of all tables, without the heads."""
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables
        for line in table.splitlines()
    ]


def estimate(*flags: str) -> tuple[float, float]:
    """Estimated dollars of a step of Qwen3-8B, and of serving its turns."""
    settings = load(["--model-name", "Qwen/Qwen3-8B", "--method", "combine", *flags])
    told = forecast(settings, price_in_force(settings))
    assert told.step_usd is not None
    assert told.serve_usd is not None
    return told.step_usd, told.serve_usd


def test_messages_and_steps_cost_what_the_estimate_says() -> None:
    page, settings = PAGES["docs/tinker.md"], load(["--method", "combine"])
    price = price_in_force(settings)
    said = {row[0].replace("*", ""): row[1:] for row in rows(page)}
    messages = [price.usd(message(settings, n)) or 0.0 for n in (PROMPT_TOKENS, LONG_TOKENS)]
    told = said["a message: ten requests, judged, and its eighth of a step"]
    assert told == [f"**${usd:.2f}**" for usd in messages]
    parts = said["of it serving, judging, learning"]
    sums = [sum(map(float, part.split(","))) for part in parts]
    assert sums == pytest.approx(messages, abs=0.0015)
    step, serving = estimate()
    assert f"is about ${step:.2f}, and serving\nthem ${serving:.2f}" in page
    bought = re.search(r"\$20 is about (\d+) messages, or (\d+)", page)
    assert bought is not None
    assert [bought[1], bought[2]] == [f"{round(20 / usd, -1):.0f}" for usd in messages]


def test_keys_for_colleagues_are_made_as_the_page_says(tmp_path: Path) -> None:
    block = PAGES["docs/access.md"].split("## Five colleagues")[1].split("```bash\n")[1]
    subprocess.run(["bash", "-eu", "-c", block.split("```")[0]], cwd=tmp_path, check=True)
    file = tmp_path / "team.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    users = load(["--config", str(file)]).users
    assert [user.name for user in users] == ["anna", "ben", "cem", "dora", "emil"]
    assert len({user.key.get_secret_value() for user in users}) == 5


def test_nothing_is_installed_by_a_name_that_is_not_ours_yet() -> None:
    """Before a release, whoever registers the name would run their code on users' machines."""
    if "(unreleased)" not in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]:
        return
    sources = [file for top in ("tinker_claw", "local_gpu") for file in (ROOT / top).rglob("*.py")]
    for file in (*FILES, *sources, ROOT / "SECURITY.md", ROOT / "Makefile", ROOT / "Dockerfile"):
        found = re.search(
            r"(pip|uv|pipx) +(tool +)?(install|run)\b[^`\n]*\btinker-claw\b", file.read_text()
        )
        assert found is None, f"{file}: {found}"


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Names


def help_of(program: Callable[[Sequence[str]], int], *words: str) -> str:
    said = StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        program(words)
    return said.getvalue()


def known_flags() -> set[str]:
    helps = [help_of(main.main, "--help-all"), help_of(tinker_server.main, "--help")]
    helps += [help_of(main.main, command, "--help") for command in main.COMMANDS]
    sources = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "lab").glob("*.py")]
    sources += [ROOT / "tests" / "conftest.py", *(ROOT / "examples" / "demo").glob("*.py")]
    sources += [
        ROOT / "examples" / name / "__main__.py" for name in ("judge_check", "personalize", "real")
    ]
    sources += (ROOT / "examples" / "tracks").glob("*.py")
    sources.append(ROOT / "local_gpu" / "plan" / "commands.py")  # flags of vLLM
    declared = re.findall(r'"(--[a-z][a-z0-9-]+)"', "".join(file.read_text() for file in sources))
    return {*re.findall(r"--[a-z][a-z0-9-]+", "".join(helps)), *declared, "--help"}


def of_ours(page: str) -> str:
    """A page without the columns and lines about other programs."""
    text = PAGES[page]
    if page == "docs/openclaw-rl.md":
        return "\n".join(row[1] for row in rows(text)) + re.sub(r"^\|.*", "", text, flags=re.M)
    if page == "docs/agents.md":  # its blocks are curl's, and run by tests/tracks
        return re.sub(r"^```bash\n.*?^```", "", text, flags=re.M | re.S)
    # Each of their commands is run or parsed, by the tests of recipes and by test_owed.
    if page in ("docs/clients.md", "docs/owed.md"):
        return re.sub(r"^ {4}.*", "", text, flags=re.MULTILINE)
    return re.sub(r"^ {4}(docker|pip|systemctl|journalctl) .*", "", text, flags=re.MULTILINE)


def test_every_flag_that_is_named_exists() -> None:
    known = known_flags()
    assert {"--method", "--judge-url", "--dry-run", "--quick", "--kills", "--model"} <= known
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", of_ours(page)))
        assert named - known == set(), page
    assert {"--method", "--backend", "--judge-url"} <= set(re.findall(r"--[a-z-]+", README))


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as forges and the site name them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_every_file_that_is_linked_or_named_exists(page: str) -> None:
    text, folder = PAGES[page], (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    places = "tinker_claw|local_gpu|configs|tests|examples|benchmarks|docs"
    for name in re.findall(rf"`((?:{places})/[\w./*-]*)`", text):
        assert name == "docs/_build" or list(ROOT.glob(name.rstrip("/"))), name


def test_every_module_and_make_target_that_is_named_exists() -> None:
    for name in set(
        re.findall(r"python -m\s((?:benchmarks|local_gpu|examples|tests)[.\w]*)", EVERYTHING)
    ):
        file = ROOT.joinpath(*name.split("."))
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), name
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:`|^ {4})make ([a-z][\w-]*)", EVERYTHING, re.MULTILINE))
    assert {"demo", "docs", "test", "check"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@every_page
def test_every_command_parses(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(PAGES[page], r"(?:\w+=\S+ )?python run\.py"):
        words = shlex.split(command)
        if words and not words[0].startswith("-"):
            assert words[0] in main.COMMANDS, command
        else:
            load(words)
    for file, flags in re.findall(r"^ {4}pytest (\S+)(.*)$", PAGES[page], re.MULTILINE):
        test = re.search(r"-k (\w+)", flags)
        assert test is None or test[1] in (ROOT / file).read_text(), flags


def test_programs_that_make_installs_with_start_from_the_root() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert not re.findall(r"\$\(PYTHON\) \S+\.py", makefile), "it would not find `tests`"
    modules = re.findall(r"\$\(PYTHON\) -m (tests\.\S+)", makefile)
    assert len(modules) == 3
    for module in modules:
        subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, env={}, check=True)


def test_the_commands_of_the_readme_are_those_that_were_promised() -> None:
    start = "--method combine --model-name Qwen/Qwen3-8B"
    assert {start, f"{start} --backend local"} <= set(commands(README, r"python run\.py"))


def test_metrics_that_are_named_exist() -> None:
    figures = Telemetry(None).exposition().decode()
    names = re.findall(r"tinker_claw_[a-z_]+_(?:total|seconds)", EVERYTHING)
    assert names
    for name in names:
        assert name.removesuffix("_total") in figures


# The README


def test_figures_of_the_readme_are_those_of_the_pages() -> None:
    demo = {row[0]: row[1] for row in rows(PAGES["docs/first-steps.md"])}
    first, last = (round(100 * float(demo[after])) for after in ("0 steps", "16 steps"))
    assert f"{first} % of its first replies" in README
    assert f"{last} % after sixteen" in README
    usd = re.search(r"\*\*a message\*\*.*?(\$0\.\d+)", PAGES["docs/tinker.md"])
    assert usd is not None
    assert f"A message that takes ten requests costs about {usd[1]}" in README


# The pages' tables


def told_of(method: Method) -> list[str]:
    """Row of a method in the table of methods."""
    losses = ["a clipped-ratio (PPO) pass"] * bool(method.reward_weight)
    losses += ["a distillation pass"] * bool(method.distill_weight)
    costs = ["1 question to the judge"]
    costs.append(f"{method.admitted:g} sample{'s' * (method.admitted != 1)} a judged turn")
    words = "nothing: there is none"
    if method.teaching is not None:
        words = f"`{method.teaching.words.strip().format(hint='…')}`"
        costs += [f"{method.taught:.0%} of them taught".replace("%", " %")]
        costs += [f"{method.teaching.tokens} more tokens"]
    needs = ", ".join(sorted(method.needs))
    return [method.name, method.learns_from, *losses, words, needs, ", ".join(costs)]


def test_the_table_of_methods_is_the_registry() -> None:
    table = rows(PAGES["docs/methods.md"])
    named = [code(row[0])[0] for row in table]
    assert named == list(METHODS), "docs/methods.md has a row for each method of METHODS, in order"
    for row, method in zip(table, METHODS.values(), strict=True):
        name, learns, *losses, words, needs, costs = told_of(method)
        told = [learns, words, needs, costs]
        assert [row[1], *row[3:]] == told, (
            f"{name}'s columns are {' | '.join(told)}, beside its losses"
        )
        assert all(loss in row[2] for loss in losses), name
        has = ("distillation" in row[2], "PPO" in row[2])
        assert has == (method.distill_weight > 0, method.reward_weight > 0), name


def test_what_a_page_lists_is_what_there_is() -> None:
    sinks = {code(row[0])[0]: row[1] for row in rows(PAGES["docs/sinks.md"])}
    needed = {name: package_of(name) for name in built_in()}
    assert sinks == {
        name: f"`pip install '{package}'`" if package else "nothing"
        for name, package in needed.items()
    }
    assert f"less likely by {BOUND:g} nats" in PAGES["docs/operating.md"]
    tracks = {file.stem for file in (ROOT / "configs" / "tracks").glob("*.toml")}
    assert tracks == set(ENVIRONMENTS), "configs/tracks/ has a file for each of ENVIRONMENTS"
    listed = set(re.findall(r"^[\w-]+$", PAGES["docs/index.md"], re.MULTILINE)) | {"index"}
    assert listed == {file.stem for file in DOCS.glob("*.md")}, "docs/index.md lists each page"
    assert set(re.findall(r"vllm==([\d.]+)", EVERYTHING + vllm.GET_VLLM)) == {install_vllm.VERSION}
    of_claw, of_gpu = PAGES["docs/architecture.md"].split("## The packages of local_gpu")
    for package, page in (("tinker_claw", of_claw), ("local_gpu", of_gpu)):
        packages = {file.parent.name for file in (ROOT / package).glob("*/__init__.py")}
        assert {code(row[0])[0] for row in rows(page)} == packages - {"demo"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_tables_of_fields_are_those_of_the_formats(name: str) -> None:
    sections = re.split(r"^## ", PAGES["docs/requests.md"], flags=re.MULTILINE)
    titles = [section.partition("\n")[0].lower().split() for section in sections]
    found = [section for section, title in zip(sections, titles, strict=True) if name in title]
    assert found, f"docs/requests.md has no heading with the word {name}, and a table of its fields"
    section, wire = found[0], import_module(FORMATS[name]().__module__)
    honoured, passed_over, neutral = set[str](), set[str](), set[str]()
    for row in rows(section):
        into = honoured
        if row[1].startswith("passed over"):
            into = passed_over
        elif row[1].startswith("taken with"):
            into = neutral
        into.update(code(row[0]))
    fields = getattr(wire, "FIELDS", None)
    assert isinstance(fields, Fields), f"{wire.__name__} has no FIELDS that say what it refuses"
    assert (honoured, passed_over) == (fields.honoured, fields.ignored)
    assert neutral == set(fields.neutral)


def test_the_ledgers_page_is_its_schema(tmp_path: Path) -> None:
    page = PAGES["docs/ledger.md"]
    Ledger(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as reader:
        found = reader.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        names = {name for (name,) in found if not name.startswith("sqlite_")}
        assert {code(row[0])[0] for row in rows(page)} == names
        queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
        assert len(queries) >= 3
        for query in queries:
            reader.execute(query)


# CONTRIBUTING


def test_the_levels_of_contributing_are_those_that_are_tested() -> None:
    page = PAGES["CONTRIBUTING.md"]
    levels: dict[str, int] = {}
    for level, names in re.findall(r"^ {3,4}(\d+)  ((?:[\w./]+  ?)*[\w./]+)", page, re.MULTILINE):
        for name in names.split():
            known = name.rstrip("/").removesuffix(".py")
            levels[known if known in FLOORS else f"tinker_claw.{known}"] = int(level)
    assert levels == {name: level for name, level in FLOORS.items() if name != "tinker_claw"}


MAY_ANSWER = {
    "local_gpu/sample/pool.py",  # a watch over a server that ends by accident starts again
    "tinker_claw/backends/tinker/session.py",  # the error is the answer that somebody waits for
    "local_gpu/tinker/futures.py",  # the same
    "tinker_claw/gateway/respond.py",  # the same, whatever a format's writer raises
}


def test_a_broad_except_raises_again_but_in_these_files() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    rule = "check --select BLE001 --ignore-noqa --output-format json --exit-zero"
    command = [ruff, *rule.split(), "tinker_claw", "local_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found = {str(Path(at["filename"]).relative_to(ROOT)) for at in json.loads(done.stdout)}
    assert found == MAY_ANSWER


# The site


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_unit_of_the_docs_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    unit = text.partition("```ini\n")[2].partition("```")[0]
    assert "ExecStart=%h/tinker-claw/.venv/bin/tinker-claw" in unit
    file = tmp_path / "tinker-claw.service"
    file.write_text(unit.replace("%h/tinker-claw/.venv/bin/tinker-claw", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tinker-claw.service" not in done.stderr, "nothing is said of it"
