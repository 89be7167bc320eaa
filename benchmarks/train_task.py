"""The toy that `train` trains on: words to write, and a reward that likes those of small number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def small_words(completions: list[str], **_: Any) -> list[float]:
    """Per completion, the share of its words w0 … w99."""
    return [_share([word for word in text.split() if word.startswith("w")]) for text in completions]


def make_prompts(count: int, words: int, vocabulary: int, seed: int) -> list[str]:
    """Prompts of so many words, all different."""
    generator = random.Random(seed)
    return [" ".join(f"w{generator.randrange(vocabulary - 2)}" for _ in range(words)) for _ in range(count)]


def write_prompts(prompts: list[str], path: Path) -> None:
    """As JSONL with a column `prompt`."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def _share(words: list[str]) -> float:
    return sum(int(word[1:]) < 100 for word in words) / len(words) if words else 0.0
