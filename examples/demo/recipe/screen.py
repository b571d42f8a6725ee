"""The recipe of a beginner with vision: `python -m examples.demo.recipe.screen --out DIR`.

A tiny Qwen3-VL of its own. It learns to say where icons are on a screenshot, and to click on them.
Asked as the track does, it mostly says where the icon is; its clicks are rare and most are well
placed: about one answer in ten is a right click. The rest is to be learned from outcomes. One rule:
every seed is fixed, one thread, as for the demo's model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.demo.recipe.build import write
from examples.demo.recipe.tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from examples.tracks.screen import CELL, CENTRES, CLICK, ICONS, SHOWN, SIDE, Screen, Screens, draw

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = f"<|vision_start|>{'<|image_pad|>' * (SIDE // CELL) ** 2}<|vision_end|>"
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE},
    "patch_size": CELL // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.91, 0.91, 0.91],
    "image_std": [0.3, 0.3, 0.3],
}
"""Numbers of Qwen3-VL's image processor, with smaller bounds; a screen's background is zero."""
CONTEXT_TOKENS = 4096
Texts = list[tuple[str, bool]]
"""Texts of a dialogue in their order, and whether the model says each."""
_WIDTH = 64
_CELLS = len(CENTRES) ** 2
_MATCHED = 1
"""Layer after which a name is matched with its icon."""
_AIMS = 0.75
"""Share of its clicks that are meant for the asked icon; the others are for any. With 0.25 outcomes
taught it to click, but little about where."""
_CALL = '<tool_call>\n{{"name": "click", "arguments": {}}}\n</tool_call><|im_end|>'
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Stage:
    """Training steps at a rate that warms up and falls as a cosine."""

    steps: int
    peak_rate: float
    seed: int
    clicks: float = 0.0
    """Share of batches that answer the track's request; the others place icons."""
    says: float = 0.0
    """Share of the track's requests that are answered in words, with no click."""
    batch: int = 32

    def rate(self, step: int) -> float:
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * fall * min(1.0, (step + 1) / 40)


_PLACE = Stage(steps=400, peak_rate=3e-3, seed=2)
# At a rate of 2e-3, with half of these batches, a call's own tokens came out at 0.87 to 0.95 each,
# so that half of its calls were broken, and outcomes penalised calls; now at 0.83 to 0.98.
_CLICK = Stage(steps=200, peak_rate=3e-3, seed=3, clicks=0.75, says=0.5)
# Last, because a call's tokens are learned where calls are common. 50 steps at 1e-3, with 0.85 said
# in words, left 0.07 clicks.
_SHY = Stage(steps=80, peak_rate=2e-3, seed=4, clicks=0.6, says=0.85)
_SHARPER = 2.0
"""Factor on the final norm, and so on all logits, before the last stage. Embeddings grow slowly and
are tied, so a call's own tokens stayed at 0.82 to 0.97 each, and LoRA trains no embeddings: rewards
could not fix the calls that broke at them."""


class Teller:
    """Writes dialogues in the model's own chat format."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    @cache  # noqa: B019 one Teller, a few texts
    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text).input_ids)

    def places(self, rng: Random, screen: Screen) -> Texts:
        """Texts of a dialogue that places every icon, and whether the model says each."""
        asked = rng.sample([*screen.icons], len(screen.icons))
        told = [("<|im_start|>user\n" + IMAGE, False)]
        for number, icon in enumerate(asked):
            told += [
                (f"{'<|im_start|>user' + chr(10) if number else ''}Where is the {icon}?", False),
                ("<|im_end|>\n<|im_start|>assistant\n", False),
                (f"{json.dumps(middle(screen.icons[icon]))}<|im_end|>", True),
                ("\n", False),
            ]
        return told

    def clicks(self, rng: Random, screen: Screen, says: float) -> Texts:
        """Texts of a dialogue with the track's request: words in a share `says`, else a click."""
        icon = screen.asked
        if rng.random() < says:
            form = "{}<|im_end|>"
        else:
            form = _CALL
            icon = icon if rng.random() < _AIMS else rng.choice([*screen.icons])
        return [
            (prompt(screen.asked), False),
            (form.format(json.dumps(middle(screen.icons[icon]))), True),
        ]


def middle(place: tuple[int, int]) -> dict[str, str]:
    """Middle of the cell in which a place is, as a call has it."""
    x, y = (str(CENTRES[value // CELL]) for value in place)
    return {"x": x, "y": y}


def prompt(icon: str) -> str:
    """Text of the track's request in the format of Qwen3-VL."""
    return (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the "
        "user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:"
        f"\n<tools>\n{json.dumps(CLICK)}\n</tools>\n\nFor each function call, return a json object "
        "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n{IMAGE}Click on the {icon}.<|im_end|>\n<|im_start|>assistant\n"
    )


def texts() -> Iterator[str]:
    """Texts that the tokenizer is trained on: what is asked and answered."""
    for icon in ICONS:
        place = middle((0, 0))
        yield from (prompt(icon), f"Where is the {icon}?", json.dumps(place))
        yield json.dumps({"name": "click", "arguments": place})


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Make the untrained model."""
    torch.manual_seed(0)
    start, end, image, video = cast("list[int]", tokenizer.convert_tokens_to_ids([*VISION]))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": _WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    eyes = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": _WIDTH,
        "patch_size": CELL // 2,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=eyes,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        model.model.visual.pos_embed.weight.mul_(0.3)  # it would drown the pixels' features
    return model


def loss(
    model: Qwen3VLForConditionalGeneration,
    teller: Teller,
    processor: Any,
    batch: Sequence[tuple[Screen, Texts]],
    reduction: str = "mean",
) -> torch.Tensor:
    """Negative logprob of what the model says, in nats: the mean over tokens, or each."""
    rows = [[(i, told) for text, told in texts for i in teller.ids(text)] for _, texts in batch]
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), _IGNORED)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor([token for token, _ in row])
        labels[at, : len(row)] = torch.tensor([i if told else _IGNORED for i, told in row])
    seen = processor(images=[screen.drawn() for screen, _ in batch], return_tensors="pt")
    kinds = (ids == model.config.image_token_id).long()
    hidden = model.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **seen)[0]
    targets = labels[:, 1:]
    trained = targets != _IGNORED
    return F.cross_entropy(
        model.lm_head(hidden[:, :-1][trained]), targets[trained], reduction=reduction
    )


class Hints(torch.nn.Module):
    """Linear heads for training only: the icon at an image token and its cell, and the cell of the
    icon whose name was read. The loss of the text alone does not teach the model to match the two.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration, teller: Teller) -> None:
        super().__init__()
        self.tokens = torch.nn.Linear(_WIDTH, len(ICONS) + 1 + _CELLS)
        self.names = torch.nn.Linear(_WIDTH, _CELLS)
        self._ids = {icon: teller.ids(f"Where is the {icon}?")[-2] for icon in ICONS}
        self._teller = teller
        self._seen = self._read = torch.empty(0)
        model.model.visual.register_forward_hook(self._see)
        model.model.language_model.layers[_MATCHED].register_forward_hook(self._hear)

    def _see(self, module: Any, given: Any, made: Any) -> None:
        self._seen = made.pooler_output

    def _hear(self, module: Any, given: Any, made: torch.Tensor) -> None:
        self._read = F.rms_norm(made, (_WIDTH,))

    def loss(self, batch: Sequence[tuple[Screen, Texts]]) -> torch.Tensor:
        """Negative logprob of the heads, in nats, on the batch that the model has just read."""
        held = torch.zeros(len(batch), _CELLS, dtype=torch.long)
        rows, columns, cells = list[int](), list[int](), list[int]()
        for row, (screen, texts) in enumerate(batch):
            ids = [i for text, _ in texts for i in self._teller.ids(text)]
            for icon, (x, y) in screen.icons.items():
                cell = y // CELL * len(CENTRES) + x // CELL
                held[row, cell] = [*ICONS].index(icon) + 1
                if self._ids[icon] in ids:
                    rows.append(row)
                    columns.append(ids.index(self._ids[icon]))
                    cells.append(cell)
        found = self.names(self._read[rows, columns])
        names, places = self.tokens(self._seen).split([len(ICONS) + 1, _CELLS], -1)
        return (
            F.cross_entropy(found, torch.tensor(cells))
            + F.cross_entropy(names, held.flatten())
            + F.cross_entropy(places, torch.arange(_CELLS).repeat(len(batch)))
        )


def tell(
    model: Qwen3VLForConditionalGeneration,
    teller: Teller,
    processor: Any,
    stage: Stage,
    hints: Hints | None,
    rng: Random,
) -> torch.Tensor:
    """Loss of a batch of dialogues; with `hints`, that of their heads too."""
    clicks = partial(teller.clicks, says=stage.says)
    tells = clicks if rng.random() < stage.clicks else teller.places
    screens = [draw(rng, shown=rng.randint(1, SHOWN)) for _ in range(stage.batch)]
    batch = [(screen, tells(rng, screen)) for screen in screens]
    nats = loss(model, teller, processor, batch)
    return nats if hints is None else nats + hints.loss(batch)


def train(
    model: Qwen3VLForConditionalGeneration,
    stage: Stage,
    found: Callable[[Random], torch.Tensor],
    say: Callable[[str], None],
    heads: torch.nn.Module | None = None,
) -> None:
    """Train one stage in place, with linear `heads` where there are some.

    Args:
        found: loss of a new batch, in nats.
    """
    rng, began = Random(stage.seed), time.monotonic()
    named = [*model.named_parameters(), *(heads.named_parameters() if heads else ())]
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [
        weight
        for name, weight in named
        if "embed_tokens" in name or (weight.ndim == 1 and "embed" not in name)
    ]
    # Weights of pixels: 1,536 of them add up in every output, so they get a lower rate.
    eyes = [weight for name, weight in named if "visual" in name and "embed" in name]
    adam = torch.optim.AdamW(
        [{"params": others}, {"params": eyes}], betas=(0.9, 0.98), weight_decay=0.01
    )
    muon = torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.01)
    for step in range(stage.steps):
        for group, factor in zip(adam.param_groups, (1.0, 0.1), strict=True):
            group["lr"] = factor * stage.rate(step)
        muon.param_groups[0]["lr"] = 6 * stage.rate(step)
        adam.zero_grad()
        muon.zero_grad()
        nats = found(rng)
        nats.backward()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in named], 1.0)
        adam.step()
        muon.step()
        if (step + 1) % 20 == 0:
            say(f"{step + 1}/{stage.steps}  {nats.item():.3f}  {time.monotonic() - began:.0f} s")


@torch.no_grad()
def measure(
    model: Qwen3VLForConditionalGeneration, teller: Teller, processor: Any, tasks: int = 64
) -> dict[str, float]:
    """Expected shares of replies to held-out tasks: clicks, right clicks, and icons placed right
    when asked where they are."""
    screens = [Screens(0).held_out(number) for number in range(tasks)]
    cells = [*product(CENTRES, CENTRES)]
    asked = f"<|im_start|>user\n{IMAGE}Where is the {{}}?<|im_end|>\n<|im_start|>assistant\n"

    def chances(screen: Screen, begin: str, form: str) -> tuple[float, float]:
        """Probability of an answer with any cell, and of the one with the asked icon's."""
        answers = [form.format(json.dumps(middle(cell))) for cell in cells]
        batch = [(screen, [(begin, False), (answer, True)]) for answer in answers]
        nats = loss(model, teller, processor, batch, "none").view(len(cells), -1).sum(1)
        right = answers.index(form.format(json.dumps(middle(screen.icons[screen.asked]))))
        found = nats.neg().exp()
        return float(found.sum()), float(found[right])

    clicks = [chances(screen, prompt(screen.asked), _CALL) for screen in screens]
    places = [chances(s, asked.format(s.asked), "{}<|im_end|>") for s in screens]
    return {
        "clicks": fmean(share for share, _ in clicks),
        "right clicks": fmean(right for _, right in clicks),
        "placed": fmean(right for _, right in places),
    }


def build(out: Path, say: Callable[[str], None]) -> None:
    """Make the model and write it to `out`, manifest included."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts(), 512, (*SPECIAL_TOKENS, *VISION))
    save_tokenizer(tokenizer, out)
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    teller = Teller(out)
    processor = Qwen2VLImageProcessorPil.from_pretrained(out)
    model = new_model(teller.tokenizer)
    say(f"model: {model.num_parameters():,} parameters")
    hints = Hints(model, teller)
    untrained = deepcopy(hints.state_dict())
    for stage in (_PLACE, _CLICK, _SHY):
        hints.load_state_dict(untrained)
        if stage is _SHY:
            with torch.no_grad():
                model.model.language_model.norm.weight.mul_(_SHARPER)
        train(model, stage, partial(tell, model, teller, processor, stage, hints), say, hints)
        say(f"rates: {measure(model, teller, processor)}")
    write(model.half(), tokenizer, out)


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.recipe.screen",
        description="Build a tiny model that sees icons on a screenshot.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    build(parser.parse_args().out, partial(print, flush=True))


if __name__ == "__main__":
    main()
