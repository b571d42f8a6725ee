"""The dashboard asks only for figures that exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

from tests.house.test_telemetry import everything
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Usage

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "dashboard.json"


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def selectors(node: Any, by: frozenset[str] = frozenset()) -> Iterator[tuple[str, set[str]]]:
    """Names of series, and the labels that each needs: of its matchers and of sums by label."""
    match node:
        case promql.VectorSelector():
            yield node.name, {matcher.name for matcher in node.matchers.matchers} | by
        case promql.MatrixSelector():
            yield from selectors(node.vector_selector, by)
        case promql.AggregateExpr():
            by |= frozenset(node.modifier.labels if node.modifier else ())
            yield from selectors(node.expr, by)
        case promql.BinaryExpr():
            yield from selectors(node.lhs, by)
            yield from selectors(node.rhs, by)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from selectors(node.expr, by)
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument, by)
        case _:
            assert isinstance(node, promql.NumberLiteral), node


def asked() -> dict[str, set[str]]:
    """Labels that the dashboard asks for, by series."""
    found: dict[str, set[str]] = {}
    for expression in expressions():
        parsed = promql.parse(expression.replace("$__rate_interval", "5m"))
        for name, labels in selectors(parsed):
            found.setdefault(name, set()).update(labels)
    return found


def shown(text: str) -> dict[str, set[str]]:
    """Labels that /metrics has, by series; none for a counter that has not counted yet."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found[family.name + "_total" * (family.type == "counter")] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_figure_and_label_of_the_dashboard_exists() -> None:
    telemetry = Telemetry(None)
    everything(telemetry)
    telemetry.billed("serve", Usage(prefill=1), 0.5)
    telemetry.alarms({"gate": 1})
    there = shown(telemetry.exposition().decode())
    for name, labels in asked().items():
        assert name in there, name
        assert labels <= there[name], (name, labels - there[name])


def test_every_panel_has_its_place_and_says_what_it_shows() -> None:
    board = json.loads(DASHBOARD.read_text())
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Serving", "Learning", "Health", "Cost"]
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
