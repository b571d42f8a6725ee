"""`tinker-claw service`: the gateway as a service of its user's own systemd.

Rule: nothing needs root; the unit contains no secret; what systemd runs is what was typed, in the
folder where it was typed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import click

from tinker_claw.cli.common import Command, wrapped, write
from tinker_claw.config.flags import WORD
from tinker_claw.config.load import CONFIG, config_folder, flags, settings_file
from tinker_claw.config.settings import ENV_PREFIX, VARIABLES
from tinker_claw.errors import ConfigError
from tinker_claw.files import write_private
from tinker_claw.ledger.database import is_locked

UNIT = "tinker-claw.service"
STOP_S = 70
"""A gateway ends after 55 s at the latest."""
_CARRIED: Final = (
    "TINKER_",
    "HF_",
    "CUDA_",
    "XDG_CACHE_HOME",
    *VARIABLES.values(),
    "PATH",
    "LD_LIBRARY_PATH",  # of vLLM, compilers and CUDA
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_",
    "WANDB_",  # of --report-to
)
"""Prefixes of environment variables that the service keeps, in upper case."""
_TEMPORARY: Final = ("/tmp", "/var/tmp")
"""Temporary folders; private to the service, unless it needs something in them."""
_SECRET_URL: Final = re.compile(r"://[^/\s]*@|://\S*\?")
"""An address with a password, or with a query, in which keys are sent, too."""
_ESCAPED: Final = re.compile(r'(["\\`$])')
_BACKSLASH: Final = r"\\\1"
"""Within double quotes, systemd and shells take the character after a backslash literally."""

_TEMPLATE: Final = """\
# Written by `tinker-claw service install`, which writes it anew: `systemctl --user edit {unit}` is
# for changes of your own.
[Unit]
Description=tinker-claw, a gateway that learns from how it is used
# It starts again for ten minutes or so, as while the network is not up yet, and then gives up.
StartLimitIntervalSec=1h
StartLimitBurst=20

[Service]
Type=exec
WorkingDirectory={folder}
ExecStart={command}
EnvironmentFile={environment}
Environment=PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=%C/triton CUDA_CACHE_PATH=%C/nv
Restart=on-failure
RestartSec=15s
# A reply in flight, and a step in hand, may end.
TimeoutStopSec={stop_s}
KillMode=mixed
# A server that it has started is started again by itself.
OOMPolicy=continue
UMask=0077
NoNewPrivileges=yes
PrivateTmp={private}
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={writable}
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


class Service(Command):
    """Run the gateway as a service of systemd: from each login on, and again when it fails.

    `install` takes the flags of a start, or goes by the settings file. It copies your variables,
    keys included, to a file that only you can read, unless that file exists. `show` prints the unit
    and changes nothing. `uninstall` ends the service and keeps records and keys.
    """

    MORE: ClassVar[str] = (
        "`systemctl --user status tinker-claw` says how it is, and `journalctl --user -u "
        "tinker-claw -f` shows its log."
    )
    do: Annotated[Literal["install", "show", "uninstall"], WORD]

    def run(self) -> int:
        if self.do == "show":
            write([self.unit().rstrip()])
            return 0
        try:
            told = list(self._install() if self.do == "install" else _uninstall())
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
        write(told)
        return 0

    def unit(self) -> str:
        """The unit's text, for the flags that were given here."""
        program, folder = Path(sys.argv[0]).absolute(), Path.cwd()
        writable = self._writable()
        for path in (program, folder, *writable):
            if not str(path).isprintable():
                raise ConfigError(f"systemd takes no folder with a name like {str(path)!r}")
        places = (Path(sys.executable), program, folder, *writable)
        shared = any(path.is_relative_to(tmp) for path in places for tmp in _TEMPORARY)
        file = settings_file(self._given)
        given = {**self._given, CONFIG: file and str(file)}
        command = [sys.executable, str(program), *_typed(given)]
        return _TEMPLATE.format(
            unit=UNIT,
            folder=_specified(str(folder)),
            command=" ".join(_quoted(word).replace("$", "$$") for word in command),
            environment=_specified(str(_environment_file())),
            stop_s=STOP_S,
            private="no" if shared else "yes",
            writable=" ".join(_quoted(str(path)) for path in (*writable, *_TEMPORARY * shared)),
        )

    def _writable(self) -> list[Path]:
        """Directories that the service writes to: its records, downloads, compiled kernels, and
        those of trackers."""
        from huggingface_hub.constants import HF_HOME  # most commands need none of it

        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        run = self.settings.run
        paths = [run.directory.absolute(), cache]
        named = [os.environ.get(f"{sink}_DIR".upper()) for sink in run.sinks]
        paths += [Path(folder).absolute() for folder in named if folder]
        return paths if Path(HF_HOME).is_relative_to(cache) else [*paths, Path(HF_HOME).absolute()]

    def _install(self) -> Iterator[str]:
        text, directory = self.unit(), self.settings.run.directory
        _systemctl("show-environment")
        if is_locked(directory) and not _runs():
            raise ConfigError(
                f"a gateway runs on {directory} already: stop it, and install the service again"
            )
        for path in self._writable():
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield from _keep_environment(_environment_file())
        file = _unit_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for verb in (["daemon-reload"], ["enable", UNIT], ["restart", UNIT]):
            _systemctl(*verb)
        yield from wrapped(
            f"{file}: started now, and whenever you log in. `tinker-claw status` says how it is, "
            "`journalctl --user -u tinker-claw -f` shows its log; `loginctl enable-linger` lets it "
            "run while you are logged out, from the start of the machine on."
        )


def _uninstall() -> Iterator[str]:
    _systemctl("show-environment")
    file = _unit_file()
    if not file.exists():
        raise ConfigError(f"there is no {file}: nothing is installed")
    _systemctl("disable", "--now", UNIT)
    file.unlink()
    _systemctl("daemon-reload")
    yield f"{file} is gone. Its records, and {_environment_file()}, are where they were."


def _typed(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of run.py that were given, so that they can be given again.

    Raises:
        ConfigError: one of them holds a password.
    """
    for flag in flags():
        value = given.get(flag.name or "")
        if value is None or not isinstance(flag, click.Option):
            continue
        if isinstance(value, bool):
            yield (flag.opts if value else flag.secondary_opts)[0]
        else:
            if _SECRET_URL.search(str(value)):
                raise ConfigError(
                    f"{flag.opts[0]} holds a password, which others could read in the unit: set "
                    f"{ENV_PREFIX}{str(flag.name).upper()} to it instead, and install again. "
                    f"It goes to {_environment_file()}, which only you can read"
                )
            yield f"{flag.opts[0]}={value}"


def _specified(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """Quote a word for a systemd unit."""
    escaped = _specified(word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
    return escaped if re.fullmatch(r"[\w@%+=:,./$-]+", escaped) else f'"{escaped}"'


# Variables


def _keep_environment(file: Path) -> Iterator[str]:
    """Write this environment's variables for the gateway, unless there is a file already."""
    now = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.upper().startswith(_CARRIED)
    }
    if file.exists():
        file.chmod(0o600)
        there = set(re.findall(r"^\s*(\w+)=", file.read_text(), re.MULTILINE))
        lacks = ", ".join(name for name in now if name not in there)
        yield f"{file} is left as it is" + (f": it lacks {lacks}, set here." if lacks else ".")
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = [f'{name}="{_ESCAPED.sub(_BACKSLASH, value)}"' for name, value in now.items()]
    head = "# Keys and settings of the service, as NAME=value; only you can read them."
    write_private(file, "".join(f"{line}\n" for line in (head, *lines)))
    yield f"{file}: made, with {', '.join(now)}. Keys go there."


def _environment_file() -> Path:
    return config_folder() / "tinker-claw" / "environment"


def _unit_file() -> Path:
    return config_folder() / "systemd" / "user" / UNIT


# systemd


def _runs() -> bool:
    asked = subprocess.run(["systemctl", "--user", "is-active", "--quiet", UNIT], check=False)
    return asked.returncode == 0


def _systemctl(*words: str) -> None:
    """Run systemctl. Raises ConfigError with its message where it fails."""
    elsewhere = "`tinker-claw service show` prints the unit, for whatever else starts services here"
    try:
        done = subprocess.run(
            ["systemctl", "--user", *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(f"there is no systemd here (no systemctl): {elsewhere}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise ConfigError(f"systemctl --user {' '.join(words)}: {said}. {elsewhere}")
