"""Images, compose, workflows and hooks install and ship the product as it is.

There is no docker here: what the gateway's image installs, its environment and its health check are
run as they stand, by another user, over a root that cannot be written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.lab import install_vllm
from tests.support.lives import ROOT, events_in, until
from tests.support.ports import free_port
from tests.support.tinker import wire_process
from tests.support.tinker_dialects import answering
from tinker_claw.config.load import load

KEY = "a-key-of-sixteen-letters-or-more"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in (ROOT / ".github" / "workflows").glob("*.yml")
}


@dataclass
class Stage:
    """Instructions of a Dockerfile for one image, including its base."""

    runs: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    """Last words of each other instruction."""


def stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        verb, _, words = line.partition(" ")
        if verb == "FROM":
            below, _, name = words.partition(" AS ")
            of = found.get(below, Stage())
            stage = found[name] = Stage([*of.runs], {**of.environment}, {**of.last})
        elif verb == "RUN":
            stage.runs.append(words.strip())
        elif verb == "ENV":
            stage.environment |= dict(word.split("=", 1) for word in shlex.split(words))
        elif verb:
            stage.last[verb] = words.strip()
    return found


def context(folder: Path) -> Path:
    """Build context that docker would get, by .dockerignore."""
    first, *others = (ROOT / ".dockerignore").read_text().splitlines()
    assert first == "*"
    for name in (line[1:] for line in others if line.startswith("!")):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_docker_is_given_whatever_the_wheel_takes(tmp_path: Path) -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel, folder = hatch["targets"]["wheel"], context(tmp_path / "src")
    paths = [*wheel["packages"], *wheel["force-include"]]
    assert [path for path in paths if not (folder / path).exists()] == []


_SYSTEM = ("/usr", "/etc", "/opt", "/bin", "/lib", "/lib64", "/sbin")
_OF_PIP = ("PIP_", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Prefixes of variables that say where packages come from, on this machine."""


@dataclass(frozen=True)
class Box:
    """A root with the system's programs alone, as in an image."""

    folder: Path

    def command(
        self,
        words: Sequence[str],
        binds: Mapping[str, str],
        environment: Mapping[str, str],
        user: int = 0,
    ) -> list[str]:
        """Command line in the box. `binds`: how each of its folders is bound, ro-bind or bind."""
        around = ["bwrap", "--die-with-parent", "--unshare-user", "--uid", str(user), "--clearenv"]
        for place in (*_SYSTEM, sys.base_prefix):
            if Path(place).exists():
                around += ["--ro-bind", place, place]
        around += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for place, how in binds.items():
            (self.folder / place).mkdir(exist_ok=True)
            around += [f"--{how}", str(self.folder / place), f"/{place}"]
        for name, value in environment.items():
            around += ["--setenv", name, value]
        return [*around, "--remount-ro", "/", *words]

    def run(self, words: Sequence[str], **said: Any) -> subprocess.CompletedProcess[str]:
        command = self.command(words, **said)
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A box with /venv, made as the image's own command does in /src."""
    box = Box(tmp_path_factory.mktemp("image"))
    context(box.folder / "src")
    python = Path(sys.base_prefix) / "bin"
    of_pip = {name: value for name, value in os.environ.items() if name.startswith(_OF_PIP)}
    done = box.run(
        ["sh", "-c", f"cd /src && {stages()['packages'].runs[-1]}"],
        binds={"src": "bind", "venv": "bind"},
        environment={"PATH": f"{python}:/usr/bin:/bin", "HOME": "/tmp"} | of_pip,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return box


needs_walls = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not there")


@pytest.mark.slow
@needs_walls
def test_the_gateways_image_serves_and_is_healthy_over_a_root_that_cannot_be_written(
    box: Box, tmp_path: Path
) -> None:
    image, port = stages()["gateway"], free_port()
    assert image.last["USER"] == "10001:10001"
    health = image.last["HEALTHCHECK"].partition(" CMD ")[2].replace(":30000/", f":{port}/")
    assert str(port) in health, "the image's own port is taken by others here"
    environment = image.environment | {
        "PATH": image.environment["PATH"].replace("$PATH", "/usr/bin:/bin"),
        "TINKER_CLAW_GATEWAY__PORT": str(port),
        "TINKER_CLAW_GATEWAY__API_KEY": KEY,
        "TINKER_API_KEY": "tml-test",
        "OMP_NUM_THREADS": "1",
    }
    inside: dict[str, Any] = {
        "binds": {"venv": "ro-bind", "data": "bind"},
        "environment": environment,
        "user": 10001,
    }
    assert box.run(json.loads(health), **inside).returncode != 0, "nobody answers yet"
    assert box.run(["python", "-c", "import torch"], **inside).returncode != 0
    assert "Read-only" in box.run(["sh", "-c", "echo x > /x"], **inside).stderr
    log = tmp_path / "log"
    with wire_process(tmp_path / "served") as served, log.open("wb") as out:
        flags = ["--model-name=demo", f"--base-url={served.url}", "--gate=off"]
        words = ["sh", "-c", f'cd {image.last["WORKDIR"]} && exec "$@"', "sh"]
        command = box.command([*words, *json.loads(image.last["ENTRYPOINT"]), *flags], **inside)
        gateway = subprocess.Popen(command, stdout=out, stderr=out)
        try:

            def serving() -> bool:
                return any(e["event"] == "serving" for e in events_in(log.read_text()))

            until(lambda: gateway.poll() is not None or serving())
            assert gateway.poll() is None, log.read_text()[-3000:]
            assert box.run(json.loads(health), **inside).returncode == 0
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json={"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=240,
            )
            assert answer.status_code == 200, answer.text
            asked = box.run(["tinker-claw", "status", "--data-dir", "runs/demo-combine"], **inside)
            assert "ok" in asked.stdout, asked
        finally:
            gateway.kill()
            gateway.wait()
    assert (box.folder / "data" / "runs" / "demo-combine" / "ledger.sqlite3").exists()


def test_cleaning_keeps_what_was_said_and_learned() -> None:
    """Data directories are in `runs` unless --data-dir says otherwise."""
    told = subprocess.run(
        ["make", "--dry-run", "clean"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert ".venv" in told
    assert "runs" not in told


def test_compose_starts_vllm_as_the_pages_say_and_a_gateway_that_knows_its_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm, gateway = COMPOSE["vllm"], COMPOSE["gateway"]
    assert vllm["image"] == f"vllm/vllm-openai:v{install_vllm.VERSION}"
    told = (ROOT / "configs" / "remote-samplers.toml").read_text()
    (block,) = re.findall(r"vllm serve \S+ (.*?)\n#\n", told, re.DOTALL)
    words = shlex.split(re.sub(r"\\\n#", "", block))
    flags = re.findall(r"--\S+(?: [^-]\S*)?", " ".join(words))
    ours = {word.replace("=", " ") for word in vllm["command"] if "--model" not in word}
    assert ours == set(flags)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in vllm["environment"]
    assert gateway["build"]["target"] in stages()
    assert gateway["depends_on"] == {"vllm": {"condition": "service_healthy"}}
    assert gateway["read_only"]
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    assert "ports" not in vllm
    image = stages()["gpu"].environment | {"PATH": os.environ["PATH"]}
    for name, value in (image | gateway["environment"]).items():
        monkeypatch.setenv(name, re.sub(r"\$\{.*", KEY, value))
    settings = load([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in gateway["command"]])
    assert (settings.run.backend, settings.gateway.host) == ("local", "0.0.0.0")
    assert settings.local.sampler_urls == "http://vllm:8000"
    mounted = {volume.split(":")[1] for volume in gateway["volumes"]}
    assert settings.run.directory == Path("runs/Qwen3-8B-combine")
    assert {stages()["gpu"].last["WORKDIR"], gateway["environment"]["HF_HOME"]} == mounted
    assert mounted == {volume.split(":")[1] for volume in vllm["volumes"]}


def test_health_checks_ask_no_proxy() -> None:
    """Docker hands the proxies of its own settings to every container."""
    image = json.loads(stages()["gateway"].last["HEALTHCHECK"].partition(" CMD ")[2])
    environment = {**os.environ, "no_proxy": "", "http_proxy": "http://127.0.0.1:9"}
    with answering(lambda path: (200, {})) as url:
        for _, *words in (image, COMPOSE["vllm"]["healthcheck"]["test"][1:]):
            here = re.sub(r"http://127\.0\.0\.1:\d+", url, words[-1])
            assert url in here
            command = [sys.executable, *words[:-1], here]
            assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_no_secret_stands_in_a_file_that_is_handed_on() -> None:
    for service in COMPOSE.values():
        for name, value in service["environment"].items():
            assert value.startswith("${") or not re.search("KEY|TOKEN", name), name
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".env", "gateway.env"} <= set(ignored)


def steps(workflow: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_workflows_run_what_everybody_runs_and_may_do_no_more_than_they_must() -> None:
    assert "bash .ci/run" in [step.get("run") for step in steps(WORKFLOWS["ci"])]
    assert WORKFLOWS["ci"]["permissions"] == {"contents": "read"}
    release = WORKFLOWS["release"]
    assert release["permissions"] == {}
    may = {name: job["permissions"] for name, job in release["jobs"].items()}
    assert may == {"build": {"contents": "read"}, "publish": {"id-token": "write"}}
    assert release["jobs"]["publish"]["environment"] == "pypi"
    assert not any("run" in step for step in release["jobs"]["publish"]["steps"])
    for workflow in WORKFLOWS.values():
        for step in steps(workflow):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", "a/b@" + "0" * 40))
