"""`python -m benchmarks.gpu_day`: the first day on a GPU, in stages of a few minutes each.

What would stop a user comes first, and the first twenty minutes are complete in themselves: the
machine, every attention kernel, gradients, steps of 8B, memory beside the plan, shared prefixes
beside peft. Then a life (publishing, kill -9, a device that fails), other families, and vLLM. A
stage's rows are written to `--folder` as JSON, one line each; a run that is started again continues
after them, and tries failed ones again. `--rehearse` runs all of it on a CPU with a tiny model.
`docs/owed.md` says why each matters.

Rule: a stage is commands that can also be typed, in processes of their own, so that one that breaks
the device's context or hangs does not end the day. Goals are judged from the rows; nothing is
assumed where there is no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

_LOOK_S: Final = 0.5
_ENDS_S: Final = 20.0
"""Seconds for a process to end after it was asked to."""
_TAIL: Final = 4000
"""Last characters of a command's output that the report shows."""
_BROKEN: Final = 3
"""Exit status of `gpu_rows` whose device failed: the next process continues after that row."""
_BREAKS: Final = 8
"""Most restarts of a stage after its device failed."""
ROOT: Final = Path(__file__).parents[1]
KERNELS: Final = ("sdpa", "merged", "flex", "varlen", "fa3")

Row = Mapping[str, Any]
Status = Literal["done", "missed", "left out", "failed", "over time"]
"""Outcome of a stage. missed: measured, and a goal was not reached. left out: something it needs is
not installed."""


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    judge: Callable[[Sequence[Row]], tuple[bool, str]]
    """Returns whether the goal is met, and the finding. A LookupError or TypeError means that there
    is no figure."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    minutes: float
    why: str
    commands: tuple[str, ...]
    """Commands as typed in the project's folder; {rows} is the file that one writes its rows to."""
    goals: tuple[Goal, ...] = ()
    beside: str | None = None
    """Command of a server that runs meanwhile."""
    ready: str | None = None
    """Address of that server, which answers 200 when it is up."""
    needs: Path | None = None
    """File without which the stage is left out."""
    cure: str = ""
    """Sentence on how to get that file."""


@dataclass(slots=True)
class Report:
    stage: str
    why: str
    status: Status
    seconds: float
    commands: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    told: str = ""
    """Reason why it was left out."""

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.get("failed")]

    def line(self) -> str:
        """Line of the summary."""
        missed = [goal for goal in self.goals if not goal["met"]]
        found = "; ".join(f"{goal['goal']}: {goal['found']}" for goal in missed or self.goals)
        rows = f"{len(self.rows) - len(self.failed)} of {len(self.rows)} rows"
        said = f"{self.stage:10} {self.status:9} {self.seconds:4.0f} s  {rows:15} "
        return (said + (self.told or found)).rstrip()[:_WIDE]

    def markdown(self) -> str:
        """Section of the report."""
        lines = [f"# {self.stage}: {self.status}", "", self.told or self.why, ""]
        lines += [f"{self.seconds:.0f} s.", ""]
        for goal in self.goals:
            lines.append(f"- [{'x' if goal['met'] else ' '}] {goal['goal']}: {goal['found']}")
        for one in self.commands:
            told = f"exit status {one['status']}" if one["status"] is not None else "cut off"
            lines += ["", f"    {one['command']}", "", f"{told}, {one['seconds']:.0f} s:", ""]
            lines += ["```", one["tail"].strip(), "```"]
        return "\n".join(lines) + "\n"


_WIDE: Final = 140


def stages(folder: Path, device: str = "cuda", *, small: bool = False) -> tuple[Stage, ...]:
    """Stages of the day. `small`: with the rehearsal's sizes, and ten times as long, because a CPU
    is not paid by the minute and may have other work."""
    of = f"--device {device}{' --small' if small else ''} --rows {{rows}}"

    def rows(stage: str) -> tuple[str, ...]:
        return (f"python -m benchmarks.gpu_rows {stage} {of}",)

    weights = folder / "random-weights"
    preset = "tiny" if small else "8b"
    vllm = ROOT / ".venv-vllm" / "bin" / "vllm"
    install = "docs/gpus.md says how .venv-vllm is made"
    serve = (
        f"python -m benchmarks.serving --preset {preset} --folder {weights} --shared "
        f"{'64 --own 16 --seconds 1 --steps 1 --new-tokens 8' if small else '8000 --own 500 '}"
        f"{'' if small else '--seconds 20 --steps 2 --new-tokens 200 --context-tokens 32768'}"
    )
    server = (
        f"{vllm} serve {weights} --skip-tokenizer-init --port 8001 --enable-lora "
        "--max-loras 4 --max-cpu-loras 8 --max-lora-rank 32 --logprobs-mode processed_logprobs "
        "--generation-config vllm --enable-prefix-caching --served-model-name base "
        "--scheduling-policy priority --max-num-batched-tokens 2048 --max-num-seqs 64 "
        "--gpu-memory-utilization 0.35"
    )
    day = (
        Stage("probe", 2, "What is there, and how fast it is.", rows("probe"), (_all(),)),
        Stage(
            "kernels",
            5,
            "Every attention kernel over trees of three shapes: only CPUs have shown them.",
            tuple(rows(f"kernels --kernel {name}")[0] for name in KERNELS),
            (_kernels_agree(0.05), _fastest()),
        ),
        Stage(
            "gradients",
            2,
            "The quickest check that the device computes the same as a CPU.",
            rows("gradients"),
            (_all(), _within("tiny float32", 1e-5), _no_further_than_peft(2.0)),
        ),
        Stage(
            "step",
            7,
            "Sixteen samples of 8,192 tokens at 8B: what each setting gains, and where time goes.",
            rows("step"),
            (_figure("as it is"), _best()),
        ),
        Stage(
            "peak",
            2,
            "Memory of a pass beside the plan, which decides what is tried at all.",
            rows("peak"),
            (_all(), _planned(1.1)),
        ),
        Stage(
            "shared",
            2,
            "What prefix trees are for, beside peft with the logits of the loss alone.",
            rows("shared"),
            (_all(), _times_faster(2.0)),
        ),
        Stage(
            "life",
            5,
            "What learns and what samples beside one another; kill -9 and a device that fails.",
            rows("life"),
            (_all(), _published_within(1.0), _apart(0.1), _recognised()),
        ),
        Stage(
            "families",
            3,
            "Linear attention, a mixture of experts and four bits, tiny.",
            rows("families"),
            (_apart(0.05),),
        ),
        Stage(
            "embedded",
            8,
            "The last resort without vLLM, on the GPU that learns.",
            (f"{serve} --device {device} --streams 4 --json {{rows}}",),
            (_none_failed(),),
        ),
        Stage(
            "vllm",
            8,
            "Versions on a real server: so far it was PyPI's build for CPUs.",
            ("python -m pytest -q --vllm=.venv-vllm tests/local_gpu/sample/test_vllm.py",),
            needs=vllm,
            cure=install,
        ),
        Stage(
            "serving",
            8,
            "Serving never waits for training: vLLM beside the trainer.",
            (f"{serve} --sampler-urls http://127.0.0.1:8001 --streams 8 --json {{rows}}",),
            (_none_failed(), _slowest_publication(1.0)),
            beside=server,
            ready="http://127.0.0.1:8001/health",
            needs=vllm,
            cure=install,
        ),
    )
    return tuple(replace(stage, minutes=10 * stage.minutes) for stage in day) if small else day


# What counts as reached


def _row(rows: Sequence[Row], name: str) -> Row:
    return next(row for row in rows if row["row"] == name)


def _all() -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        failed = [f"{row['row']}: {row['failed']}" for row in rows if row.get("failed")]
        return bool(rows) and not failed, "; ".join(failed) or f"{len(rows)} rows"

    return Goal("every row is measured", judge)


def _kernels_agree(most: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        worst = max((row["error"], row["row"]) for row in rows if "error" in row)
        return worst[0] < most, f"{worst[0]:.1e} ({worst[1]})"

    return Goal(f"kernels within {most:g} of sdpa", judge)


def _fastest() -> Goal:
    """Goal that names the fastest kernel and is always met."""

    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        found: dict[str, tuple[float, str]] = {}
        for row in rows:
            if "ms" in row:
                kernel, shape, _ = row["row"].split(", ")
                found[shape] = min(found.get(shape, (1e9, "")), (row["ms"] / row["tokens"], kernel))
        return True, ", ".join(f"{shape} {kernel}" for shape, (_, kernel) in found.items())

    return Goal("the fastest", judge)


def _within(begins: str, most: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        worst = max(row["error"] for row in rows if row["row"].startswith(begins))
        return worst < most, f"{worst:.1e}"

    return Goal(f"{begins} within {most:g} of the reference", judge)


def _no_further_than_peft(times: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        half = [row for row in rows if "bfloat16" in row["row"]]
        worst = max(row["error"] / row["peft"] for row in half)
        return worst <= times, f"{worst:.2f} times"

    return Goal(f"bfloat16 at most {times:g} times as far off as peft", judge)


def _figure(name: str) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        row = _row(rows, name)
        tokens, share = row["useful_tokens_per_s"], row["share_of_ceiling"]
        return True, f"{tokens:,.0f} tokens/s, {share:.0%} of the ceiling"

    return Goal(name, judge)


def _best() -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        timed = [row for row in rows if "step_s" in row]
        best = min(timed, key=lambda row: row["step_s"])
        plain = _row(rows, "as it is")["step_s"]
        return True, f"{best['row']}, {plain / best['step_s']:.2f} times"

    return Goal("the best", judge)


def _planned(most: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        worst = max(row["grown_of_planned"] for row in rows)
        return worst <= most, f"{worst:.2f} times"

    return Goal(f"a pass takes at most {most:g} times what is planned", judge)


def _times_faster(times: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        ours, peft = (_row(rows, name)["step_s"] for name in ("ours", "peft"))
        return peft >= times * ours, f"{peft / ours:.2f} times"

    return Goal(f"{times:g} times as fast as peft", judge)


def _published_within(seconds: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        row = _row(rows, "publish")
        took = row["written_s"] + row["opened_s"]
        return took < seconds, f"{took:.2f} s"

    return Goal(f"a publication within {seconds:g} s", judge)


def _apart(most: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        worst = max(row["apart_nats"] for row in rows if "apart_nats" in row)
        return worst < most, f"{worst:.1e} nats"

    return Goal(f"logprobs within {most:g} nats", judge)


def _recognised() -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        missed = [row["row"] for row in rows if row.get("recognised") is False]
        return not missed, ", ".join(missed) or "all"

    return Goal("failures of the device are recognised", judge)


def _none_failed() -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        failed = sum(phase["failed"] for phase in rows[0]["phases"].values())
        return failed == 0, f"{failed} failed"

    return Goal("no request fails", judge)


def _slowest_publication(seconds: float) -> Goal:
    def judge(rows: Sequence[Row]) -> tuple[bool, str]:
        slowest = max(one["publish"] for one in rows[0]["published"])
        return slowest < seconds, f"{slowest:.2f} s"

    return Goal(f"a publication takes less than {seconds:g} s", judge)


# Running


def run(stage: Stage, folder: Path) -> Report:
    """Run a stage, and write its report."""
    began = time.monotonic()
    report = Report(stage.name, stage.why, "done", 0.0)
    if stage.needs is not None and not stage.needs.exists():
        report.status = "left out"
        report.told = f"{stage.needs} is missing: {stage.cure}"
    else:
        _carry_out(stage, folder, report, began + 60 * stage.minutes)
    report.seconds = time.monotonic() - began
    (folder / f"{stage.name}.md").write_text(report.markdown())
    draft = folder / f".{stage.name}.json"
    draft.write_text(json.dumps(asdict(report), indent=2) + "\n")
    draft.replace(folder / f"{stage.name}.json")  # whole or not at all: it says what is done
    return report


def _carry_out(stage: Stage, folder: Path, report: Report, until: float) -> None:
    began, path = time.monotonic(), folder / f"{stage.name}.rows.jsonl"
    _keep_measured(path)
    server: subprocess.Popen[bytes] | None = None
    try:
        if stage.beside is not None:
            server = _start(stage.beside, folder / f"{stage.name}.server.log")
            if (wrong := _wait_for(stage.ready, server, until)) is not None:
                report.status = wrong
        for command in stage.commands if report.status == "done" else ():
            typed = command.replace("{rows}", str(path))
            for _ in range(_BREAKS):
                one = _finish(typed, folder / f"{stage.name}.log", until)
                report.commands.append(one)
                if one["status"] != _BROKEN:
                    break
            if report.commands[-1]["status"] is None:
                report.status = "over time"
                break
            if report.commands[-1]["status"] != 0:
                report.status = "failed"  # and the next kernel, say, is tried all the same
    except OSError as error:  # a server that cannot be started
        report.status, report.told = "failed", str(error)
    finally:
        if server is not None:
            _end(server)
            log = (folder / f"{stage.name}.server.log").read_text(errors="replace")
            typed = stage.beside or ""
            report.commands.append(_told(typed, server.poll(), time.monotonic() - began, log))
    report.rows = rows_in(path)
    report.goals = [_judged(goal, report.rows) for goal in stage.goals]
    if report.status == "done" and not all(goal["met"] for goal in report.goals):
        report.status = "missed"


def rows_in(path: Path) -> list[Row]:
    """Read the rows of a file, also of one that was broken off; a single JSON document is one
    row."""
    try:
        text = path.read_text()
    except OSError:
        return []
    with suppress(ValueError):
        whole = json.loads(text)
        return [whole] if isinstance(whole, dict) else []
    found: list[Row] = []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _keep_measured(path: Path) -> None:
    """Drop the failed rows of an earlier run, so that they are tried again."""
    kept = [row for row in rows_in(path) if "row" in row and not row.get("failed")]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def finished(stage: Stage, folder: Path) -> bool:
    """Whether an earlier run has measured the stage."""
    return _earlier(stage, folder).get("status") in ("done", "missed")


def _earlier(stage: Stage, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / f"{stage.name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def summary(day: Sequence[Stage], folder: Path) -> str:
    """Summary of the whole day so far, on one screen."""
    lines: list[str] = []
    for stage in day:
        found = _earlier(stage, folder)
        known = {name: found[name] for name in Report.__dataclass_fields__ if name in found}
        report = Report(**known) if "seconds" in known else None
        lines.append(
            report.line() if report else f"{stage.name:10} to come  ({stage.minutes:g} min)"
        )
    text = "\n".join(lines) + "\n"
    (folder / "summary.txt").write_text(text)
    return text


def _judged(goal: Goal, rows: Sequence[Row]) -> dict[str, Any]:
    try:
        met, found = goal.judge(rows)
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        met, found = False, f"there is no figure ({type(error).__name__}: {error})"
    return {"goal": goal.what, "met": met, "found": found}


def _start(command: str, log: Path) -> subprocess.Popen[bytes]:
    words = shlex.split(command)
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    env = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(
            words, stdout=out, stderr=out, cwd=ROOT, env=env, start_new_session=True
        )


def _finish(command: str, log: Path, until: float) -> dict[str, Any]:
    """Run a command to its end, or until its time is over. `status` None: it was cut off."""
    began = time.monotonic()
    try:
        process = _start(command, log)
    except OSError as error:
        return _told(command, 127, 0.0, str(error))
    try:
        status: int | None = process.wait(max(0.0, until - began))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    return _told(command, status, time.monotonic() - began, log.read_text(errors="replace"))


def _told(command: str, status: int | None, seconds: float, log: str) -> dict[str, Any]:
    return {"command": command, "status": status, "seconds": seconds, "tail": log[-_TAIL:]}


def _wait_for(address: str | None, server: subprocess.Popen[bytes], until: float) -> Status | None:
    """Wait until a server answers; return None, or the stage's outcome if it never does."""
    assert address is not None
    while time.monotonic() < until:
        if server.poll() is not None:
            return "failed"
        try:
            with urllib.request.urlopen(address, timeout=5):
                return None
        except OSError:
            time.sleep(_LOOK_S)
    return "over time"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def parser() -> argparse.ArgumentParser:
    """Command line of the day."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=__doc__)
    made.add_argument("--list", action="store_true", help="name the stages, and end")
    made.add_argument("--only", action="append", help="a stage; repeatable")
    made.add_argument("--again", action="store_true", help="also stages that have been measured")
    made.add_argument("--folder", type=Path, help="of reports and weights (gpu-day)")
    made.add_argument("--device", default="cuda")
    made.add_argument(
        "--rehearse", action="store_true", help="all of it on a CPU with a tiny model"
    )
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run what is left of the day. Returns 1 if a stage failed, took too long or missed a goal."""
    given = parser().parse_args(words)
    usual = "gpu-day/rehearsal" if given.rehearse else "gpu-day"
    folder: Path = (given.folder or Path(usual)).absolute()
    day = stages(folder, "cpu" if given.rehearse else given.device, small=given.rehearse)
    names = [stage.name for stage in day]
    if unknown := sorted(set(given.only or ()) - set(names)):
        print(f"There is no stage {unknown[0]!r}; there are {', '.join(names)}.")
        return 2
    if given.list:
        for stage in day:
            state = "measured" if finished(stage, folder) else ""
            print(f"{stage.name:10}{stage.minutes:4g} min  {state:10}{stage.why}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    well = True
    for stage in day:
        if given.only and stage.name not in given.only:
            continue
        if finished(stage, folder) and not given.again:
            print(f"{stage.name}: measured before, in {folder / stage.name}.md")
            continue
        if given.again:
            (folder / f"{stage.name}.rows.jsonl").unlink(missing_ok=True)
        print(f"{stage.name}: {stage.why}", flush=True)
        report = run(stage, folder)
        well = well and report.status in ("done", "left out")
        summary(day, folder)
        print(report.line(), flush=True)
    print(f"\n{summary(day, folder)}\nReports are in {folder}.")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
