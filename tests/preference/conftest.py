"""Runs on toy data that take seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_fast.config.schema import TrainConfig

WORDS = [f"w{i}" for i in range(2, 24)]


def phrase(draw: random.Random, words: list[str], length: int | None = None) -> str:
    return " ".join(draw.choice(words) for _ in range(length or draw.randint(1, 5)))


@pytest.fixture
def make_run(toy: dict[str, Any], tmp_path: Path, seed: int) -> Callable[..., TrainConfig]:
    """Runs in seconds: words from the first half of the vocabulary are better than the others."""
    draw = random.Random(seed)
    good, bad = WORDS[:11], WORDS[11:]

    def rows(algorithm: str, kto: bool, count: int) -> list[dict[str, Any]]:
        prompts = [phrase(draw, WORDS) for _ in range(count)]
        if algorithm == "rank":
            return [
                {"prompt": prompt, "group": group(), "group_type": f"type {len(prompt) % 2}"}
                for prompt in prompts
            ]
        made = []
        for prompt in prompts:
            label, n = draw.random() < 0.5, draw.randint(1, 5)
            if kto:
                row = {"completion": phrase(draw, good if label else bad), "label": label}
            else:  # of equal length: summed log-probabilities compare words, not lengths
                row = {"chosen": phrase(draw, good, n), "rejected": phrase(draw, bad, n)}
            made.append({"prompt": prompt, "quality": draw.random(), **row})
        return made

    def group() -> list[dict[str, Any]]:
        """Graded by the number of good words, of three; ragged, often with ties."""
        made: dict[str, int] = {}
        for _ in range(draw.randint(2, 6)):
            n = draw.randint(0, 3)
            text = " ".join(draw.choice(good) if i < n else draw.choice(bad) for i in range(3))
            made[text] = n
        while len(made) < 2:
            made[phrase(draw, bad)] = 0
        return [{"response": text, "score": grade} for text, grade in made.items()]

    def write(name: str, content: list[dict[str, Any]]) -> dict[str, str]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return {"source": str(path)}

    def make(algorithm: str, preference: dict[str, Any], *, size: int = 64, **changes: Any) -> TrainConfig:
        kto = preference.get("loss", {}).get("loss_type") == "kto"
        common = {name: toy[name] for name in ("model", "optimizer", "logging")}
        return TrainConfig(
            **{
                **common,
                "algorithm": algorithm,
                "output_dir": str(tmp_path / "run"),
                "max_steps": 4,
                "prompts_per_step": 8,
                "micro_batch_tokens": 10_000,
                "seed": seed % 1000,
                "dataset": write("train", rows(algorithm, kto, size)),
                "evaluation": {"dataset": write("held_out", rows(algorithm, False, 80))},
                "preference": preference,
                **changes,
            }
        )

    return make
