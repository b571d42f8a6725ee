"""No setting that a user can give breaks a step: real settings, model, judge, ledger and HTTP.

The settings come from their declarations. A new one is tried by its type; where that says too
little, it fails here by name until it has a value in `VALUES` or a reason in `ELSEWHERE`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from pydantic.fields import FieldInfo

from examples.demo import homework
from examples.demo.judge import create_app
from tests.support.gateways import wired
from tests.support.ledger import judgeable, sql, step_counts
from tests.support.waits import eventually
from tinker_claw.app.server import in_background
from tinker_claw.app.wiring import System
from tinker_claw.config.load import load
from tinker_claw.config.settings import Settings, sections
from tinker_claw.errors import ConfigError
from tinker_claw.methods import METHODS
from tinker_claw.shipped import CANARIES, MODEL_DIR

KEY = "a-key-of-sixteen-letters"
PROMPTS = 'tools = "Rate the reply from -1 to 1."\n'
PRICES = (
    "as_of = 2026-11-01\n[models.demo]\nprefill = 1.0\ncached = 0.2\nsample = 2.0\ntrain = 3.0\n"
)


@dataclass(frozen=True)
class Ground:
    """Where the files and servers are that settings name."""

    folder: Path
    judge: str
    """Address of a judge."""

    def file(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)


VALUES: dict[str, list[Callable[[Ground], Any]]] = {
    "run.method": [lambda _, name=name: name for name in METHODS],
    "run.model_name": [lambda _: "demo"],
    "run.tokenizer": [lambda _: str(MODEL_DIR)],
    "run.data_dir": [lambda ground: str(ground.folder / "elsewhere")],
    "run.renderer": [lambda _: "qwen3"],
    "run.context_tokens": [lambda _: 2048],
    "gateway.api_key": [lambda _: KEY],
    "gateway.served_model_name": [lambda _: "mine"],
    "gateway.models": [lambda _: "claude-*, haiku"],
    "gateway.chats": [lambda _: {"owners": ["telegram:1"], "others_judge": True}],
    "judge.judge_url": [lambda ground: ground.judge],
    "judge.judge_model": [lambda _: "a-judge"],
    "judge.judge_api_key": [lambda _: KEY],
    "judge.judge_prompts": [lambda ground: ground.file("asks.toml", PROMPTS)],
    "judge.headers": [lambda _: {"x-judge": "yes"}],
    "training.learning_rate": [lambda _: "auto", lambda _: 3e-3],
    "training.canaries": [lambda ground: ground.file("mine.toml", CANARIES.read_text())],
    "privacy.redact": [lambda _: "all", lambda _: "none"],
    "privacy.keep_days": [lambda _: 30],
    "spend.prices": [lambda ground: ground.file("prices.toml", PRICES)],
    "users": [lambda _: [{"name": "ann", "key": KEY}]],
}
"""Values of settings whose type names none."""
ELSEWHERE = {
    "run.backend": "the tests of the Tinker backend",
    "run.base_url": "the tests of the Tinker backend",
    "judge.judge_images": "needs a model that sees; the tests of judged images",
    "run.report_to": "a sink reads steps that are committed",
    "gateway.host": "the listening socket",
    "gateway.port": "the listening socket",
    "gateway.allow_origin": "needs keys; the tests of keys and origins",
    "spend.budget_usd": "here nothing is billed; the tests of the budget",
    "spend.budget_serving": "here nothing is billed; the tests of the budget",
    "local.gpus": "the layout of GPUs",
    "local.rollout_gpus": "the layout of GPUs",
    "local.rollout_tp": "the layout of GPUs",
    "local.sampler_urls": "the tests of inference servers",
    "local.sampler_api_key": "the tests of inference servers",
    "local.base_quantization": "needs a GPU",
    "local.device": "needs a GPU",
}
"""Settings that no step on this machine depends on, and what tries them."""

REFUSED = {
    "gateway.images=train": "demo cannot be trained on images",
    "gateway.thinking=on": "demo cannot think",
}
"""Values that a start refuses with a sentence."""
APPROVES = "Perfect, put it at the end of the file."
CORRECTS = "This reads like an AI. Write it the way a person would, without bold and numbers."


def fields() -> dict[str, FieldInfo]:
    """All settings by `section.name`."""
    found = {
        f"{section}.{name}": field
        for section, model in sections().items()
        for name, field in model.model_fields.items()
    }
    return found | {"users": Settings.model_fields["users"]}


def by_type(field: FieldInfo) -> list[Any]:
    """Return values of a setting other than its default; none where the type names none."""
    kinds = [
        kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType
    ]
    if get_origin(field.annotation) is Literal:
        return [value for value in kinds if value != field.default]
    if kinds == [bool]:
        return [not field.default]
    return [field.default + 1] if kinds in ([int], [float]) and field.default is not None else []


def cases() -> Iterator[Any]:
    for name, field in fields().items():
        if name in ELSEWHERE:
            continue
        if name in VALUES:
            marks = [] if name == "training.canaries" else [pytest.mark.slow]
            for number, value in enumerate(VALUES[name]):
                yield pytest.param(name, value, id=f"{name}-{number}", marks=marks)
            continue
        for value in by_type(field) or [None]:
            yield pytest.param(
                name, lambda _, value=value: value, id=f"{name}={value}", marks=pytest.mark.slow
            )


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value)


def settings_with(name: str, value: Any, ground: Ground) -> Settings:
    """Settings as a file gives them, of the demo's model and small steps unless they say it."""
    given: dict[str, Any] = {
        "run.model_name": "demo",
        "run.backend": "local",
        "run.data_dir": str(ground.folder / "data"),
        "training.batch_size": 2,
        name: value,
    }
    if name.startswith("judge."):
        given.setdefault("judge.judge_url", ground.judge)
    lines = [f"{key} = {as_toml(one)}" for key, one in given.items()]
    return load(["--config", ground.file("settings.toml", "\n".join(lines))])


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[tuple[System, httpx.AsyncClient]]:
    """The product's parts, connected by its own wiring; yields them and a client of the gateway."""
    async with wired(settings) as (system, http), asyncio.TaskGroup() as group:
        tasks = [group.create_task(part.run()) for part in (system.judging, system.learner)]
        yield system, http
        for task in tasks:
            task.cancel()


async def talk(settings: Settings, http: httpx.AsyncClient, session: int) -> None:
    """Ask something, correct the reply, and accept the next one."""
    asked = homework.first_message(homework.new_problem(random.Random(session)))
    messages = [{"role": "user", "content": asked}]
    for line in (CORRECTS, APPROVES, "Bye."):
        answer = await http.post(
            "/chat/completions",
            json={"model": settings.served_name, "messages": messages, "max_tokens": 60},
            headers={"X-Session-Id": str(session), "Authorization": f"Bearer {KEY}"},
        )
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": line}]


def strict(text: str) -> Any:
    """Read JSON as other programs do: NaN and Infinity are none."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncGenerator[Ground]:
    async with in_background(create_app(0)) as url:
        yield Ground(tmp_path, url)


@pytest.mark.parametrize(("name", "value"), [*cases()])
async def test_a_step_is_whole_with(
    ground: Ground, name: str, value: Callable[[Ground], Any]
) -> None:
    given = value(ground)
    assert given is not None, f"the type of {name} names no value: add one to VALUES"
    settings = settings_with(name, given, ground)
    if (why := REFUSED.get(f"{name}={given}")) is not None:
        with pytest.raises(ConfigError, match=why):
            async with running(settings):
                pass
        return
    async with running(settings) as (system, http):
        ledger, health = system.parts.ledger, system.parts.health
        for session in range(40):
            await talk(settings, http, session)
            await eventually(lambda: not (judgeable(ledger) or system.learner.stepping), 120)
            if step_counts(ledger)["committed"]:
                break
        counts = step_counts(ledger)
        assert counts["void"] == 0, sql(ledger).column("SELECT error FROM steps")
        assert health.learner.error is None
        assert counts["committed"] >= 1
        for metrics in sql(ledger).column("SELECT metrics FROM steps WHERE status = 'committed'"):
            rule = strict(metrics)["rule"]
            assert rule["batch_size"] == settings.training.batch_size
        for line in (settings.run.directory / "metrics.jsonl").read_text().splitlines():
            strict(line)
        root = str(http.base_url).removesuffix("v1/")
        seen = await http.get(f"{root}healthz", headers={"Authorization": f"Bearer {KEY}"})
        assert strict(seen.text)["status"] == "ok", seen.text


def test_the_lists_name_settings_that_there_are() -> None:
    assert {*VALUES, *ELSEWHERE} <= fields().keys()
