"""The house: modules import from lower floors, third parties stay behind their fences."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = {
    "tinker_claw": 0,
    "tinker_claw.errors": 0,
    "tinker_claw.evidence": 0,
    "tinker_claw.retry": 0,
    "tinker_claw.files": 0,
    "tinker_claw.turn_state": 0,
    "tinker_claw.privacy": 0,
    "tinker_claw.connections": 1,
    "tinker_claw.images": 1,
    "tinker_claw.types": 1,
    "tinker_claw.origin": 1,
    "tinker_claw.shipped": 1,
    "tinker_claw.tasks": 1,
    "tinker_claw.plugins": 1,
    "tinker_claw.prose": 2,
    "tinker_claw.wishes": 1,
    "tinker_claw.served": 2,
    "tinker_claw.config": 3,
    "tinker_claw.formats": 3,
    "tinker_claw.policy": 3,
    "tinker_claw.render": 3,
    "tinker_claw.telemetry": 3,
    "tinker_claw.conversation": 4,
    "tinker_claw.judge": 4,
    "tinker_claw.ledger": 4,
    "tinker_claw.methods": 4,
    "tinker_claw.outages": 4,
    "local_gpu": 4,
    "tinker_claw.billing": 5,
    "tinker_claw.sinks": 5,
    "tinker_claw.words": 5,
    "tinker_claw.backends": 6,
    "tinker_claw.gateway": 6,
    "tinker_claw.learner": 6,
    "tinker_claw.page": 7,
    "tinker_claw.app": 8,
    "tinker_claw.cli": 9,
    "run": 10,
    "tinker_claw.__main__": 10,
    "examples": 10,
    "benchmarks": 10,
}
LOCAL_GPU_MAY_IMPORT = {
    "tinker_claw.types",
    "tinker_claw.connections",
    "tinker_claw.errors",
    "tinker_claw.files",
    "tinker_claw.images",
    "tinker_claw.origin",
    "tinker_claw.policy",
    "tinker_claw.retry",
    "tinker_claw.shipped",
    "tinker_claw.tasks",
}
FENCES = {
    "torch": ("local_gpu", "examples.demo.recipe", "benchmarks"),
    "peft": ("local_gpu", "benchmarks"),
    "safetensors": ("local_gpu",),
    "kingfisher_sdk": ("tinker_claw.privacy",),
    "fastapi": (
        "tinker_claw.gateway",
        "tinker_claw.app",
        "examples.demo.judge",
        "local_gpu.tinker",
        "benchmarks",
    ),
    "uvicorn": (
        "tinker_claw.connections",
        "examples.demo.judge",
    ),
    "httpx": (
        "tinker_claw.judge",
        "tinker_claw.backends",
        "local_gpu.sample",
        "examples",
        "benchmarks",
    ),
    "tinker": ("tinker_claw.backends", "local_gpu.tinker"),
    "tenacity": ("tinker_claw.retry",),
    "click": ("tinker_claw.cli", "tinker_claw.config"),
    "rich": ("tinker_claw.cli", "examples", "benchmarks"),
    "PIL": ("tinker_claw.images", "local_gpu", "examples.tracks.screen"),
    "renderers": ("tinker_claw.render", "benchmarks"),
    "msgspec": ("tinker_claw.formats",),
    "sqlite3": ("tinker_claw.ledger", "examples", "benchmarks"),
}


def modules() -> list[tuple[str, Path]]:
    files = [ROOT / "run.py"]
    for folder in ("tinker_claw", "local_gpu", "examples", "benchmarks"):
        files += sorted((ROOT / folder).rglob("*.py"))
    names = []
    for file in files:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        names.append((".".join(parts), file))
    return names


def imports(name: str, file: Path) -> set[str]:
    return imported(name, file.read_text())


def imported(name: str, text: str) -> set[str]:
    """Dotted names that a module's text imports, wherever in it; relative imports resolved."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: -node.level or None]
                base = ".".join([*package, base]).strip(".")
            found.add(base)
            if base in ("tinker_claw", "local_gpu"):
                found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


_ALL_MAY_IMPORT = {
    *(sys.stdlib_module_names | {"tinker_claw"}),
    *(
        re.split(r"[^\w-]", package)[0].replace("-", "_")
        for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "dependencies"
        ]
    ),
}
OF_SINKS = {
    target.split(".")[0]: (name,)
    for name, file in modules()
    if name.startswith("tinker_claw.sinks.")
    for target in imports(name, file)
    if target.split(".")[0] not in _ALL_MAY_IMPORT
}
"""A tracker's package is imported by its sink alone."""


def room(name: str) -> str | None:
    """The entry of FLOORS that a dotted name belongs to."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in FLOORS:
            return ".".join(parts[:end])
    return None


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


@pytest.mark.parametrize(("name", "file"), modules(), ids=lambda value: str(value))
def test_imports_point_down_and_third_parties_stay_behind_their_fences(
    name: str, file: Path
) -> None:
    here = room(name)
    assert here is not None, f"{name} has no floor: add it to FLOORS"
    for target in imports(name, file):
        there, package = room(target), target.split(".")[0]
        if places := (OF_SINKS | FENCES).get(package):
            assert within(name, places), f"{name} imports {package}"
        if there is None or there == here:
            continue
        assert FLOORS[there] < FLOORS[here], f"{name} (F{FLOORS[here]}) imports {target}"
        if here == "local_gpu":
            assert there in LOCAL_GPU_MAY_IMPORT | {"tinker_claw"}, f"{name} imports {target}"


@pytest.mark.parametrize(
    ("of", "words"),
    [("local_gpu", 2), ("tinker_claw.backends", 9), ("local_gpu.learn", 9), ("local_gpu.ranks", 9)],
)
def test_nothing_stands_in_a_circle(of: str, words: int) -> None:
    """Neither the rooms of local_gpu nor the modules of some rooms. Imports within functions count,
    those for annotations alone do not (`halves` names what `learn` takes)."""

    def place(name: str) -> str:
        return ".".join(name.split(".")[:words])

    arrows: dict[str, set[str]] = {}
    for name, file in modules():
        if name.startswith(f"{of}."):
            text = re.sub(r"(?m)^if TYPE_CHECKING:.*\n(?:    .*\n)+", "", file.read_text())
            arrows.setdefault(place(name), set()).update(map(place, imported(name, text)))
    assert len(arrows) > 2
    inside = {name: there & arrows.keys() - {name} for name, there in arrows.items()}
    TopologicalSorter(inside).prepare()  # raises CycleError, with the circle


def test_lowest_floor_needs_the_standard_library_only() -> None:
    for name in ("types", "errors"):
        for target in imports(f"tinker_claw.{name}", ROOT / "tinker_claw" / f"{name}.py"):
            package = target.split(".")[0]
            assert package in sys.stdlib_module_names | {"tinker_claw", "__future__"}, target
