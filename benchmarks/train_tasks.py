"""What trainers are compared on: a model in a folder, prompts, and a reward that every group varies in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_fast.policy.load import resolve_source

from .models import Architecture, make_policy, make_tokenizer

WORDS = Architecture(
    "words",
    "llama",
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    },
)


@dataclass(frozen=True)
class Task:
    """A model, its prompts and its reward."""

    model: Path  # a folder that `from_pretrained` takes
    prompts: tuple[str, ...]
    reward: Callable[..., list[float]]  # a module's function: our trainer is given its name
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig
    lora_options: dict[str, Any] = field(default_factory=dict)  # the same, besides, for LoRA
    lora_rank: int = 8


def save_model(
    folder: Path, architecture: Architecture = WORDS, dtype: str = "float32", seed: int = 0
) -> None:
    """Random weights and a tokenizer of words w0, w1, …, <pad> and <eos>."""
    tokenizer = make_tokenizer(architecture.vocabulary)
    cpu = torch.device("cpu")
    policy = make_policy(architecture, dtype=dtype, device=cpu, seed=seed, tokenizer=tokenizer)
    policy.save_pretrained(folder)


def small_words(completions: list[str], **_: Any) -> list[float]:
    """Likes words of small number, of those that `WORDS` knows."""
    return [
        sum(1.0 - int(word[1:]) / WORDS.vocabulary for word in text.split() if word.startswith("w")) / 8
        for text in completions
    ]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Likes digits: every completion scores, so that every group has spread."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def words_task(folder: Path) -> Task:
    """The model that `save_model` saved there, 16 completions of up to 8 words a generation."""
    prompts = tuple(f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4) for i in range(48))
    options = {"learning_rate": 3e-3, "max_completion_length": 8}
    return Task(folder, prompts, small_words, options, lora_rank=4)


def sums_task(model: str) -> Task:
    """A language model on `a + b =`, 8 completions of up to 8 tokens a generation: a second or two a step.

    Args:
        model: a folder with safetensors, or `package:NAME` of a Python package that ships one as GGUF.
    """
    prompts = tuple(f"{3 + 5 * i % 41} + {2 + 7 * i % 37} =" for i in range(48))
    options = {"learning_rate": 2e-5, "max_completion_length": 8, "per_device_train_batch_size": 2}
    return Task(Path(resolve_source(model)), prompts, share_of_digits, options, {"learning_rate": 2e-4})


def random_task(
    folder: Path, architecture: Architecture, dtype: str, seed: int, *, prompts: int, words: int
) -> Task:
    """A random model, made in the folder, and different prompts of so many words, a token each."""
    save_model(folder, architecture, dtype=dtype, seed=seed)
    draw = random.Random(seed).randrange
    return Task(
        folder,
        tuple(
            " ".join(f"w{draw(architecture.vocabulary - 2)}" for _ in range(words)) for _ in range(prompts)
        ),
        share_of_digits,
    )
