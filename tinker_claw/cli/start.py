"""First start: `tinker-claw` without flags asks what runs where and serves, and
`tinker-claw demo` lets a simulated user correct the shipped tiny model through the real product.

Rule: nothing is written before the last answer, so Ctrl-C leaves nothing behind. The answers become
the settings file, without secrets, that every later start and command reads. A key goes where
Tinker's own SDK looks for one. The demo is the program examples/demo, in the checkout or the wheel.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from tinker_claw.cli.common import room_beside, url_of, write
from tinker_claw.config.load import first_file, load_given
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.shipped import install, shipped

BUDGET_USD = 5
"""Budget of a first start at Tinker, before the user has seen any costs."""
_DEMO_NEEDS = ("torch", "peft", "safetensors", "matplotlib")


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def demo(words: Sequence[str]) -> int:
    """See the shipped tiny model learn from a simulated user; no GPU, no key."""
    # Its flags are its own, --help among them.
    if missing := [name for name in _DEMO_NEEDS if find_spec(name) is None]:
        raise ConfigError(f"the demo needs {', '.join(missing)}: {install('local,demo')}")
    sys.path.insert(0, str(shipped("examples").parent))
    # By name: it is of a higher level, and starts the product as a child process.
    return import_module("examples.demo.__main__").main(words)


def can_ask() -> bool:
    """Return whether a user is at the terminal."""
    if os.environ.get("CI"):  # some have a terminal without a user
        return False
    # A stream that was closed before the start is None.
    return all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))


def begin(serve: Callable[[], int]) -> int:
    """Ask the questions, and start; return the exit status.

    Raises:
        ConfigError: what was answered cannot be kept, or started.
    """
    write(["A few questions; a number answers each. Ctrl-C leaves, and changes nothing."])
    while (place := _place()) != "demo":
        values = {"run__backend": place}
        try:
            if place == "local":
                _check_local(load_given(values))
            values["run__model_name"] = _model(load_given(values))
            settings = load_given(values)
            key = _key(settings) if place == "tinker" else None
        except ConfigError as error:
            write(["", str(error)])
            continue
        settings = load_given(values | {"training__lessons": _lessons()})
        _remember(settings, key, _spend(settings), first_file())
        return serve()
    return demo.main([], standalone_mode=False)


def _choose(answers: Mapping[str, str]) -> str:
    """List answers with their numbers; return the name of the one that is chosen."""
    write(f"  {number}  {answer}" for number, answer in enumerate(answers.values(), 1))
    number = click.prompt(f"1 to {len(answers)}", type=click.IntRange(1, len(answers)))
    return [*answers][number - 1]


def _place() -> str:
    """Ask where the model runs until one of the numbers is given."""
    from local_gpu.plan.layout import visible

    try:
        gpus = visible()
        seen = ", ".join(f"{gpu.total / 2**30:.0f} GiB" for gpu in gpus) or "none found here"
    except ConfigError as error:
        seen = str(error)
    places = {
        "tinker": "on Tinker, Thinking Machines' service: needs a key and costs money",
        "local": f"on GPUs of this machine ({seen})",
        "demo": "nowhere yet: watch a demo; a simulated user teaches a tiny model here",
    }
    write(["", "Where should the model run?"])
    return _choose(places)


def _model(settings: Settings) -> str:
    """Ask for the model's name."""
    usual = settings.run.model_name
    folder = " or a folder" * (settings.run.backend == "local")
    write(["", "Which model?"])
    if _choose({"usual": usual, "other": "another one"}) == "usual":
        return usual
    return click.prompt(f"Its name at Hugging Face{folder}").strip()


def _lessons() -> str:
    """Ask whether lessons are told."""
    write(["", "When you ask something of all replies (`/always in French`), keep it in mind?"])
    return _choose(
        {
            "on": "yes, in all later sessions; the page lists these wishes and drops them",
            "off": "no, replies change by training alone",
        }
    )


def _key(settings: Settings) -> str | None:
    """A key that the service takes; None where the SDK finds one by itself.

    Raises:
        ConfigError: the service refuses the key, has no such model, or is not there.
    """
    from tinker_claw.backends.tinker.access import CONSOLE, source_of_key
    from tinker_claw.backends.tinker.trainer import offered

    key = None
    if (key_source := source_of_key()) is not None:
        write(["", f"Your key is in {key_source}, which is used; it is stored nowhere else."])
    else:
        write(["", f"Your Tinker key? Make one at {CONSOLE}."])
        key = click.prompt("It begins with tml- and is not shown as you type", hide_input=True)
    write(["Asking Tinker ..."])
    asyncio.run(offered(settings, key=key))
    return key


def _check_local(settings: Settings) -> None:
    """Raises ConfigError where there is nothing to run it on."""
    from local_gpu.plan.layout import visible
    from tinker_claw.backends.open import check_backend
    from tinker_claw.backends.vllm import GET_VLLM, find_vllm

    asyncio.run(check_backend(settings))
    if not visible():
        raise ConfigError(
            "nvidia-smi shows no GPU here: fix the driver, choose Tinker, or see the demo"
        )
    if find_vllm() is None:
        raise ConfigError(f"There is no vLLM here, which samples on GPUs. {GET_VLLM}")


def _spend(settings: Settings) -> Sequence[str]:
    """Return the lines of the settings file about the budget of a start at Tinker."""
    from tinker_claw.billing.prices import price_in_force

    # For a user's own server the price is not known.
    if settings.run.backend != "tinker" or price_in_force(settings).missing:
        return ()
    write(["", f"Judging and training pause once ${BUDGET_USD} are spent, serving included."])
    return (
        "",
        "[spend]",
        f'budget_usd = {BUDGET_USD}  # or a sum of each month: "20/month"',
        'budget_serving = "goes-on"  # "stops": then nothing is answered once it is spent',
    )


def _remember(settings: Settings, key: str | None, spend: Sequence[str], file: Path) -> None:
    """Keep the answers. `key`: API key to store; None: none.

    Raises:
        ConfigError: something cannot be written.
    """
    write([""])
    if key is not None:
        from tinker_claw.backends.tinker.access import keep

        kept = keep(key)
        write([f"Stored the key in {kept}, which only you can read, like `tinker auth login`."])
    with room_beside(file) as room:
        (room / "new").write_text(_written(settings, spend, file), encoding="utf-8")
        (room / "new").rename(file)
    write(
        [
            f"Stored your answers in {file}, which every command reads. The same start by hand:",
            f"    tinker-claw --config {file}",
            "Once it serves, let OpenClaw use it: tinker-claw openclaw-config --write --primary",
            f"Its page: {url_of(settings)}/ui",
            "",
        ]
    )


def _written(settings: Settings, spend: Sequence[str], file: Path) -> str:
    run = settings.run
    lines = [
        f"# Your answers of {time.strftime('%Y-%m-%d')}. Change what you like, or delete the file,",
        "# and `tinker-claw` asks again. The same start by hand:",
        f"#     tinker-claw --config {file}",
        "",
        "[run]",
        f"model_name = {json.dumps(run.model_name)}",
        f"method = {json.dumps(run.method)}",
        f"backend = {json.dumps(run.backend)}",
        f"data_dir = {json.dumps(str(run.directory.absolute()), ensure_ascii=False)}",
        "",
        "[training]",
        f"lessons = {json.dumps(settings.training.lessons)}",
    ]
    return "\n".join([*lines, *spend]) + "\n"
