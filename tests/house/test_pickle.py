"""Only the ranks unpickle, what their own parent and children wrote."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "rpc_sync",
    "rpc_async",
    "read_pickle",
    "torch.load",
    "marshal.load",
    "marshal.loads",
    "link.send",
    "link.recv",
    "allow_pickle",
}
"""Calls that may unpickle; `send_bytes` and `recv_bytes` of a multiprocessing link do not."""


def test_nothing_of_the_product_unpickles_but_its_ranks() -> None:
    """Torch, numpy and multiprocessing are not made to unpickle either."""
    found: list[str] = []
    for package in ("tinker_claw", "local_gpu"):
        for path in (ROOT / package).rglob("*.py"):
            names = {
                name for node in ast.walk(ast.parse(path.read_text())) for name in _names(node)
            }
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names & (MODULES | CALLS)]
    assert found == ["local_gpu/ranks/messages.py: pickle"]


def _names(node: ast.AST) -> set[str]:
    """Imported modules, and the last two words of each call."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {str(node.module).partition(".")[0], *(alias.name for alias in node.names)}
    if isinstance(node, ast.keyword):
        return {str(node.arg)}
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", "")).lstrip("_")
        return {node.attr, f"{owner}.{node.attr}"}
    return set()
