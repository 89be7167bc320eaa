"""One run of one of the three GRPO trainers, and how far apart two runs are."""

from __future__ import annotations

import ctypes
import gc
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoTokenizer, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from grpo_fast.integrations.trl import FastGRPOTrainer, patched

from .trl_tasks import Task

SEED = 7
TIMED = ("time", "runtime", "per_second", "flos")
VARIANTS = {
    "TRL": (GRPOTrainer, nullcontext),
    "patched": (GRPOTrainer, patched),
    "FastGRPOTrainer": (FastGRPOTrainer, nullcontext),
}
Log = list[dict[str, float]]  # one entry a step


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    loss_type: str
    lora: bool = False
    precision: str = "float32"  # of the forward: "bfloat16" is TRL's autocast over float32 weights
    options: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig

    @property
    def name(self) -> str:
        return f"{self.loss_type}, {'LoRA' if self.lora else 'full'}, {self.precision}"


@dataclass(frozen=True)
class Run:
    """What one trainer logged."""

    history: Log
    samples: list[Tensor]  # (B, T) int64 a generation: prompts and what was sampled after them
    seconds: float
    peak_bytes: int | None  # of the GPU where there is one, else of this process


def train(
    setting: Setting,
    trainer: Callable[..., GRPOTrainer],
    task: Task,
    steps: int,
    samples: list[Tensor] | None = None,
) -> Run:
    """One run of one trainer class, from the same weights and seed as any other.

    Args:
        samples: those of another run, to train on in place of sampling.
    """
    with tempfile.TemporaryDirectory() as folder:
        set_seed(SEED)
        built = trainer(
            model=str(task.model),
            reward_funcs=task.reward,
            args=_config(setting, task, steps, folder),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in task.prompts]),
            processing_class=AutoTokenizer.from_pretrained(task.model),
            peft_config=LoraConfig(r=task.lora_rank, target_modules="all-linear") if setting.lora else None,
        )
        built.remove_callback(PrinterCallback)
        sampled = _watch_sampling(built.model, samples)
        _reset_peak()
        start = time.perf_counter()
        built.train()
        seconds = time.perf_counter() - start
    return Run([entry for entry in built.state.log_history if "loss" in entry], sampled, seconds, _peak())


def side_by_side(setting: Setting, task: Task, steps: int, same_samples: bool = False) -> dict[str, Run]:
    """The three trainers, one after the other; in bfloat16 also TRL's in float32, for the size of rounding.

    Args:
        same_samples: the others train on what the first sampled.
    """
    runs: dict[str, Run] = {}
    for name, (trainer, context) in VARIANTS.items():
        samples = runs["TRL"].samples if runs and same_samples else None
        with context():
            runs[name] = train(setting, trainer, task, steps, samples)
        gc.collect()
    if setting.precision == "bfloat16":
        exact = replace(setting, precision="float32")
        runs["TRL in float32"] = train(exact, GRPOTrainer, task, steps, runs["TRL"].samples)
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
            largest[name] = max(largest.get(name, 0.0), _gap(mine[name], other[name]))
    return largest


def first_flip(a: Run, b: Run) -> int | None:
    """The first step (from 0) that trains on another sampled token; None: every token is the same.

    Rounding moves the weights apart by some 1e-7 of a step, and now and then a random draw falls between
    the two distributions. From that token on the runs see other data: their numbers are no longer comparable.
    """
    per_generation = -(-len(a.history) // max(1, len(a.samples)))
    for generation, (mine, other) in enumerate(zip(a.samples, b.samples, strict=True)):
        if not torch.equal(mine, other):
            return generation * per_generation
    return None


def _gap(mine: float | None, other: float | None) -> float:
    undefined = [value is None or math.isnan(value) for value in (mine, other)]
    if any(undefined):
        return 0.0 if all(undefined) else math.inf
    return abs(mine - other) / max(1.0, abs(mine))


def _config(setting: Setting, task: Task, steps: int, folder: str) -> GRPOConfig:
    """Two micro-batches a step, two steps a generation, KL, a clip range that is reached."""
    basic = {
        "output_dir": folder,
        "use_cpu": not torch.cuda.is_available(),
        "loss_type": setting.loss_type,
        "importance_sampling_level": "sequence" if setting.loss_type == "luspo" else "token",
        "beta": 0.05,
        "epsilon": 0.05,
        "epsilon_high": 1.05 if setting.loss_type == "cispo" else 0.08,
        "max_steps": steps,
        "learning_rate": task.lora_learning_rate if setting.lora else task.learning_rate,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": setting.precision == "bfloat16",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": SEED,
    }
    return GRPOConfig(**{**basic, **task.options, **setting.options})


def _watch_sampling(model: torch.nn.Module, samples: list[Tensor] | None) -> list[Tensor]:
    """The list fills with what `generate` returns, which is `samples`, one by one, where given."""
    sample, seen = model.generate, []
    replayed = iter(samples or ())

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        result = sample(*args, **kwargs) if samples is None else next(replayed).to(model.device)
        seen.append(result.cpu())
        torch.manual_seed(SEED + len(seen))  # TRL shuffles next, and sampling drew what a replay did not
        return result

    model.generate = generate
    return seen


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif (clear := Path("/proc/self/clear_refs")).exists():
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # what an earlier run freed goes back to the system
        clear.write_text("5")  # the kernel's word for it: forget the peak of the resident set


def _peak() -> int | None:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
