"""Mutants: how many small mistakes the tests would notice, before and after a change.

    python -m tests.lab.mutants cover tests/methods tests/privacy  # which test runs which line
    python -m tests.lab.mutants draw --count 300 --seed 7          # mutants on such lines
    python -m tests.lab.mutants run                                # against their lines' tests

`cover` adds to what earlier calls found, so that folders can be covered side by side; it needs the
package `coverage`. After a change cover anew with `--data` of another folder, copy `drawn.csv` into
it, and `run` says which mutants are still killed and whose place is gone.

A mutant is one changed operator, constant, condition or call. The suite is collected once; each
mutant runs in a fork of that process, where the code object of its function is replaced. Tests
that start programs of their own run the unchanged code there, so they notice nothing.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gc
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "tinker_claw/methods/advantages.py",
    "tinker_claw/methods/passes.py",
    "tinker_claw/conversation/attribution.py",
    "tinker_claw/conversation/openclaw.py",
    "tinker_claw/gateway/index.py",
    "tinker_claw/conversation/history.py",
    "tinker_claw/privacy/redact.py",
    "tinker_claw/privacy/marker.py",
    "tinker_claw/formats/*.py",
    "tinker_claw/learner/loop.py",
    "tinker_claw/learner/batch.py",
    "tinker_claw/learner/judging.py",
    "tinker_claw/learner/practice.py",
    "tinker_claw/ledger/versions.py",
    "tinker_claw/ledger/turn_view.py",
    "tinker_claw/served.py",
    "tinker_claw/words.py",
    "tinker_claw/files.py",
    "local_gpu/learn/losses.py",
    "local_gpu/learn/masters.py",
    "local_gpu/tree/prefix_tree.py",
    "local_gpu/**/pool*.py",
)
"""What no cut may leave unguarded: numbers, capture, who speaks, records, formats, the loop."""
LEAST_S, MOST_S = 30.0, 120.0
"""Seconds that one mutant's tests may take before it counts as killed (it hangs), and the seconds
of tests that are run against one that survives."""
SURVIVED, GONE = "", "its place is gone"
FAILED = 1e9
"""Seconds of a test that did not pass by itself: it says nothing of mutants."""


@dataclass(frozen=True)
class Mutant:
    """One small mistake."""

    file: str
    function: str
    """Qualified name of the function that holds it."""
    before: str
    """The source that is changed."""
    after: str
    nth: int
    """Which of the equal places in the function it is."""
    line: int = 0
    killed_by: str = SURVIVED
    """The test that noticed; "": none did."""


# Mistakes


_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_RECKONED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
}


def mistakes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what could stand in place of a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield ast.Compare(node.left, [_COMPARED[type(op)]()], node.comparators)
        case ast.BinOp(left, op, right) if type(op) in _RECKONED:
            yield ast.BinOp(left, _RECKONED[type(op)](), right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.UnaryOp(ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Return(ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.AugAssign(target, op, value) if type(op) in _RECKONED:
            yield ast.AugAssign(target, _RECKONED[type(op)](), value)
        case _:
            return


def _shown(node: ast.AST) -> str:
    """The first line of a node's source, which names it."""
    return ast.unparse(ast.fix_missing_locations(node)).split("\n", 1)[0][:200]


def places(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield the functions' nodes in order: qualified name, node, its parent."""

    def within(node: ast.AST, name: str, inside: bool) -> Iterator[tuple[str, ast.AST, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from within(child, f"{name}{child.name}.", inside)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in child.body:
                    yield f"{name}{child.name}", statement, child
                    yield from deeper(statement, f"{name}{child.name}")

    def deeper(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST, ast.AST]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return  # a function in a function is compiled with the outer one, and left out
        for child in ast.iter_child_nodes(node):
            yield name, child, node
            yield from deeper(child, name)

    yield from within(tree, "", False)


def mutants(file: str) -> list[Mutant]:
    """Return all mutants of a file."""
    found, count = list[Mutant](), defaultdict[tuple[str, str, str], int](int)
    for function, node, _ in places(ast.parse((ROOT / file).read_text())):
        for other in mistakes(node):
            key = function, _shown(node), _shown(other)
            line = getattr(node, "lineno", 0)
            found.append(Mutant(file, *key, count[key], line))
            count[key] += 1
    return found


def found_again(drawn: Sequence[Mutant]) -> list[Mutant]:
    """Return the mutants with the lines on which they stand now; GONE where they do not."""
    now = {file: {_key(one): one for one in mutants(file)} for file in _files()}
    placed = ((one, now.get(one.file, {}).get(_key(one))) for one in drawn)
    return [here or replace(one, killed_by=GONE) for one, here in placed]


def _key(mutant: Mutant) -> tuple[str, str, str, int]:
    return mutant.function, mutant.before, mutant.after, mutant.nth


def mutated(mutant: Mutant) -> CodeType | None:
    """Return the code object of a mutant's function; None: its place is gone."""
    tree, seen = ast.parse((ROOT / mutant.file).read_text()), 0
    for function, node, parent in places(tree):
        if function != mutant.function or _shown(node) != mutant.before:
            continue
        for other in mistakes(node):
            if _shown(other) != mutant.after:
                continue
            if seen == mutant.nth:
                _put(parent, node, ast.copy_location(other, node))
                code = compile(ast.fix_missing_locations(tree), str(ROOT / mutant.file), "exec")
                return _code_of(code, mutant.function.split("."))
            seen += 1
    return None


def _put(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list) and any(one is old for one in value):
            setattr(parent, name, [new if one is old else one for one in value])


def _code_of(code: CodeType, path: Sequence[str]) -> CodeType | None:
    for name in path:
        inner = [one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name]
        if not inner:
            return None
        code = inner[-1]
    return code


def replace_code(mutant: Mutant, code: CodeType) -> int:
    """Give every function that runs the original code the mutant's; return how many there were."""
    name, file, changed = mutant.function.rpartition(".")[2], str(ROOT / mutant.file), 0
    for one in gc.get_objects():
        # Not isinstance: objects that stand for others import or warn when they are asked.
        if type(one) is not FunctionType or one.__code__.co_filename != file:
            continue
        at = one.__code__
        if at.co_name == name and at.co_firstlineno == code.co_firstlineno:
            with suppress(ValueError):  # another number of free variables: not this one
                one.__code__ = code
                changed += 1
    return changed


# Which test runs which line


class Cover:
    """Plugin of pytest that records which test runs which line of the rooms."""

    def __init__(self, data: Path, files: Sequence[str]) -> None:
        import coverage  # pyright: ignore[reportMissingImports]

        worker = str(os.getpid())  # one for each process that covers a part of the tests
        self._cover = coverage.Coverage(
            data_file=str(data / f"cover-{worker}"),
            include=[str(ROOT / file) for file in files],
            config_file=False,
            messages=False,
        )
        self._data, self._worker = data, worker
        self._seconds: dict[str, float] = {}
        self._cover.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._cover.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = before + report.duration if report.passed else FAILED

    def pytest_sessionfinish(self) -> None:
        self._cover.stop()
        self._cover.save()
        lines = [f"{seconds:.3f}\t{nodeid}\n" for nodeid, seconds in self._seconds.items()]
        (self._data / f"seconds-{self._worker}.tsv").write_text("".join(lines))


def _covering(data: Path) -> dict[str, dict[int, list[str]]]:
    """Which tests run which line, the quickest first; tests that failed are left out."""
    import coverage  # pyright: ignore[reportMissingImports]

    seconds = dict[str, float]()
    for file in data.glob("seconds-*.tsv"):
        for row in file.read_text().splitlines():
            took, nodeid = row.split("\t", 1)
            seconds[nodeid] = float(took)
    found = defaultdict[str, dict[int, list[str]]](lambda: defaultdict(list))
    for file in data.glob("cover-*"):
        known = coverage.CoverageData(str(file))
        known.read()
        for measured in known.measured_files():
            name = str(Path(measured).relative_to(ROOT))
            for line, tests in known.contexts_by_lineno(measured).items():
                found[name][line] += [one for one in tests if seconds.get(one, FAILED) < FAILED]
    for lines in found.values():
        for tests in lines.values():
            tests.sort(key=lambda one: (seconds[one], one))
    return found


# Runs


class ForkServer:
    """Plugin of pytest that runs mutants, each in a fork, instead of the tests."""

    def __init__(
        self, drawn: Sequence[Mutant], covering: dict[str, dict[int, list[str]]], out: Path
    ) -> None:
        self._drawn, self._covering, self._out = drawn, covering, out

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        with self._out.open("a", newline="") as file:
            rows = csv.DictWriter(file, [field.name for field in fields(Mutant)])
            for number, mutant in enumerate(self._drawn, 1):
                tests = self._covering.get(mutant.file, {}).get(mutant.line, [])
                chosen = [items[one] for one in tests if one in items]
                killed = self._against(session, mutant, chosen)
                rows.writerow(asdict(replace(mutant, killed_by=killed)))
                file.flush()
                print(f"{number}/{len(self._drawn)} {mutant.file}:{mutant.line} {killed or '-'}")
        return True

    def _against(
        self, session: pytest.Session, mutant: Mutant, items: Sequence[pytest.Item]
    ) -> str:
        """Run the tests in a fork; return the first that fails, "" if none does."""
        code = mutated(mutant)
        if code is None or not items:
            return SURVIVED
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.setsid()
            try:
                _child(session, mutant, code, items, write)
            except BaseException:
                os.write(write, f"broken {traceback.format_exc()!r}\n".encode())
            finally:  # nothing may go on in the parent's loop
                os._exit(0)
        os.close(write)
        running, until = "", time.monotonic() + LEAST_S
        ends = time.monotonic() + MOST_S + LEAST_S
        verdict, kept = "", b""
        while True:
            ready, _, _ = select.select(
                [read], [], [], max(0.0, min(until, ends) - time.monotonic())
            )
            if not ready:
                verdict = f"{running} (hangs)"
                break
            came = os.read(read, 65536)
            if not came:
                break
            kept += came
            *rows, kept = kept.split(b"\n")
            for row in rows:
                mark, _, name = row.decode().partition(" ")
                running, until = name, time.monotonic() + LEAST_S
                if mark == "failed":
                    verdict = name
                elif mark == "broken":
                    raise RuntimeError(f"{mutant} could not be run: {name}")
        os.close(read)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not verdict and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            verdict = f"{running} (dies)"
        return verdict


def _child(
    session: pytest.Session,
    mutant: Mutant,
    code: CodeType,
    items: Sequence[pytest.Item],
    write: int,
) -> None:
    """Run tests with a mutant in place, until one fails or the time is up."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if not replace_code(mutant, code):
        raise LookupError("no function runs this code")
    failed: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    session.config.pluginmanager.register(Watch())
    ends = time.monotonic() + MOST_S
    for at, item in enumerate(items):
        os.write(write, f"runs {item.nodeid}\n".encode())
        following = items[at + 1] if at + 1 < len(items) else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed:
            os.write(write, f"failed {failed[0]}\n".encode())
            return
        if time.monotonic() > ends:
            return


# Commands


def _files() -> list[str]:
    found = {file for room in ROOMS for file in ROOT.glob(room) if file.name != "__init__.py"}
    return sorted(str(file.relative_to(ROOT)) for file in found)


def _load(file: Path) -> list[Mutant]:
    with file.open(newline="") as rows:
        return [
            Mutant(**{**row, "nth": int(row["nth"]), "line": int(row["line"])})  # type: ignore[arg-type]
            for row in csv.DictReader(rows)
        ]


def _save(file: Path, drawn: Sequence[Mutant]) -> None:
    with file.open("w", newline="") as out:
        rows = csv.DictWriter(out, [field.name for field in fields(Mutant)])
        rows.writeheader()
        rows.writerows(map(asdict, drawn))


def _draw(data: Path, count: int, seed: int) -> list[Mutant]:
    """Choose mutants on lines that tests run, as many from each file as far as it has them."""
    covering, chance, drawn = _covering(data), random.Random(seed), list[Mutant]()
    rooms = {
        file: [m for m in mutants(file) if covering.get(file, {}).get(m.line)] for file in _files()
    }
    for pool in rooms.values():
        chance.shuffle(pool)
    while len(drawn) < count and any(rooms.values()):
        for pool in rooms.values():
            if pool and len(drawn) < count:
                drawn.append(pool.pop())
    return sorted(drawn, key=lambda one: (one.file, one.line, one.before, one.nth))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("command", choices=("cover", "draw", "run"))
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--part", default="1/1", help="of the mutants every n-th: 1/2, 2/2")
    asked, rest = parser.parse_known_intermixed_args()
    asked.data.mkdir(parents=True, exist_ok=True)
    drawn_file = asked.data / "drawn.csv"
    common = ["-q", "-p", "no:cacheprovider", "--slow", "none", *asked.tests, *rest]
    if asked.command == "cover":
        return pytest.main(common, [Cover(asked.data, _files())])
    if asked.command == "draw":
        _save(drawn_file, _draw(asked.data, asked.count, asked.seed))
        print(f"{len(_load(drawn_file))} mutants in {drawn_file}")
        return 0
    part, parts = map(int, asked.part.split("/"))
    drawn = found_again(_load(drawn_file)[part - 1 :: parts])
    ended = asked.data / f"run-{part}.csv"
    _save(ended, [one for one in drawn if one.killed_by == GONE])
    drawn = [one for one in drawn if one.killed_by != GONE]
    sys.setrecursionlimit(10_000)
    covering = _covering(asked.data)
    files = sorted(
        {one.partition("::")[0] for m in drawn for one in covering[m.file].get(m.line, ())}
    )
    common = ["-q", "-p", "no:cacheprovider", "-s", "--slow", "none", *files]
    status = pytest.main(common, [ForkServer(drawn, covering, ended)])
    after = _load(ended)
    gone = sum(one.killed_by == GONE for one in after)
    killed = sum(one.killed_by not in (SURVIVED, GONE) for one in after)
    print(f"{killed} of {len(after) - gone} killed, {gone} gone, in {ended}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
