"""TRL's GRPOTrainer as it is, patched, and ours, side by side: `python -m benchmarks.trl_side_by_side`.

Same seed, same data, a small random model made on the spot. For every loss that TRL offers, with full
fine-tuning and with LoRA, it prints the largest differences of loss, gradient norm and metrics.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from grpo_fast.integrations.recipe import LOSS_TYPES
from grpo_fast.integrations.trl import FastGRPOTrainer, patched

VOCABULARY = 64
Log = list[dict[str, float]]  # one entry a step
TIMED = ("time", "runtime", "per_second", "flos")


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    loss_type: str
    lora: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig

    @property
    def name(self) -> str:
        return f"{self.loss_type}, {'LoRA' if self.lora else 'full'}"


@dataclass(frozen=True)
class Run:
    """What one trainer logged."""

    history: Log
    seconds: float
    peak_bytes: int | None  # of the GPU, where there is one


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


def train(setting: Setting, trainer: Callable[..., GRPOTrainer], folder: Path, steps: int) -> Run:
    """One run of one trainer class, from the same weights and seed as any other."""
    defaults = {
        "output_dir": str(folder / "out"),
        "use_cpu": not torch.cuda.is_available(),
        "loss_type": setting.loss_type,
        "importance_sampling_level": "sequence" if setting.loss_type == "luspo" else "token",
        "beta": 0.05,
        "epsilon": 0.05,
        "epsilon_high": 1.05 if setting.loss_type == "cispo" else 0.08,
        "max_steps": steps,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
    }
    set_seed(7)
    built = trainer(
        model=str(folder),
        reward_funcs=reward,
        args=GRPOConfig(**{**defaults, **setting.options}),
        train_dataset=Dataset.from_list(
            [{"prompt": f"w{i} w{(7 * i) % 50}" + " w3" * (i % 4)} for i in range(48)]
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if setting.lora else None,
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    built.train()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return Run([entry for entry in built.state.log_history if "loss" in entry], seconds, peak)


def side_by_side(setting: Setting, folder: Path, steps: int) -> dict[str, Run]:
    """The three trainers, one after the other."""
    variants = (
        ("TRL", GRPOTrainer, nullcontext),
        ("patched", GRPOTrainer, patched),
        ("FastGRPOTrainer", FastGRPOTrainer, nullcontext),
    )
    runs = {}
    for name, trainer, context in variants:
        with context():
            runs[name] = train(setting, trainer, folder, steps)
    return runs


def differences(a: Log, b: Log) -> dict[str, float]:
    """The largest difference of each logged number over the steps, relative where it is above one.

    Raises:
        ValueError: they logged different names, or one has more steps.
    """
    largest: dict[str, float] = {}
    for step, (mine, other) in enumerate(zip(a, b, strict=True)):
        names = {name for name in mine if not any(word in name for word in TIMED)}
        if names != {name for name in other if not any(word in name for word in TIMED)}:
            raise ValueError(f"step {step}: {sorted(set(mine) ^ set(other))} is logged by one trainer only")
        for name in names:
            if mine[name] is None or other[name] is None:
                gap = 0.0 if mine[name] is other[name] else float("inf")
            else:
                gap = abs(mine[name] - other[name]) / max(1.0, abs(mine[name]))
            largest[name] = max(largest.get(name, 0.0), gap)
    return largest


def table(settings: list[Setting], folder: Path, steps: int) -> Iterator[str]:
    """Markdown, row by row."""
    yield "| loss | variant | loss | grad norm | worst metric | its difference | seconds | peak MiB |"
    yield "|---|---|---|---|---|---|---|---|"
    for setting in settings:
        runs = side_by_side(setting, folder, steps)
        for name, run in runs.items():
            gaps = differences(runs["TRL"].history, run.history)
            metrics = {key: gap for key, gap in gaps.items() if key not in ("loss", "grad_norm")}
            worst = max(metrics, key=metrics.__getitem__)
            where = worst if metrics[worst] else "-"
            memory = "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f}"
            yield (
                f"| {setting.name} | {name} | {gaps['loss']:.1e} | {gaps['grad_norm']:.1e} "
                f"| {where} | {metrics[worst]:.1e} | {run.seconds:.1f} | {memory} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    disable_progress_bars()
    disable_progress_bar()
    settings = [Setting(loss_type, lora) for lora in (False, True) for loss_type in LOSS_TYPES]
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        for line in table(settings, Path(name), arguments.steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()
