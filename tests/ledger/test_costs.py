"""What a ledger is asked for costs no more after a year, above all between two tokens.

Counted in steps of SQLite's machine, since a test measures no time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.ledger import judgeable, new_turn, queue, sql, sql_connection
from tinker_claw.ledger import prune
from tinker_claw.ledger.database import open_read_only
from tinker_claw.ledger.decline import read_decline
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.views import turns_in_full
from tinker_claw.types import NextState


def steps_of(ledger: Ledger, ask: Callable[[], object]) -> int:
    """Number of steps of SQLite's machine that this takes."""
    counted, connection = list[int](), sql_connection(ledger)
    connection.set_progress_handler(lambda: counted.append(1), 1)
    ask()
    connection.set_progress_handler(None, 1)
    return len(counted)


def plans_of(ledger: Ledger, ask: Callable[[], object]) -> list[str]:
    """SQLite's plans of all queries that this takes."""
    queries = list[str]()
    sql_connection(ledger).set_trace_callback(queries.append)
    ask()
    sql_connection(ledger).set_trace_callback(None)
    rows = sql(ledger).rows
    return [row["detail"] for query in queries for row in rows(f"EXPLAIN QUERY PLAN {query}")]


def test_a_look_at_the_queue_reads_the_turns_in_it_alone(ledger: Ledger) -> None:
    queue(ledger, 1)
    ledger.turns.add(new_turn(ledger))  # the index goes on behind the queue
    before = steps_of(ledger, lambda: ledger.samples.expire(0, 9))
    for _ in range(100):
        ledger.turns.add(new_turn(ledger))
    assert steps_of(ledger, lambda: ledger.samples.expire(0, 9)) == before


def test_a_turn_that_waits_for_ever_costs_a_look_at_its_next_state_alone(ledger: Ledger) -> None:
    """The last turn of every session is one, and the judge looks whenever a reply is answered."""
    open_turns = [ledger.turns.add(new_turn(ledger, f"s{n}")) for n in range(200)]
    assert steps_of(ledger, ledger.jobs.due) < 16 * len(open_turns)
    ledger.turns.add_next_state(open_turns[7], NextState("user", "no"))
    ledger.feedback.give("me", About("turn", open_turns[3]), Feedback(1.0))
    assert judgeable(ledger) == [open_turns[3], open_turns[7]]


def test_what_a_forgotten_session_taught_is_found_by_its_lessons(ledger: Ledger) -> None:
    first = ledger.turns.add(new_turn(ledger, "s"))
    plans = plans_of(ledger, lambda: prune.from_turn(first)(sql(ledger)))
    assert plans
    assert not [plan for plan in plans if plan.startswith("SCAN turns")]


def test_a_decline_is_looked_for_from_the_newest_session_on(ledger: Ledger) -> None:
    plans = plans_of(ledger, lambda: read_decline(ledger.rows))
    assert not any("TEMP B-TREE" in plan for plan in plans), "all turns would be read and sorted"
    assert any("SEARCH sessions" in plan for plan in plans)


@pytest.mark.parametrize("tokens", [False, True])
def test_an_export_without_ids_reads_no_prompt(ledger: Ledger, tokens: bool) -> None:
    ledger.turns.add(new_turn(ledger, prompt=tuple(range(3000))))
    asked = list[str]()
    with open_read_only(ledger.path) as rows:
        rows._connection.set_trace_callback(asked.append)
        (record,) = turns_in_full(rows, tokens=tokens)
    assert ("prompt" in record) == tokens
    assert any("prompt_blocks" in query for query in asked) == tokens
