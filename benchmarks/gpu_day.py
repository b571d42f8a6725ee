"""`python -m benchmarks.gpu_day`: the first day on a GPU, in stages of at most eight minutes.

What would stop a user first comes first: the tiny preset, four layers with every kernel, the shared
batch at 8B, vLLM, serving while learning. Each stage leaves a report in `--folder`, as JSON and as
Markdown, and a run that is started again goes on behind the stages that have one; those that failed
or took too long are tried again. `docs/owed.md` says why each matters.

Rule: a stage is commands that can also be typed, in processes of their own, so that one that breaks
the device's context or hangs does not end the day. Goals are judged from the figures that the
commands write; nothing is assumed where there is no figure.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

STAGE_S: Final = 480.0
_LOOK_S: Final = 0.5
_ENDS_S: Final = 20.0
"""For a process to end after it was asked to."""
_TAIL: Final = 4000
"""Characters of what a command wrote, in the report."""
ROOT: Final = Path(__file__).parents[1]

Figures = Mapping[str, Any]
"""By name, what the stage's commands wrote."""
Status = Literal["done", "missed", "failed", "over time"]
"""missed: measured, and a goal was not reached."""


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    judge: Callable[[Figures], tuple[bool, str]]
    """Whether it is met, and what was found. A LookupError or TypeError says there is no figure."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    why: str
    commands: tuple[str, ...]
    """As they are typed in the project's folder; {json} is where one writes its figures."""
    goals: tuple[Goal, ...] = ()
    beside: str | None = None
    """A server that runs meanwhile."""
    ready: str | None = None
    """Its address, which answers 200 when it is up."""


@dataclass(slots=True)
class Report:
    stage: str
    why: str
    status: Status
    seconds: float
    commands: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        """The same for people, without the figures that only a program reads."""
        lines = [f"# {self.stage}: {self.status}", "", self.why, "", f"{self.seconds:.0f} s.", ""]
        for goal in self.goals:
            lines.append(f"- [{'x' if goal['met'] else ' '}] {goal['goal']}: {goal['found']}")
        for one in self.commands:
            told = f"exit status {one['status']}" if one["status"] is not None else "cut off"
            lines += ["", f"    {one['command']}", "", f"{told}, {one['seconds']:.0f} s:", ""]
            lines += ["```", one["tail"].strip(), "```"]
        return "\n".join(lines) + "\n"


def stages(folder: Path, device: str = "cuda", *, quick: bool = False) -> tuple[Stage, ...]:
    """The day. `quick`: samples so small that a CPU does the first stage in seconds."""
    train = "python -m benchmarks.training"
    small = " --samples 2 --shared 64 --own 16 --long 0 --repeat 1" if quick else " --repeat 1"
    weights = folder / "random-8b"
    pair = "--only ours --only peft-rows"
    rows = "logits of the loss"
    kernels = tuple(
        Stage(
            f"kernel-{name}",
            f"Four layers at the true widths with attention by {name}, which no CPU has shown.",
            (f"{train} --preset 8b --layers 4 --case shared --only ours --repeat 2 "
             f"--attention {name} --json {{json}}",),
            (_ran(),),
        )
        for name in ("auto", "merged", "flex", "varlen")
    )  # fmt: skip
    vllm = (
        f".venv-vllm/bin/vllm serve {weights} --skip-tokenizer-init --port 8001 --enable-lora "
        "--max-loras 4 --max-cpu-loras 8 --max-lora-rank 32 --logprobs-mode processed_logprobs "
        "--generation-config vllm --enable-prefix-caching --served-model-name base "
        "--max-num-batched-tokens 2048 --max-num-seqs 64 --gpu-memory-utilization 0.35"
    )
    serve = f"python -m benchmarks.serving --model {weights} --shared 8000 --own 500"
    return (
        Stage(
            "tiny",
            "The quickest check that the device computes the same as a CPU.",
            (f"{train} --preset tiny --device {device} --dtype float32{small} {pair} "
             "--json {json}",),
            (_ran(), _errors_below(1e-5)),
        ),
        *kernels,
        Stage(
            "shared",
            f"What prefix trees are for, beside peft with the {rows} alone.",
            (f"{train} --preset 8b --case shared {pair} --repeat 2 --json {{json}}",),
            (_ran(), _times_faster("shared", 3.0), _share_of_ceiling("shared", 0.5)),
        ),
        Stage(
            "unshared",
            f"Packing must pay where nothing is shared, beside peft with the {rows} alone.",
            (f"{train} --preset 8b --case unshared {pair} --repeat 2 --json {{json}}",),
            (_ran(), _times_faster("unshared", 1.0), _share_of_ceiling("unshared", 0.5)),
        ),
        Stage(
            "long",
            "One sample of 32,000 tokens: agents' prompts are that long.",
            (f"{train} --preset 8b --case long --only ours --repeat 2 --json {{json}}",),
            (_ran(), _peak_below("long", 80e9)),
        ),
        Stage(
            "vllm",
            "Versions on a real server: so far it was PyPI's build for CPUs.",
            ("python -m pytest -q --vllm=.venv-vllm tests/local_gpu/sample/test_vllm.py",),
        ),
        Stage(
            "weights",
            "Random weights of 8B for the stages behind (16 GB).",
            (f"python -m benchmarks.serving --preset 8b --folder {weights} --write-only",),
        ),
        Stage(
            "serving",
            "Serving never waits for training: vLLM beside the trainer.",
            (f"{serve} --sampler-urls http://127.0.0.1:8001 --streams 8 --new-tokens 200 "
             "--seconds 20 --steps 2 --context-tokens 32768 --json {json}",),
            (_none_failed(), _published_within(1.0)),
            beside=vllm,
            ready="http://127.0.0.1:8001/health",
        ),
        Stage(
            "embedded",
            "The last resort without vLLM, on the GPU that learns.",
            (f"{serve} --device {device} --streams 4 --new-tokens 48 --seconds 20 --steps 2 "
             "--context-tokens 16384 --json {json}",),
            (_none_failed(),),
        ),
    )  # fmt: skip


# What counts as reached


def _rows(figures: Figures, case: str | None = None) -> list[Mapping[str, Any]]:
    cases: Mapping[str, Any] = figures["cases"]
    return [row for name, rows in cases.items() if case in (None, name) for row in rows]


def _side(figures: Figures, case: str, begins: str) -> Mapping[str, Any]:
    return next(row for row in _rows(figures, case) if row["side"].startswith(begins))


def _ran() -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        failed = [f"{row['side']}: {row['failed']}" for row in _rows(figures) if row["failed"]]
        return not failed, "; ".join(failed) or "all rows"

    return Goal("every row is measured", judge)


def _errors_below(most: float) -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        worst = max(row["gradient_error"] for row in _rows(figures))
        return worst < most, f"{worst:.1e}"

    return Goal(f"gradients within {most:g} of the reference", judge)


def _times_faster(case: str, times: float) -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        ours, peft = (_side(figures, case, s)["useful_tokens_per_s"] for s in ("ours", "peft"))
        return ours >= times * peft, f"{ours / peft:.2f} times ({ours:,.0f} and {peft:,.0f})"

    return Goal(f"{times:g} times the useful tokens/s of peft with loss rows only", judge)


def _share_of_ceiling(case: str, share: float) -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        row = _side(figures, case, "ours")
        found = row["flops"] / row["median_s"] / figures["ceiling"]
        return found >= share, f"{found:.0%}"

    return Goal(f"{share:.0%} of the measured ceiling on executed operations", judge)


def _peak_below(case: str, most: float) -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        peak = _side(figures, case, "ours")["peak_bytes"]
        return peak < most, f"{peak / 1e9:.1f} GB"

    return Goal(f"memory below {most / 1e9:.0f} GB, weights included", judge)


def _none_failed() -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        failed = sum(phase["failed"] for phase in figures["phases"].values())
        return failed == 0, f"{failed} failed"

    return Goal("no request fails", judge)


def _published_within(seconds: float) -> Goal:
    def judge(figures: Figures) -> tuple[bool, str]:
        slowest = max(one["publish"] for one in figures["published"])
        return slowest < seconds, f"{slowest:.2f} s"

    return Goal(f"a publication takes less than {seconds:g} s", judge)


# Running


def run(stage: Stage, folder: Path, *, seconds: float = STAGE_S) -> Report:
    """Carry out a stage, and leave its report."""
    began = time.monotonic()
    until = began + seconds
    figures = folder / f"{stage.name}.figures.json"
    figures.unlink(missing_ok=True)
    report = Report(stage.name, stage.why, "done", 0.0)
    server: subprocess.Popen[bytes] | None = None
    try:
        if stage.beside is not None:
            server = _start(stage.beside, folder / f"{stage.name}.server.log")
            if (wrong := _wait_for(stage.ready, server, until)) is not None:
                report.status = wrong
        for command in stage.commands if report.status == "done" else ():
            typed = command.replace("{json}", str(figures))
            one = _finish(typed, folder / f"{stage.name}.log", until)
            report.commands.append(one)
            if one["status"] != 0:
                report.status = "over time" if one["status"] is None else "failed"
                break
    finally:
        if server is not None:
            _end(server)
            log = (folder / f"{stage.name}.server.log").read_text(errors="replace")
            typed = stage.beside or ""
            report.commands.append(_told(typed, server.poll(), time.monotonic() - began, log))
    if figures.exists():
        report.figures = json.loads(figures.read_text())
    if report.status == "done":
        report.goals = [_judged(goal, report.figures) for goal in stage.goals]
        if not all(goal["met"] for goal in report.goals):
            report.status = "missed"
    report.seconds = time.monotonic() - began
    (folder / f"{stage.name}.md").write_text(report.markdown())
    draft = folder / f".{stage.name}.json"
    draft.write_text(json.dumps(asdict(report), indent=2) + "\n")
    draft.replace(folder / f"{stage.name}.json")  # whole or not at all: it says what is done
    return report


def finished(stage: Stage, folder: Path) -> bool:
    """Whether an earlier run has measured it."""
    try:
        status = json.loads((folder / f"{stage.name}.json").read_text())["status"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return status in ("done", "missed")


def _judged(goal: Goal, figures: Figures) -> dict[str, Any]:
    try:
        met, found = goal.judge(figures)
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
    """Run it to its end, or until its time is over. `status` None: it was cut off."""
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
    """None: it is up."""
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
    """With all that it has started."""
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
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=__doc__)
    made.add_argument("--list", action="store_true", help="name the stages, and end")
    made.add_argument("--only", action="append", help="a stage; repeatable")
    made.add_argument("--again", action="store_true", help="also stages that have been measured")
    made.add_argument("--folder", type=Path, default=Path("gpu-day"), help="of reports and weights")
    made.add_argument("--device", default="cuda", help="cpu shows that the script works")
    made.add_argument("--quick", action="store_true", help="tiny samples in the first stage")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run what is left of the day. 1: a stage failed or missed a goal."""
    arguments = parser().parse_args(words)
    folder: Path = arguments.folder.absolute()
    day = stages(folder, arguments.device, quick=arguments.quick)
    names = [stage.name for stage in day]
    if unknown := sorted(set(arguments.only or ()) - set(names)):
        print(f"There is no stage {unknown[0]!r}; there are {', '.join(names)}.")
        return 2
    if arguments.list:
        for stage in day:
            state = "measured" if finished(stage, folder) else ""
            print(f"{stage.name:16}{state:10}{stage.why}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    well = True
    for stage in day:
        if arguments.only and stage.name not in arguments.only:
            continue
        if finished(stage, folder) and not arguments.again:
            print(f"{stage.name}: measured before, in {folder / stage.name}.md")
            continue
        print(f"{stage.name}: {stage.why}", flush=True)
        report = run(stage, folder)
        well = well and report.status == "done"
        print(f"{stage.name}: {report.status}, {folder / stage.name}.md", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
