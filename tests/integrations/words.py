"""A tiny model of words, and TRL's trainers on it: what they log of each step, and how far apart two are."""

from __future__ import annotations

import itertools
import math
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


def train_words(
    kind: Callable[..., Any], folder: Path, loss_type: str, steps: int, *, lora: bool = False, **options: Any
) -> list[dict[str, float]]:
    """Return what a trainer with TRL's interface logs of each step, on the model saved there.

    16 completions of up to 8 words a generation, two micro-batches a step, two steps a generation, KL, a clip
    range that is reached; from the same weights, prompts and seed as any other. `options` are GRPOConfig's.
    """
    from trl import GRPOConfig

    usual = {
        **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1, "bf16": False},
        **{"max_steps": steps, "use_cpu": not torch.cuda.is_available(), "loss_type": loss_type},
        **{"beta": 0.05, "epsilon": 0.05, "epsilon_high": 0.08, "learning_rate": 3e-3, "seed": SEED},
        **{"max_completion_length": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        **{"steps_per_generation": 4, "num_generations": 4, "model_init_kwargs": {"dtype": "float32"}},
    }
    prompts = [f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4) for i in range(48)]
    set_seed(SEED)
    with tempfile.TemporaryDirectory() as output:
        trainer = kind(
            model=str(folder),
            reward_funcs=small_words,
            args=GRPOConfig(output_dir=output, **usual | options),
            # With a fingerprint, because some versions of pyarrow cannot be hashed.
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
        )
        trainer.remove_callback(PrinterCallback)
        generate, generated = trainer.model.generate, itertools.count(SEED + 1)

        def seeded(*args: Any, **kwargs: Any) -> Tensor:
            result = generate(*args, **kwargs)
            torch.manual_seed(next(generated))  # TRL shuffles next
            return result

        trainer.model.generate = seeded
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def differences(a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the largest difference of each number that two histories log, relative where it is above one.

    What one of them lacks at a step is infinitely far.
    """
    import pandas

    mine, other = (pandas.DataFrame(history, dtype=float).filter(regex=_NUMBERS) for history in (a, b))
    alone = {*mine} ^ {*other}
    assert not alone, f"{sorted(alone)} is logged by one trainer only"
    apart = (mine - other).abs() / mine.abs().clip(lower=1)
    both_lack = mine.isna() & other.isna()
    return apart.where(~both_lack, 0.0).fillna(math.inf).max().to_dict()
