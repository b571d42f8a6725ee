"""Agents that never pause: they must be answered whatever else goes on."""

from __future__ import annotations

import threading

import httpx

from tests.support.processes import Running
from tests.support.talk import HELLO


class Callers:
    """Agents that ask without a pause, from threads of their own, and count the answers."""

    def __init__(self, running: Running, count: int) -> None:
        self.answers: list[int] = []
        self._url = f"{running.url}/chat/completions"
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        headers = {"X-Session-Id": f"caller-{number}", "X-Turn-Type": "side"}
        body = {"model": "demo", "messages": [HELLO], "max_tokens": 12}
        with httpx.Client(timeout=180, headers=headers) as client:
            while not self._ended.is_set():
                answer = client.post(self._url, json=body)
                text = (
                    answer.json()["choices"][0]["message"]["content"] if answer.is_success else ""
                )
                self.answers.append(answer.status_code if text else 0)
