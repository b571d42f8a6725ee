"""tinker-cookbook's recipes as their authors ship them, run against the stand-in for Tinker.

Nothing of theirs is patched. `datasets.load_dataset` and transformers look for a name in the folder
that a program runs in, and in its cache, before they ask a hub: so the recipes run in a folder that
has small data sets under the names they ask for, with a cache that has our tokenizer under the name
that our model is served by.

Rule: runs in the cookbook's own environment (`make cookbook`), as a user would start it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tinker import KEY
from tinker_claw.shipped import MODEL_DIR

SERVED_AS = "Qwen/Qwen3-4B-Instruct-2507"
"""Name of a model that the cookbook has a renderer for; ours speaks its format."""
WAIT_S = 300
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_SHOT = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)
"""Example that rl_loop puts before every question."""
_QUESTIONS = tuple(f"What is {a} and {b}?" for a in range(4) for b in range(8))
_CONFIGS = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""


@dataclass(frozen=True)
class Done:
    """Output of a finished recipe."""

    metrics: list[dict[str, Any]]
    """Metrics, a row for each step."""
    checkpoint: dict[str, Any]
    """Last checkpoint: name, state_path, sampler_path."""

    def of(self, name: str) -> list[float]:
        """Values of a metric, for the steps that have it."""
        return [row[name] for row in self.metrics if name in row]


class Cookbook:
    def __init__(self, environment: Path, folder: Path, url: str) -> None:
        self._python = environment.absolute() / "bin" / "python"
        self._folder = folder
        self._url = url
        _lay_tokenizer(folder / "hf")
        _lay_data(folder)

    def run(self, recipe: str, log: str, **settings: object) -> Done:
        """Run a recipe to its end; `log` names its folder, in which an earlier run is resumed."""
        logs = self._folder / log
        done = self._start(recipe, logs, settings)
        assert done.returncode == 0, done.stdout[-4000:]
        return Done(_rows(logs / "metrics.jsonl"), _rows(logs / "checkpoints.jsonl")[-1])

    def fail(self, recipe: str, log: str, **settings: object) -> str:
        """Run a recipe that must fail; return its output."""
        done = self._start(recipe, self._folder / log, settings)
        assert done.returncode != 0, done.stdout[-4000:]
        return done.stdout

    def begin_from(self, log: str, checkpoint: Mapping[str, Any]) -> None:
        """Place a checkpoint from which a new run starts with its first step."""
        (self._folder / log).mkdir()
        row = {"name": "begin", "batch": 0, "state_path": checkpoint["state_path"]}
        (self._folder / log / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")

    def _start(
        self, recipe: str, logs: Path, settings: Mapping[str, object]
    ) -> subprocess.CompletedProcess[str]:
        given = {"model_name": SERVED_AS, "log_path": logs, **settings}
        return subprocess.run(
            [
                str(self._python),
                "-m",
                f"tinker_cookbook.recipes.{recipe}",
                *(f"{name}={value}" for name, value in given.items()),
            ],
            cwd=self._folder,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "HF_HOME": str(self._folder / "hf"),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TINKER_API_KEY": KEY,
                "TINKER_BASE_URL": self._url,
                "TINKER_TELEMETRY": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )


def _lay_tokenizer(home: Path) -> None:
    cached = home / "hub" / f"models--{SERVED_AS.replace('/', '--')}"
    (snapshot := cached / "snapshots" / "ours").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("ours")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(MODEL_DIR / name, snapshot)


def _lay_data(folder: Path) -> None:
    """Write questions whose answer is 1 as often as 2; rewards go to the answer 2."""

    def chat(question: str, answer: int) -> dict[str, Any]:
        said = (_SHOT[0] + _SUFFIX, _SHOT[1], question + _SUFFIX, f"\\boxed{{{answer}}}")
        turns = zip(("user", "assistant") * 2, said, strict=True)
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    chats = [chat(question, answer) for question in _QUESTIONS for answer in (1, 2)]
    problems = [{"question": question, "answer": "#### 2"} for question in _QUESTIONS]
    _write(folder / "HuggingFaceH4/no_robots", train=chats * 4, test=chats[:4])
    _write(folder / "openai/gsm8k", train=problems * 2, test=problems[:4])
    (folder / "openai/gsm8k/README.md").write_text(_CONFIGS)


def _write(folder: Path, **splits: Iterable[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
