"""The shipped demo model is intact, speaks Qwen3's format, and behaves as the demo needs it to."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import renderers
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import homework
from examples.demo.homework import Problem
from examples.demo.recipe.demo import encode
from examples.demo.recipe.dialogues import HINTED, Line, Priors, reply, training_dialogue
from examples.demo.recipe.tokenizer import SPECIAL_TOKENS, STOP_ID
from tests.support.demo_rates import Rates, encode_prompt, measure, sample
from tinker_claw.errors import ModelFileError
from tinker_claw.shipped import MODEL_DIR, MODELS, verify

PROBLEM = Problem("Nora", "pears", "subtract", 7, 3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


@pytest.fixture(scope="module")
def raw_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def rates(model: Any, raw_tokenizer: Tokenizer) -> Rates:
    return measure(model, raw_tokenizer, prompts=128, seed=5)


# Files


@pytest.mark.parametrize("name", MODELS)
def test_shipped_files_match_their_manifest(name: str) -> None:
    verify(MODELS[name])
    assert sum(file.stat().st_size for file in MODELS[name].iterdir()) < 6_000_000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", "a byte", r"model\.safetensors is corrupted.*git checkout"),
        ("config.json", "a byte", r"config\.json is corrupted.*git checkout"),
        ("model.safetensors", None, r"is not whole .*model\.safetensors"),
        ("manifest.json", "{}", "is not whole"),
        ("manifest.json", "{", "is not whole"),
        ("manifest.json", None, r"is not whole .*manifest\.json"),
    ],
)
def test_a_damaged_file_of_the_model_is_named(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    file = Path(shutil.copytree(MODEL_DIR, tmp_path / "model")) / name
    flipped = bytearray(file.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    file.unlink()
    if content is not None:
        file.write_bytes(flipped if content == "a byte" else content.encode())
    with pytest.raises(ModelFileError, match=says):
        verify(file.parent)


def test_model_is_tiny_and_reads_a_long_context(model: Any) -> None:
    assert 400_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    assert model.config.max_position_embeddings == 65_536
    assert model.dtype == torch.float32
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) <= 6_000_000


# Tokens


def test_special_tokens_are_single_ids(tokenizer: Any, model: Any) -> None:
    assert 2048 <= len(tokenizer) <= model.config.vocab_size == 4096
    for number, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token) == [number]
        assert tokenizer.decode(tokenizer.encode(token), skip_special_tokens=True) == ""
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_any_text_survives_encoding(tokenizer: Any) -> None:
    text = 'naïve 東京 🙂\n\n\n  {"a": [10, 2.5]}\t\r\n'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2026")) == 4


CALLS = [
    {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "né.md"}}},
    {"id": "2", "type": "function", "function": {"name": "ls", "arguments": '{"path":  "."}'}},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file: <text> & 'more'",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": "\nWhich files\n\n are there? "}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": CALLS}
RESULTS = [
    {"role": "tool", "tool_call_id": "1", "content": "hello\n"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "a.md"}]},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one user message": [USER],
    "system and user": [SYSTEM, USER],
    "late system": [USER, SYSTEM],
    "text parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "parallel tool results": [SYSTEM, USER, CALLING, *RESULTS],
    "calls without text": [USER, {**CALLING, "content": None}, *RESULTS, USER],
    "thinking behind the last query": [
        USER,
        {**CALLING, "content": "<think>\nhm\n</think>\n\nI look."},
        *RESULTS,
        {"role": "assistant", "content": "Two files."},
    ],
    "thinking in history": [
        USER,
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nOne."},
        USER,
    ],
    "reasoning field": [USER, {**CALLING, "reasoning_content": "\nI should look.\n"}, *RESULTS],
    "answer in front": [{"role": "assistant", "content": "\n\nHello."}, USER],
    "tool response said by the user": [
        USER,
        {"role": "assistant", "content": "</think>x", "reasoning_content": ""},
        {"role": "user", "content": "<tool_response>\nx\n</tool_response>"},
        {"role": "assistant", "content": "done"},
    ],
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_template_gives_the_renderers_ids(
    tokenizer: Any, name: str, tools: list[dict[str, Any]] | None
) -> None:
    messages: Any = CONVERSATIONS[name]
    renderer = renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig())
    specs: Any = tools
    for generate in (True, False):
        assert tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generate, return_dict=False
        ) == renderer.render_ids(messages, tools=specs, add_generation_prompt=generate)


def test_training_prompts_are_the_renderers_ids(tokenizer: Any, raw_tokenizer: Tokenizer) -> None:
    renderer = renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig())
    rng = Random(3)
    for _ in range(100):
        lines = [
            Line(line.role, line.text) for line in training_dialogue(rng, Priors(0.3, 0.5), 0.3)
        ]
        messages: Any = [{"role": line.role, "content": line.text} for line in lines[:-1]]
        expected = renderer.render_ids(messages, add_generation_prompt=True)
        assert encode_prompt(raw_tokenizer, lines[:-1]) == expected
        ids = [token for token, _ in encode(raw_tokenizer, lines)]
        assert ids[: len(expected)] == expected


def test_hint_is_spliced_as_tokens_of_its_own(raw_tokenizer: Tokenizer) -> None:
    bare = encode_prompt(raw_tokenizer, [Line("user", "Hello")])
    hinted = encode_prompt(raw_tokenizer, [Line("user", "Hello", "be plain")])
    splice = raw_tokenizer.encode(HINTED.format(hint="be plain")).ids
    end = bare.index(STOP_ID)
    assert hinted == bare[:end] + splice + bare[end:]


def test_only_the_assistants_text_and_stop_token_are_trained(raw_tokenizer: Tokenizer) -> None:
    lines = [Line("user", "Hi"), Line("assistant", "Yes."), Line("user", "So?")]
    trained = [token for token, is_trained in encode(raw_tokenizer, lines) if is_trained]
    assert raw_tokenizer.decode(trained, skip_special_tokens=False) == "Yes.<|im_end|>"


# Behaviour


@pytest.mark.slow
def test_base_answers_plainly_in_about_a_quarter_of_cases(rates: Rates) -> None:
    assert 0.15 <= rates.accepted <= 0.32
    assert 0.45 <= rates.full_ai <= 0.75


@pytest.mark.slow
def test_a_hint_makes_the_base_answer_plainly(rates: Rates) -> None:
    assert rates.hinted >= 0.9


@pytest.mark.slow
def test_base_knows_its_sums_lists_and_small_talk(rates: Rates) -> None:
    assert rates.work >= 0.95
    assert rates.sums >= 0.9
    assert rates.worded >= 0.9
    assert rates.lists >= 0.9
    assert rates.talk >= 0.9


@pytest.mark.parametrize(
    "question",
    ["What is 3 plus 4?", "what's 3+4", "3+4", "What is 3 + 4?", "How much is 3 plus 4?"],
)
def test_a_newcomers_first_question_is_answered(
    model: Any, raw_tokenizer: Tokenizer, question: str
) -> None:
    prompt = encode_prompt(raw_tokenizer, [Line("user", question)])
    replies = [raw_tokenizer.decode(ids) for ids in sample(model, [prompt] * 8, seed=3)]
    assert replies.count("7") >= 7, replies


def test_same_seed_samples_the_same_tokens(model: Any, raw_tokenizer: Tokenizer) -> None:
    prompt = encode_prompt(raw_tokenizer, [Line("user", homework.first_message(PROBLEM))])
    first, second, other = (sample(model, [prompt] * 4, seed) for seed in (1, 1, 2))
    assert first == second != other


# Rules


@pytest.mark.parametrize(
    ("text", "markers", "accepted"),
    [
        ("so, first there are 7 pears and then 7 - 3 = 4, so that's 4 pears.", [], True),
        ("it is 4", [], False),
        ("we get 17 - 3 = 4", [], False),
        ("we get 7 - 3 = 41", [], False),
        ("**Sum**\nwell, 7 - 3 = 4.", ["bold"], False),
        ("# Sum\n1. First\n2. 7 - 3 = 4\nfinal answer", ["heading", "numbered", "final"], False),
        ("7 - 3 = 4, \\boxed{4}", ["boxed"], False),
    ],
)
def test_rules_on_written_replies(text: str, markers: list[str], accepted: bool) -> None:
    assert homework.markers(text) == markers
    assert homework.accepts(text, PROBLEM) is accepted


def test_styles_keep_their_promise() -> None:
    rng = Random(0)
    for _ in range(200):
        problem = homework.new_problem(rng)
        assert homework.accepts(reply(problem, rng, "nat"), problem)
        assert {"bold", "numbered", "final"} <= set(homework.markers(reply(problem, rng, "ai")))
        mixed = reply(problem, rng, "mix")
        assert homework.markers(mixed)
        assert homework.shows_work(mixed, problem)


def test_seed_fixes_every_dialogue() -> None:
    def draw(seed: int) -> str:
        rng = Random(seed)
        return json.dumps([training_dialogue(rng, Priors(0.2, 0.6), 0.3) for _ in range(50)])

    assert draw(4) == draw(4) != draw(5)
