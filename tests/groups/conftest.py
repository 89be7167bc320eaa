from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from grpo_fast.config.groups import CriterionConfig, GroupConfig
from grpo_fast.data import Prompt
from grpo_fast.groups.criteria import Distance, prompt_values, weighted_distance


def prompt_distance(prompts: Sequence[Prompt], config: GroupConfig) -> Distance:
    criteria = config.criteria or [CriterionConfig(by="embedding")]
    return weighted_distance([(item.weight, prompt_values(prompts, item.by, config)) for item in criteria])


@pytest.fixture
def make_prompts(seed: int) -> Callable[..., list[Prompt]]:
    """Random prompts of a few topics; rows have gaps, as after filtering."""

    def make(count: int, topics: int = 4) -> list[Prompt]:
        rng = random.Random(seed)
        prompts = []
        for place in range(count):
            topic = rng.randrange(topics)
            words = [100 * (topic + 1) + rng.randrange(8) for _ in range(rng.randrange(4, 12))]
            text = " ".join(f"w{word}" for word in words)
            columns = {"topic": f"t{topic}", "level": rng.random(), "same": 1.0}
            prompts.append(Prompt(3 * place + 1, text, tuple(words), columns))
        return prompts

    return make


@pytest.fixture
def write_function(tmp_path: Path) -> Callable[[str, str], str]:
    """A file with a function of one argument that returns `body`; gives `path/to/file.py:function`."""

    def write(argument: str, body: str) -> str:
        file = tmp_path / "mine.py"
        file.write_text(f"def mine({argument}):\n    return {body}\n")
        return f"{file}:mine"

    return write
