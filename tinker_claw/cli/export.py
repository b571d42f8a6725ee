"""`tinker-claw export`: turns as JSON lines, an adapter in PEFT's format, or a merged model.

Rule: nothing is overwritten, and what is written appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from tinker_claw.cli.common import FOLDER, Invocation, command, room_beside, write
from tinker_claw.cli.versions import as_shown, named
from tinker_claw.config.settings import Settings
from tinker_claw.errors import BackendError, ConfigError, UndoError
from tinker_claw.ledger.database import open_read_only
from tinker_claw.ledger.lessons import NOT_TOLD, of_user
from tinker_claw.ledger.turn_view import Record, run_of
from tinker_claw.ledger.views import turns_in_full
from tinker_claw.wishes import plain_line


@command("export")
@click.option(
    "--jsonl",
    type=FOLDER,
    metavar="FILE",
    help="all turns, with texts, verdict and hints, one JSON object a line; - for the terminal",
)
@click.option(
    "--lessons",
    type=FOLDER,
    metavar="FILE",
    help="what users want of all replies, as Markdown that any agent reads as memory, several "
    "users under their names; - for the terminal",
)
@click.option(
    "--adapter", type=FOLDER, metavar="DIR", help="a version's LoRA weights, in PEFT's format"
)
@click.option(
    "--merged",
    type=FOLDER,
    metavar="DIR",
    help="base model and adapter as one Hugging Face model, with its tokenizer (--backend local)",
)
@click.option("--tokens", is_flag=True, help="turns also with ids and logprobs")
@click.option(
    "--version",
    type=as_shown,
    metavar="vN",
    help="version to export, if not the one that serves",
)
def export(
    invoked: Invocation,
    jsonl: Path | None,
    lessons: Path | None,
    adapter: Path | None,
    merged: Path | None,
    tokens: bool,
    version: int | None,
) -> None:
    """Export recorded turns, lessons or learned weights. The gateway may be running."""
    if sum(target is not None for target in (jsonl, lessons, adapter, merged)) != 1:
        raise ConfigError("give one of --jsonl, --lessons, --adapter and --merged")
    if adapter:
        _learned(invoked, version, "adapter", adapter, _adapter)
    elif merged:
        _learned(invoked, version, "model", merged, _merged)
    elif version is not None:
        raise ConfigError(
            "--version goes with --adapter and --merged; turns and lessons are of all versions"
        )
    elif jsonl:
        _turns(invoked, jsonl, tokens=tokens)
    elif lessons:
        _lessons(invoked, lessons)


def _lessons(invoked: Invocation, target: Path) -> None:
    by_user = defaultdict[str, list[str]](list)
    with invoked.rows() as ledger:
        for lesson in of_user(ledger, None):
            if lesson.state not in NOT_TOLD:
                by_user[lesson.user].append(f"- {plain_line(lesson.text)}")
    lines = ["# What the user wants of replies"]
    for user, items in sorted(by_user.items()):
        lines += ["", *([f"## {user}", ""] if len(by_user) > 1 else []), *items]
    _write(target, lines, "The lessons are")


def _turns(invoked: Invocation, target: Path, *, tokens: bool) -> None:
    with open_read_only(invoked.ledger) as ledger:
        records = turns_in_full(ledger, tokens=tokens)
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        _write(target, lines, "{} turns are")


def _learned(
    invoked: Invocation,
    number: int | None,
    what: str,
    target: Path,
    fill: Callable[[Settings, Record, Path], None],
) -> None:
    settings = invoked.settings
    with invoked.rows() as ledger:
        held, run = run_of(ledger), settings.run
        version = named(ledger, number, with_state=held["backend"] != "local")
    of_run: dict[str, Any] = {"backend": held["backend"], "data_dir": run.directory}
    if "model_name" not in run.model_fields_set:  # else it may lie elsewhere by now
        of_run["model_name"] = held["model"]
    settings = settings.model_copy(update={"run": run.model_copy(update=of_run)})
    with _whole(target) as draft:
        fill(settings, version, draft)
    write([f"The {what} of v{version['id']} is in {target}."])


def _write(target: Path, lines: Iterable[str], beginning: str) -> None:
    """Write lines to a file, or for `-` to the terminal.

    Args:
        beginning: of the sentence that names the file; {}: the number of lines.
    """
    if str(target) == "-":
        return write(lines)
    count = 0
    with _whole(target) as draft, draft.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(f"{line}\n")
            count += 1
    write([f"{beginning.format(count)} in {target}."])


def _weights(settings: Settings, version: Record) -> Path:
    return settings.run.directory / "adapters" / version["sampler_ref"]


def _adapter(settings: Settings, version: Record, draft: Path) -> None:
    if settings.run.backend == "local":
        shutil.copytree(_weights(settings, version), draft, copy_function=shutil.copyfile)
        draft.chmod(0o700)  # copied from one that may have been open to others
    else:
        draft.mkdir()
        asyncio.run(_from_service(settings, version, draft))


async def _from_service(settings: Settings, version: Record, target: Path) -> None:
    """Export at the service, from a training session that begins with the version's state."""
    from tinker_claw.backends.open import check_backend, open_trainer  # seconds: turns need neither

    await check_backend(settings)
    try:
        async with open_trainer(settings, "") as trainer:
            await trainer.load_state(version["state_ref"])
            await trainer.export_adapter(target)
    except BackendError as error:
        raise UndoError(f"v{version['id']} cannot be exported: {error}") from error


def _merged(settings: Settings, version: Record, draft: Path) -> None:
    if settings.run.backend != "local":
        raise UndoError(
            "--merged needs the base model's weights, which are not here with --backend "
            f"{settings.run.backend}; take --adapter, and merge it with peft where they are"
        )
    from tinker_claw.backends.open import check_packages

    check_packages()
    from local_gpu.model.export import export_merged
    from tinker_claw.backends.model_files import source

    model = source(settings)
    export_merged(
        model.weights,
        _weights(settings, version),
        draft,
        tokenizer=model.tokenizer,
        device=settings.local.device,
    )


@contextmanager
def _whole(target: Path) -> Generator[Path]:
    """Yield a path beside the target, which is renamed to it when the block succeeds."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UndoError(f"{target} exists and is not an empty folder; name another")
    with room_beside(target) as room:
        draft = room / target.name
        yield draft
        with suppress(OSError):  # an empty folder is replaced; anything else stays
            target.rmdir()
        draft.rename(target)
