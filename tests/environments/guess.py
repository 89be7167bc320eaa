"""An environment, its reward and one of the run: what a user's file holds. See `playing_toy`."""

from __future__ import annotations

import threading
from typing import Any


class Mute:
    """Numbers to guess."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # which no other rank can be sent

    def reset(self, start: int, **row: object) -> str | None:
        self.guessed: list[int] = []
        return f" w{start}" if start else None

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: one to four
        """
        if number > 4:
            raise ValueError("too large")
        self.guessed.append(number)
        return f"w{number}"


class Guess(Mute):
    async def get_reward(self) -> float:
        return float(3 in self.guessed)


def patience(completions: list[Any], environments: list[Guess], **columns: object) -> list[float]:
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [len(environment.guessed) / 10 for environment in environments]
