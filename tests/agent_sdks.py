"""Agent frameworks from PyPI, installed once into an environment of their own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from tests.openclaw import CACHE

PACKAGES = ("pydantic-ai-slim[openai]==2.68.0", "openai-agents==0.24.0")

PROGRAMS = {
    "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none"))
agent = Agent(model)

@agent.tool_plain
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

print(agent.run_sync("What is 3 plus 4?").output)
""",
    "openai-agents": """
from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled

set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

client = AsyncOpenAI(base_url=URL, api_key="none")
model = OpenAIChatCompletionsModel(model="demo", openai_client=client)
agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
print(Runner.run_sync(agent, "What is 3 plus 4?").final_output)
""",
}
"""Each asks a question whose answer takes a call of a tool, and prints the answer."""


def install() -> Path:
    """The interpreter that has them; about a minute the first time."""
    folder = CACHE / "-".join(["agents", *(p.partition("==")[2] for p in PACKAGES)])
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (folder / "installed").exists():
            for command in (
                (sys.executable, "-m", "venv", "--clear", str(folder / "venv")),
                (str(python), "-m", "pip", "install", "-q", *PACKAGES),
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=900)
            (folder / "installed").touch()
    return python


def run(name: str, base_url: str) -> str:
    """What the program of that name prints, asked over the gateway at `base_url`."""
    program = f"URL = {base_url!r}\n{PROGRAMS[name]}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(install()), "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
