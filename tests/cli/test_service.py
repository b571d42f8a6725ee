"""`run.py service`: systemd runs what was typed, where it was typed, and nobody reads the keys."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from tests.support.lives import events_in, until
from tests.support.processes import ROOT

SECRET = 'a "quoted" $ecret \\ of `mine` with 100 %'
MANAGER = """#!/bin/sh
# Stands in for the user's manager: says what it was told, and whether it runs.
echo "$*" >> "$TOLD"
case "$*" in
  "--user is-active"*) exit ${ACTIVE:-3};;
  "--user show-environment") [ -z "$AWAY" ] || { echo "No medium found" >&2; exit 1; };;
esac
"""


class Home:
    """Home of a user who types in a folder with an unusual name."""

    def __init__(self, path: Path) -> None:
        self.path, self.told = path, path / "told"
        self.folder = path / 'my $agent\'s 100 % "own" \\ runs'
        self.folder.mkdir()
        (path / "bin").mkdir()
        manager = path / "bin" / "systemctl"
        manager.write_text(MANAGER)
        manager.chmod(0o755)
        self.told.write_text("")
        self.unit_file = path / ".config" / "systemd" / "user" / "tinker-claw.service"
        self.keys = path / ".config" / "tinker-claw" / "environment"

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XDG_", "TINKER", "HF_", "CUDA_"))
        }
        ours = {"HOME": str(self.path), "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        return subprocess.run(
            [sys.executable, str(ROOT / "run.py"), "service", *words],
            cwd=self.folder,
            env=kept | ours | {"TOLD": str(self.told)} | more,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def read(unit: str) -> RawConfigParser:
    parser = RawConfigParser(delimiters="=", comment_prefixes="#", strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    return parser


def words(line: str) -> list[str]:
    """Split a line into words as systemd does: quotes, backslashes, doubled special signs."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [re.sub(r"\\(.)", r"\1", quoted) or plain for quoted, plain in found]


def command(line: str) -> list[str]:
    return [word.replace("%%", "%").replace("$$", "$") for word in words(line)]


FLAGS = ("--model-name", "demo", "--backend", "local", "--port", "0", "--no-page")


def test_the_unit_has_what_was_typed_and_no_secret(home: Home) -> None:
    done = home.run("show", *FLAGS, "--data-dir", "it's $1", TINKER_API_KEY=SECRET)
    assert (done.returncode, done.stderr) == (0, "")
    unit = read(done.stdout)
    service = unit["Service"]
    typed = ["--model-name=demo", "--backend=local", "--data-dir=it's $1", "--port=0", "--no-page"]
    assert command(service["ExecStart"]) == [sys.executable, str(ROOT / "run.py"), *typed]
    assert service["WorkingDirectory"].replace("%%", "%") == str(home.folder)
    assert service["EnvironmentFile"] == str(home.keys)
    writable = [word.replace("%%", "%") for word in words(service["ReadWritePaths"])]
    assert writable[:2] == [str(home.folder / "it's $1"), str(home.path / ".cache")]
    assert service["PrivateTmp"] == ("no" if "/tmp" in writable else "yes")
    assert ("/tmp" in writable) == any(p.is_relative_to("/tmp") for p in (ROOT, home.path))
    assert (service["ProtectSystem"], service["NoNewPrivileges"]) == ("strict", "yes")
    assert (service["Restart"], unit["Install"]["WantedBy"]) == ("on-failure", "default.target")
    assert "ecret" not in done.stdout
    assert sorted(home.path.iterdir()) == sorted([home.path / "bin", home.told, home.folder])


def test_what_trackers_write_can_be_written(home: Home) -> None:
    trackers = ("--report-to", "wandb")
    done = home.run("show", *FLAGS, "--data-dir", "data", *trackers, WANDB_DIR="mine")
    found = words(read(done.stdout)["Service"]["ReadWritePaths"])
    writable = [Path(word.replace("%%", "%")) for word in found]
    assert writable[:3] == [home.folder / "data", home.path / ".cache", home.folder / "mine"]
    assert {*writable[3:]} <= {Path("/tmp"), Path("/var/tmp")}


@pytest.mark.parametrize(
    ("flag", "url"),
    [
        ("--judge-url", "https://me:s3cret@judge.example/v1"),
        ("--judge-url", "https://judge.example/v1?key=s3cret"),
        ("--sampler-urls", "http://a,http://me:s3cret@b"),
        ("--base-url", "http://me:s3cret@box:8000"),
    ],
)
def test_a_password_in_an_address_stands_in_no_unit(home: Home, flag: str, url: str) -> None:
    flags = FLAGS[:2] if flag == "--base-url" else FLAGS
    for verb in ("show", "install"):
        done = home.run(verb, *flags, flag, url)
        assert done.returncode == 2
        assert "s3cret" not in done.stdout + done.stderr
        section = {"--judge-url": "JUDGE", "--sampler-urls": "LOCAL", "--base-url": "RUN"}[flag]
        variable = f"TINKER_CLAW_{section}__{flag[2:].replace('-', '_').upper()}"
        assert f"set {variable} to it instead" in done.stderr
        assert not home.unit_file.exists()
    done = home.run("install", *flags, **{variable: url})
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in home.unit_file.read_text()
    assert "s3cret" in home.keys.read_text()
    assert stat.S_IMODE(home.keys.stat().st_mode) == 0o600


def test_without_flags_it_goes_by_what_was_answered_before(home: Home) -> None:
    answers = home.path / ".config" / "tinker-claw" / "settings.toml"
    answers.parent.mkdir(parents=True)
    answers.write_text('[run]\nmodel_name = "demo"\nbackend = "local"\ndata_dir = "/srv/mine"\n')
    ours, more = f"--config={answers}", "--batch-size=8"
    for flags, typed in (
        ((), [ours]),
        ((more,), [ours, more]),  # which does not say what runs
        (FLAGS[:2], ["--model-name=demo"]),
    ):
        done = home.run("show", *flags)
        assert done.returncode == 0, done.stderr
        service = read(done.stdout)["Service"]
        assert command(service["ExecStart"])[2:] == typed
        assert ("/srv/mine" in words(service["ReadWritePaths"])) == (ours in typed)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not there")
def test_systemd_finds_nothing_wrong_with_the_unit(home: Home) -> None:
    done = home.run("install", *FLAGS)
    assert done.returncode == 0, done.stderr
    found = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(home.unit_file)],
        env=os.environ | {"HOME": str(home.path), "XDG_RUNTIME_DIR": str(home.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_install_keeps_keys_from_others_and_tells_systemd(home: Home) -> None:
    said = {"TINKER_CLAW_TRAINING__BATCH_SIZE": "4", "WANDB_API_KEY": "of a tracker"}
    done = home.run("install", *FLAGS, TINKER_API_KEY=SECRET, **said)
    assert done.returncode == 0, done.stderr
    assert "TINKER_API_KEY, TINKER_CLAW_TRAINING__BATCH_SIZE, WANDB_API_KEY" in done.stdout
    assert stat.S_IMODE(home.keys.stat().st_mode) == 0o600
    read_back = subprocess.run(
        ["sh", "-c", f". '{home.keys}'; printf %s \"$TINKER_API_KEY\""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert read_back.stdout == SECRET, "a shell reads such a line as systemd does"
    told = home.told.read_text().splitlines()
    unit = "tinker-claw.service"
    assert told[-3:] == ["--user daemon-reload", f"--user enable {unit}", f"--user restart {unit}"]
    assert (home.folder / "runs" / "demo-combine").is_dir()

    before = home.keys.read_text()
    done = home.run("install", "--model-name", "demo", "--backend", "local", HF_TOKEN="hf-other")
    assert "is left as it is: it lacks HF_TOKEN, set here." in done.stdout
    assert home.keys.read_text() == before
    assert "--no-page" not in home.unit_file.read_text()

    done = home.run("uninstall")
    assert (done.returncode, home.unit_file.exists()) == (0, False)
    assert f"--user disable --now {unit}" in home.told.read_text()
    assert home.keys.exists()
    assert (home.folder / "runs" / "demo-combine").is_dir()
    assert "nothing is installed" in home.run("uninstall").stderr


def test_the_service_finds_the_programs_and_the_cache_that_a_start_here_finds(home: Home) -> None:
    where = {"PATH": f"{home.path / 'bin'}:/opt/vllm/bin:{os.environ['PATH']}"}
    where |= {"XDG_CACHE_HOME": str(home.path / "cache"), "ALL_PROXY": "socks5://proxy:1080"}
    done = home.run("install", *FLAGS, **where)
    assert done.returncode == 0, done.stderr
    kept = dict(re.findall(r'^(\w+)="(.*)"$', home.keys.read_text(), re.MULTILINE))
    assert {name: kept.get(name) for name in where} == where


def test_a_folder_that_cannot_be_made_is_a_sentence(home: Home) -> None:
    done = home.run("install", *FLAGS, "--data-dir", "/proc/nowhere/data")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "tinker-claw: /proc/nowhere cannot be written: No such file or directory\n"
    )


def test_what_cannot_be_is_said_and_nothing_is_written(home: Home) -> None:
    away = home.run("install", *FLAGS, AWAY="1")
    assert (away.returncode, away.stdout) == (2, "")
    assert "No medium found" in away.stderr
    assert "service show` prints the unit" in away.stderr
    wrong = home.run("install", "--batch-size", "0")
    assert "--batch-size '0': it takes 1 or more" in wrong.stderr
    (home.path / "bin" / "systemctl").unlink()
    nowhere = home.run("uninstall", PATH=str(home.path / "bin"))
    assert "there is no systemd here (no systemctl)" in nowhere.stderr
    assert not (home.path / ".config").exists()
    assert not (home.folder / "runs").exists()


@pytest.mark.slow
def test_what_systemd_is_told_to_start_starts_and_stops(home: Home) -> None:
    done = home.run("install", *FLAGS, TINKER_CLAW_GATEWAY__SERVED_MODEL_NAME="mine")
    assert done.returncode == 0, done.stderr
    service, log = read(home.unit_file.read_text())["Service"], home.path / "log"
    keys = dict(re.findall(r'^(\w+)="(.*)"$', home.keys.read_text(), re.MULTILINE))
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(service["ExecStart"]),
            cwd=service["WorkingDirectory"].replace("%%", "%"),
            env={"HOME": str(home.path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | keys,
            stdout=out,
            stderr=out,
        )
    try:

        def serving() -> list[str]:
            events = events_in(log.read_text())
            return [event["model"] for event in events if event["event"] == "serving"]

        until(lambda: process.poll() is not None or serving())
        assert serving() == ["mine"], log.read_text()[-3000:]
        again = home.run("install", *FLAGS)
        assert "a gateway runs on" in again.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
        process.wait()


REAL = r"""
systemd --user & manager=$!
until systemctl --user show-environment > /dev/null 2>&1; do sleep 0.1; done
cd ~
mkdir -p .config/systemd/user/tinker-claw.service.d
printf '[Service]\nRestartSec=1\n' > .config/systemd/user/tinker-claw.service.d/sooner.conf
serves() {
  until [ -e data/control.json ]; do
    systemctl --user is-failed -q tinker-claw && exec systemctl --user status tinker-claw
    sleep 0.1
  done
}
TINKER_API_KEY=a-secret venv/bin/python checkout/run.py service install --model-name demo \
  --backend local --port 0 --data-dir data > told || exit 1
serves
of() { systemctl --user show --value -p "$1" tinker-claw; }
first=$(of MainPID)
echo keyed $(tr '\0' '\n' < /proc/$first/environ | grep -c TINKER_API_KEY=a-secret)
grep NoNewPrivs /proc/$first/status
within() { nsenter -t "$first" -m sh -c "echo x > $1" 2> /dev/null && echo writes $1; }
within ~/data/x; within ~/.cache/x; within ~/x; within /etc/x; within /tmp/x; ls /tmp/x 2>&1
rm data/control.json; kill -9 "$first"; serves
echo again $(of NRestarts) $(of ActiveState)
venv/bin/python checkout/run.py service uninstall >> told || exit 1
echo ended $(of Result) $(of ExecMainStatus) $(of ActiveState)
kill $manager; wait $manager
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or not (shutil.which("bwrap") and Path("/lib/systemd/systemd").exists()),
    reason="only root may give a manager of their own some control groups",
)
def test_a_real_systemd_starts_it_within_its_walls_and_again_when_it_is_killed(
    tmp_path: Path,
) -> None:
    (tmp_path / "home").mkdir()
    around = ["bwrap", "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/"]
    around += ["--proc", "/proc", "--tmpfs", "/run", "--dir", "/run/systemd/system"]
    around += ["--dir", "/run/user", "--tmpfs", "/home"]
    around += ["--bind", str(tmp_path / "home"), "/home/claw"]
    around += ["--ro-bind", str(ROOT), "/home/claw/checkout"]
    around += ["--ro-bind", sys.prefix, "/home/claw/venv"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours = {"HOME": "/home/claw", "XDG_RUNTIME_DIR": "/run/user", "OMP_NUM_THREADS": "1"}
    ours["PATH"] = f"/lib/systemd:{os.environ['PATH']}"
    done = subprocess.run(
        [*around, "sh", "-c", REAL],
        env=kept | ours,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert said == [
        *("keyed 1", "NoNewPrivs: 1"),
        *("writes /home/claw/data/x", "writes /home/claw/.cache/x", "writes /tmp/x"),
        "ls: cannot access '/tmp/x': No such file or directory",
        *("again 1 active", "ended success 0 inactive"),
    ], done.stderr
