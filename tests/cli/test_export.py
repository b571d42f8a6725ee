"""Exports: turns unchanged, and weights that sample as the gateway's do."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from local_gpu.config import LocalConfig
from local_gpu.model.export import export_merged
from local_gpu.trainer import LocalTrainer
from tests.support.backends import tiny_model
from tests.support.stories import SECRET, every_state, run
from tinker_claw.cli import main
from tinker_claw.errors import BackendError
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import from_turn
from tinker_claw.policy import Sampler
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import Adam, Datum, LossPass

PROMPTS = ((1, 5, 9, 33, 2, 60, 7), (40, 41, 42), (12, 3, 12, 3, 12))


@dataclass
class Trained:
    data: Path
    sampler: Sampler
    """Sampler of version 1, after two steps."""
    model: str


@pytest.fixture
async def trained(tmp_path: Path) -> AsyncIterator[Trained]:
    """A run of the demo model whose adapter has learned something."""
    data, model = tmp_path / "data", str(MODEL_DIR)
    trainer = await LocalTrainer.start(LocalConfig(model=model, root=data, rank=4, threads=1))
    ledger = Ledger(data)
    ledger.bind({"model": "demo", "method": "combine", "backend": "local", "lora_rank": "4"})
    state, first = await trainer.save_state("start"), await trainer.publish()
    version = ledger.versions.add_first(state_ref=state, sampler_ref=first.ref)
    passes = [LossPass("cross_entropy", (Datum((1, 2, 3, 4), 1, weights=((1.0,),) * 3),))]
    for _ in range(2):
        await trainer.train_step(passes, Adam(learning_rate=0.02))
    sampler = await trainer.publish()
    ledger.steps.commit(
        ledger.steps.begin(0, []),
        version,
        state_ref=await trainer.save_state("one"),
        sampler_ref=sampler.ref,
        metrics={},
    )
    ledger.close()
    yield Trained(data, sampler, model)
    await trainer.aclose()


def logprobs(model: Any, tokens: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    chosen = torch.tensor(tokens[1:])[:, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()


async def agree(model: Any, sampler: Sampler) -> None:
    for prompt in PROMPTS:
        wanted = (await sampler.logprobs(prompt, start=1)).logprobs
        assert logprobs(model, prompt) == pytest.approx(list(wanted), abs=2e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
async def test_exported_adapter_and_merged_model_score_like_the_version_that_served(
    trained: Trained, tmp_path: Path
) -> None:
    flags = ("--model-name", "demo", "--backend", "local")
    adapter, merged, first = (tmp_path / name for name in ("adapter", "merged", "first"))
    merged.mkdir()  # an empty folder is as good as none
    done = run("export", "--adapter", str(adapter), directory=trained.data)
    assert done.stdout == f"The adapter of v1 is in {adapter}.\n", done.stderr
    base: Any = AutoModelForCausalLM.from_pretrained(trained.model)
    await agree(PeftModel.from_pretrained(base, str(adapter)).eval(), trained.sampler)

    done = run("export", "--merged", str(merged), directory=trained.data)
    assert done.returncode == 0, done.stderr
    model: Any = AutoModelForCausalLM.from_pretrained(merged)
    await agree(model.eval(), trained.sampler)
    ours, theirs = (AutoTokenizer.from_pretrained(at) for at in (trained.model, merged))
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)

    done = run("export", "--merged", str(first), "--version", "v0", *flags, directory=trained.data)
    assert done.returncode == 0, done.stderr
    untouched: Any = AutoModelForCausalLM.from_pretrained(first)
    plain: Any = AutoModelForCausalLM.from_pretrained(trained.model)
    assert logprobs(untouched.eval(), PROMPTS[0]) == logprobs(plain.eval(), PROMPTS[0])

    again = run("export", "--adapter", str(adapter), *flags, directory=trained.data)
    assert again.returncode == 2
    assert "exists and is not an empty folder" in again.stderr
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


async def test_a_model_that_cannot_be_merged_or_written_is_a_sentence_and_leaves_nothing(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = trained.data / "adapters" / trained.sampler.ref
    with pytest.raises(BackendError, match=r"merged on device 'meta'.*--device cpu"):
        export_merged(trained.model, adapter, tmp_path / "out", device="meta")
    other = str(tiny_model(tmp_path / "other"))
    with pytest.raises(BackendError, match="trained on another base model"):
        export_merged(other, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    home, (soft, hard) = tmp_path / "home", resource.getrlimit(resource.RLIMIT_FSIZE)
    flags = ("--model-name", "demo", "--backend", "local", "--data-dir", str(trained.data))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        assert main.main(["export", "--merged", str(home / "out"), *flags]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "home/out cannot be written: " in capsys.readouterr().err
    assert list(home.iterdir()) == []


async def test_version_that_is_not_there_any_more_is_named_with_those_that_are(
    trained: Trained, tmp_path: Path
) -> None:
    flags = ("--model-name", "demo", "--backend", "local")
    (gone,) = (p for p in (trained.data / "states").iterdir() if p.name.endswith("start"))
    gone.rename(tmp_path / "elsewhere")
    (one,) = [
        json.loads(line)
        for line in run("versions", "--json", directory=trained.data).stdout.splitlines()
        if json.loads(line)["id"] == 0
    ]
    assert (one["state"], one["sampler"]) == (False, True)
    refused = run("rollback", "v0", *flags, directory=trained.data)
    assert refused.returncode == 2
    assert "v0 cannot be used: its state is deleted" in refused.stderr
    assert run("pin", "v0", *flags, directory=trained.data).returncode == 0, "it can answer"
    home = run("export", "--adapter", str(tmp_path / "pinned"), directory=trained.data)
    assert home.stdout.startswith("The adapter of v0 is in "), "the version that answers"
    refused = run("rollback", "v7", *flags, directory=trained.data)
    assert "there is no v7; possible: v1" in refused.stderr
    (tmp_path / "elsewhere").rename(gone)
    done = run("rollback", "v0", *flags, directory=trained.data)
    assert done.stdout.startswith("v2, with the weights of v0, will answer when the gateway")
    shown = run("versions", directory=trained.data).stdout.splitlines()
    assert shown[2].endswith("left behind")
    assert shown[3].endswith("serving"), "the pin has ended"


def test_turns_are_written_whole_one_a_line(tmp_path: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "turns.jsonl"
    turns = every_state(data)
    ledger = Ledger(data)
    ledger.forget(from_turn(turns.pop("expired")))
    ledger.close()
    done = run("export", "--jsonl", str(file), directory=data)
    records = {json.loads(line)["id"]: json.loads(line) for line in file.read_text().splitlines()}
    assert done.stdout == f"{len(records)} turns are in {file}.\n", done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert records.keys() == set(turns.values())
    record = records[turns["trained"]]
    assert record["reply_text"] == f"{SECRET} reply"
    assert record["next_state"]["text"] == f"{SECRET} answer"
    assert record["hint_texts"] == [f"{SECRET} hint"]
    assert [rating["text"] for rating in record["feedback"]] == [f"{SECRET} end"]
    assert (record["state"], record["verdict"], record["trained_in_step"]) == ("trained", 1, 1)
    assert "tokens" not in record
    again = run("export", "--jsonl", str(file), directory=data)
    assert (again.returncode, "exists and is not an empty" in again.stderr) == (2, True)
    full = run("export", "--jsonl", "-", "--tokens", directory=data).stdout
    first = json.loads(full.splitlines()[0])
    assert (first["prompt"], first["tokens"]) == ([1, 2, 3, 4], [5, 151_000, 7])
