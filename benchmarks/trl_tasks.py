"""What the three GRPO trainers are compared on: a random model of 64 words, or any model on sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from grpo_fast.policy.load import resolve_source

VOCABULARY = 64


@dataclass(frozen=True)
class Task:
    """A model, its prompts, and how much of it is trained at once."""

    model: Path  # a folder that `from_pretrained` takes
    prompts: tuple[str, ...]
    reward: Callable[..., list[float]]
    learning_rate: float
    lora_learning_rate: float
    lora_rank: int
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig


def save_model(folder: Path) -> None:
    """A random Llama and a tokenizer of words w0 … w61, <pad> and <eos>."""
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    ).save_pretrained(folder)
    set_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            pad_token_id=VOCABULARY - 2,
            eos_token_id=VOCABULARY - 1,
        )
    ).save_pretrained(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Likes words of small number."""
    return [
        sum(1.0 - int(word[1:]) / VOCABULARY for word in text.split() if word.startswith("w")) / 8
        for text in completions
    ]


def words_task(folder: Path) -> Task:
    """The model of `save_model`, 16 completions of up to 8 words a generation."""
    return Task(
        model=folder,
        prompts=tuple(f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4) for i in range(48)),
        reward=reward,
        learning_rate=3e-3,
        lora_learning_rate=3e-3,
        lora_rank=4,
        options={"max_completion_length": 8},
    )


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Likes digits: every completion scores, so that every group has spread."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def sums_task(model: str) -> Task:
    """A language model on `a + b =`, 8 completions of up to 8 tokens a generation: a second or two a step.

    Args:
        model: a folder with safetensors, or `package:NAME` of a Python package that ships one as GGUF.
    """
    return Task(
        model=Path(resolve_source(model)),
        prompts=tuple(f"{3 + 5 * i % 41} + {2 + 7 * i % 37} =" for i in range(48)),
        reward=share_of_digits,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        lora_rank=8,
        options={"max_completion_length": 8, "per_device_train_batch_size": 2},
    )
