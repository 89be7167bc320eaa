"""A tiny model of words, TRL's trainers on it, and a comparison of what they log."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    set_seed,
)

WORDS = 64
SEED = 7
_NUMBERS = "^(?!.*(time|per_second|flos))"  # names of what is the algorithm's
GROUPED: dict[str, Any] = {  # of GRPOConfig
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    **{"num_generations": 4, "model_init_kwargs": {"dtype": "float32"}},
}
History = list[dict[str, float]]


def save_words(folder: Path) -> None:
    """Save a random model, whose weights are large enough for rewards to move them, with one token a word."""
    names = [*(f"w{i}" for i in range(WORDS - 2)), "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    tokens = {"pad_token_id": WORDS - 2, "eos_token_id": WORDS - 1, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, **tokens)).save_pretrained(folder)


def small_words(completions: list[str], **_: Any) -> list[float]:
    """Reward words of small number."""
    words = [[word for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(1.0 - int(word[1:]) / WORDS for word in row) / 8 for row in words]


def make_trainer(
    kind: Callable[..., Any],
    folder: Path,
    rows: Sequence[dict[str, Any]],
    config: Callable[..., Any] | None = None,
    lora: bool = False,
    **options: Any,
) -> Any:
    """Make a trainer of TRL's interface on the model saved there; `options` are its configuration's."""
    import trl

    config = config or trl.GRPOConfig
    usual = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1, "bf16": False}
    usual |= {"output_dir": tempfile.gettempdir(), "use_cpu": not torch.cuda.is_available(), "seed": SEED}
    set_seed(SEED)
    trainer = kind(
        model=str(folder),
        **({"reward_funcs": small_words} if hasattr(config, "num_generations") else {}),
        args=config(**usual | options),
        # With a fingerprint, because some versions of pyarrow cannot be hashed.
        train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint="rows"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **({"peft_config": LoraConfig(r=8, target_modules="all-linear")} if lora else {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: Any) -> History:
    """Train; return what is logged of each step."""
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def train_words(
    kind: Callable[..., Any], folder: Path, loss_type: str, steps: int, **options: Any
) -> History:
    """Train the model saved there with a GRPO trainer; return what it logs of each step.

    16 completions of up to 8 words a generation, two micro-batches a step, two steps a generation, KL, a clip
    range that is reached; from the same weights, prompts and seed as any other.
    """
    usual = GROUPED | {"max_steps": steps, "loss_type": loss_type, "max_completion_length": 8}
    usual |= {"beta": 0.05, "epsilon": 0.05, "epsilon_high": 0.08, "learning_rate": 3e-3}
    rows = [{"prompt": f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4)} for i in range(48)]
    trainer = make_trainer(kind, folder, rows, **usual | options)
    generate, generated = trainer.model.generate, itertools.count(SEED + 1)

    def seeded(*args: Any, **kwargs: Any) -> Tensor:
        result = generate(*args, **kwargs)
        torch.manual_seed(next(generated))  # TRL shuffles next
        return result

    trainer.model.generate = seeded
    return train(trainer)


def assert_same_history(found: History, expected: History, noise: float = 2e-5) -> None:
    """Compare all numbers that two trainers log, but times; relatively where a number is above one."""
    import pandas

    mine, other = (pandas.DataFrame(of, dtype=float).filter(regex=_NUMBERS) for of in (found, expected))
    assert {*mine} == {*other} and len(mine) == len(other) > 0
    other = other[mine.columns]
    assert mine.isna().equals(other.isna())
    apart = ((mine - other).abs() / mine.abs().clip(lower=1)).fillna(0).max()
    assert (apart < noise).all(), apart.to_dict()
